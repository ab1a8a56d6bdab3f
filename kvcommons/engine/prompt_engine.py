"""An engine in which prompts are computed and handed over: no sequence generates here."""

from __future__ import annotations

from collections.abc import Callable

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.engine import Engine
from kvcommons.engine.executor import Composer, Executor, Inline
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import RemoteRun, Sequence
from kvcommons.holder.budget import AttentionBudget

_TBT_S = 1.0  # nobody asks: such an instance lends nothing
_ATTEND_DEADLINE_S = 1.0  # likewise: it borrows nothing


class _NoGeneration:
    """Callbacks and metrics that nothing calls."""

    def deliver(self, steps: list[SequenceUpdate]) -> None:
        raise AssertionError("no sequence generates here")

    def borrow(self, sequence: Sequence) -> None:
        raise AssertionError("no sequence generates here")

    def give_back(self, runs: list[RemoteRun]) -> None:
        raise AssertionError("no sequence borrows here")

    def save_remote(self, run: RemoteRun, sequence: Sequence, index: int) -> None:
        raise AssertionError("no sequence borrows here")

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        raise AssertionError("no sequence generates here")

    def verified(self, drafted: int, accepted: int) -> None:
        raise AssertionError("no sequence generates here")

    def ended(self, step: SequenceUpdate) -> None:
        raise AssertionError("no sequence generates here")


def prompt_engine(
    core: Core,
    scheduler: Scheduler,
    prompts: Prompts,
    keeper: BlockKeeper,
    core_lock: CoreLock | None = None,
    executor: Callable[[Composer], Executor] = Inline,
) -> Engine:
    """Not started yet."""
    nobody, budget = _NoGeneration(), AttentionBudget(_TBT_S)
    remote = RemoteAttention(core.layout, core.backend, budget)
    return Engine(
        core,
        scheduler=scheduler,
        executor=executor(Composer(core, remote, attend_deadline_s=_ATTEND_DEADLINE_S)),
        prompts=prompts,
        may_borrow=False,
        budget=budget,
        keeper=keeper,
        callbacks=nobody,
        metrics=nobody,
        core_lock=core_lock,
    )
