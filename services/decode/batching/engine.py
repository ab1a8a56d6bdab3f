"""The engine of a decode instance."""

from __future__ import annotations

import math

from kvcommons.engine.callbacks import EngineCallbacks, EngineMetrics
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.drafts.model import DraftModel
from kvcommons.engine.drafts.speculation import Speculation
from kvcommons.engine.engine import Engine
from kvcommons.engine.executor import Composer, Executor
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.scheduler import Scheduler
from kvcommons.holder.budget import AttentionBudget
from kvcommons.stages.executor import Pipelined
from kvcommons.stages.group import StageGroup
from services.decode.staggering.executor import Staggered
from services.decode.staggering.lanes import Mode, Pipelining
from services.decode.staggering.mini_batches import MiniBatches
from services.decode.staggering.rotation import Rotation


def decode_engine(
    core: Core,
    *,
    scheduler: Scheduler,
    may_borrow: bool,
    attend_deadline_s: float,
    budget: AttentionBudget,
    keeper: BlockKeeper,
    callbacks: EngineCallbacks,
    metrics: EngineMetrics,
    pipelining: Mode = "auto",
    mini_batches: int = 0,
    rotation: Rotation | None = None,
    prompts: Prompts | None = None,
    predictor: Predictor | None = None,
    max_draft_tokens: int = 0,
    draft_model: DraftModel | None = None,
    tbt_objective_s: float = math.inf,
    core_lock: CoreLock | None = None,
    stages: StageGroup | None = None,
) -> Engine:
    """Not started yet. `attend_deadline_s` bounds what a layer waits for other holders. `budget` takes
    the length of iterations. `pipelining` says whether two batches alternate; "auto"
    does it where it pays. With `rotation` the batches of several instances alternate instead. `prompts` are
    those of `scheduler`, where some are computed here. At most `max_draft_tokens` of a sequence are verified
    in an iteration, which keeps to `tbt_objective_s`, or to what its sequences were promised; none in stages
    or with `rotation`; `draft_model` is asked for some. `core_lock` is given where other engines of the host
    share its cores; staggered batches do not wait for it. With `stages` this is the first of several, and
    batches alternate in them."""
    remote = RemoteAttention(core.layout, core.backend, budget, MiniBatches(mini_batches))
    composer = Composer(core, remote, attend_deadline_s=attend_deadline_s)
    executor: Executor
    predictor = predictor or (prompts.predictor if prompts is not None else Predictor())
    speculation: Speculation | None = None
    if max_draft_tokens and stages is None and rotation is None:
        speculation = Speculation(
            predictor,
            max_draft_tokens=max_draft_tokens,
            tbt_objective_s=tbt_objective_s,
            token_bytes=core.layout.block_bytes // core.block_tokens,
            model=draft_model,
        )
    if stages is not None:
        executor = Pipelined(core, composer, stages)
    else:
        executor = Staggered(
            core,
            composer,
            rotation or Pipelining(pipelining, core.layout.layers),
            model_lock=rotation.model_lock if rotation else None,
            close_s=2 * attend_deadline_s,
        )
    return Engine(
        core,
        scheduler=scheduler,
        executor=executor,
        prompts=prompts,
        predictor=predictor,
        speculation=speculation,
        may_borrow=may_borrow,
        budget=budget,
        keeper=keeper,
        callbacks=callbacks,
        metrics=metrics,
        core_lock=core_lock,
        shares=stages is None,
    )
