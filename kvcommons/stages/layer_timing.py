"""What each layer of a model takes on this machine, by which it is divided over stages (Mnemosyne, section
4.3)."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcommons.engine.calibration import UnsentChunk, unsent_sequences
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import Rows
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.settings import EngineSettings
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.layer_ranges import LayerTimes
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.stages.iteration import StageIteration

log = logging.getLogger(__name__)

_CONTEXT_TOKENS = 2048  # at most: their memory becomes resident
_REPEATS = 3
_S = 1.0  # nobody is asked for anything in these iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """An iteration of stages: a chunk of so many `rows`, or so many sequences that generate."""

    rows: int
    generates: bool

    def estimate(self, spec: ModelSpec) -> LayerTimes:
        """Of a prompt's chunk one row at most meets the head, of a batch all do."""
        sampled = self.rows if self.generates else 1
        return LayerTimes.estimate(spec, rows=self.rows, sampled=sampled, context=spec.context_window // 2)


def measured_times(
    settings: EngineSettings, spec: ModelSpec, rank: TensorRank, work: StageWork
) -> LayerTimes:
    """Layers that have the same shape take the same: of each kind one is loaded by itself, and computed for a
    part of `settings.calibrate_s`, once at least. The first has the embedding, the last the head; a chunk is
    not its prompt's last, and of a rank the sums over all of them are left out. Raises InvalidInput, as
    `load_core` does."""
    kinds = [(layer == 0, layer == spec.layers - 1, window) for layer, window in enumerate(spec.windows)]
    began_s, known = time.monotonic(), dict[tuple[bool, bool, int | None], float]()
    each_s = settings.calibrate_s / len(set(kinds))
    for layer, kind in enumerate(kinds):
        if kind not in known:
            known[kind] = _seconds(settings, range(layer, layer + 1), spec, rank, work, each_s)
    log.info(
        "what layers take was measured",
        extra={"kinds": len(known), "seconds": round(time.monotonic() - began_s, 2)},
    )
    return LayerTimes(layers=tuple(known[kind] for kind in kinds))


def _seconds(
    settings: EngineSettings,
    layers: range,
    spec: ModelSpec,
    rank: TensorRank,
    work: StageWork,
    seconds_max: float,
) -> float:
    """The least that an iteration took."""
    context = min(_CONTEXT_TOKENS, spec.context_window - 1)
    blocks = -(-context // settings.block_tokens)
    alone = replace(settings, capacity_tokens=blocks * settings.block_tokens, touch_memory=True)
    core = load_core(alone, layers, rank, _unchanged if rank.ranks > 1 else None)

    def least_s() -> float:
        torch.set_num_threads(settings.threads)
        reserved = core.allocator.allocate(blocks)
        entering = None if core.model.first else torch.zeros((work.rows, spec.hidden), dtype=core.model.dtype)
        began_s, best_s = time.monotonic(), float("inf")
        with torch.inference_mode():
            for repeat in range(1 + _REPEATS):  # the first one pays for what is made lazily
                iteration = StageIteration(core, [_rows(core, work, context, reserved)], entering)
                iteration.run()
                if iteration.failures:
                    raise iteration.failures[0]
                over = time.monotonic() - began_s > seconds_max
                if repeat or over:
                    best_s = min(best_s, iteration.timing.own_s)
                if over:
                    break
        return best_s

    # On a thread that ends, as in `load_core`.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="time-layers") as thread:
        return thread.submit(least_s).result()


def _rows(core: Core, work: StageWork, context: int, blocks: list[int]) -> Rows:
    if not work.generates:
        return UnsentChunk(core, range(max(context - work.rows, 0), context), blocks)
    composer = Composer(
        core, RemoteAttention(core.layout, core.backend, AttentionBudget(_S)), attend_deadline_s=_S
    )
    batch = composer.batch(None, unsent_sequences(core, work.rows, blocks))
    assert batch is not None
    return composer.rows(batch)


def _unchanged(summand: Tensor) -> Tensor:
    return summand
