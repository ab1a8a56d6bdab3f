"""What each layer of a model takes on this machine, by which it is divided over stages (Mnemosyne, section
4.3)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvcommons.engine.calibration import unsent_composer, unsent_sequences
from kvcommons.engine.chunk_rows import InnerChunk
from kvcommons.engine.core import Core, backend_of, make_core, on_own_thread
from kvcommons.engine.iteration import Rows
from kvcommons.engine.settings import EngineSettings
from kvcommons.model.layer_ranges import LayerTimes
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, model_info, resolve_folder
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.stages.iteration import StageIteration

log = logging.getLogger(__name__)

_CONTEXT_TOKENS = 2048  # at most: their memory becomes resident
_REPEATS = 3


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
    `Model.load` does."""
    return on_own_thread("time-layers", settings, partial(_measured, settings, spec, rank, work))


def _measured(settings: EngineSettings, spec: ModelSpec, rank: TensorRank, work: StageWork) -> LayerTimes:
    folder, backend = resolve_folder(settings.model), backend_of(settings, spec)
    info = model_info("", spec, bytes(32), settings.dtype, settings.block_tokens)  # nobody asks which it is
    context = min(_CONTEXT_TOKENS, spec.context_window - 1)
    blocks = -(-context // settings.block_tokens)
    kinds = [(layer == 0, layer == spec.layers - 1, window) for layer, window in enumerate(spec.windows)]
    began_s, known = time.monotonic(), dict[tuple[bool, bool, int | None], float]()
    each_s = settings.calibrate_s / len(set(kinds))
    for layer, kind in enumerate(kinds):
        if kind not in known:
            model = Model.load(
                folder,
                dtype=settings.dtype,
                backend=backend,
                layers=range(layer, layer + 1),
                rank=rank,
                sum_ranks=_unchanged if rank.ranks > 1 else None,
            )
            core = make_core(model, info, capacity_tokens=blocks * settings.block_tokens)
            core.memory.touch()
            known[kind] = _least_s(core, work, context, core.allocator.allocate(blocks), each_s)
    log.info(
        "what layers take was measured",
        extra={"kinds": len(known), "seconds": round(time.monotonic() - began_s, 2)},
    )
    return LayerTimes(layers=tuple(known[kind] for kind in kinds))


def _least_s(core: Core, work: StageWork, context: int, blocks: list[int], seconds_max: float) -> float:
    """Of an iteration of one layer."""
    began_s, best_s = time.monotonic(), float("inf")
    with torch.inference_mode():
        for repeat in range(1 + _REPEATS):  # the first one pays for what is made lazily
            rows, model = _rows(core, work, context, blocks), core.model
            entering = None
            if not model.first:
                entering = torch.zeros((len(rows.tokens), model.spec.hidden), dtype=model.dtype)
            iteration = StageIteration(core, [rows], entering)
            iteration.run()
            if iteration.failures:
                raise iteration.failures[0]
            over = time.monotonic() - began_s > seconds_max
            if repeat or over:
                best_s = min(best_s, iteration.timing.own_s)
            if over:
                break
    return best_s


def _rows(core: Core, work: StageWork, context: int, blocks: list[int]) -> Rows:
    if not work.generates:
        return InnerChunk(core, range(max(context - work.rows, 0), context), blocks)
    composer = unsent_composer(core)
    batch = composer.batch(None, unsent_sequences(core, work.rows, blocks))
    assert batch is not None
    return composer.rows(batch)


def _unchanged(summand: Tensor) -> Tensor:
    return summand
