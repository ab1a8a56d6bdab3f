"""What iterations take on this machine: measured at the start, kept from one start to the next (Mnemosyne,
section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvcommons.backend.choice import kernels_version, processor
from kvcommons.engine.chunk_rows import InnerChunk
from kvcommons.engine.core import Core, on_own_thread
from kvcommons.engine.core_lock import CoreLock
from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import Iteration, Rows
from kvcommons.engine.kept import Kept
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun
from kvcommons.engine.sequence import Sequence as Generating
from kvcommons.engine.settings import EngineSettings
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import SALT_BYTES

_ROOM_TOKENS = 2048  # of context, at most: their memory becomes resident
_CONTEXT_TOKENS = 512  # of each sequence that generates
_BATCHES = (1, 8)
_CHUNKS = (32, 128, 512)
_REPEATS = 3
_S = 1.0  # nobody waits for these iterations, nor do they for others


Iterations = Callable[[Core, Sequence[Rows]], Iteration]


class Calibration:
    """Iterations of chunks, and of tokens where sequences generate here, in blocks that are free. The first
    one is not learnt from: it pays for what is made lazily."""

    def __init__(
        self, core: Core, *, chunk_tokens: int, generates: bool, iterations: Iterations = Iteration
    ) -> None:
        """`iterations`: what carries out rows over the core's layers."""
        self._core = core
        self._made = iterations
        free = min(_ROOM_TOKENS, core.info.context_window - 1, core.allocator.free * core.block_tokens)
        self._tokens_free = free - free % core.block_tokens
        self._chunks = sorted({min(tokens, chunk_tokens, self._tokens_free) for tokens in _CHUNKS})
        self._batches = _BATCHES if generates else ()
        self._composer = unsent_composer(core)

    def run(
        self,
        predictor: Predictor,
        *,
        seconds_max: float,
        share: float = 1.0,
        core_lock: CoreLock | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For about so long at most, each iteration with `core_lock`. Whatever it measured, the predictor has
        learnt; where the layers here take a `share` of an iteration, what all of it takes."""
        if not self._tokens_free:
            return
        blocks = self._core.allocator.allocate(self._tokens_free // self._core.block_tokens)
        began_s = clock()
        try:
            with torch.inference_mode():
                for number, iteration in enumerate(self._iterations(blocks)):
                    if core_lock is not None:
                        core_lock.acquire(urgent=False)
                    try:
                        iteration.run()
                    finally:
                        if core_lock is not None:
                            core_lock.release()
                    if iteration.failures:
                        raise iteration.failures[0]
                    if number:
                        predictor.learn(iteration.work, iteration.timing.own_s / share)
                    if clock() - began_s > seconds_max:
                        break
        finally:
            self._core.allocator.release(blocks)

    def _iterations(self, blocks: list[int]) -> Iterator[Iteration]:
        for _ in range(_REPEATS):
            for tokens in self._chunks:
                yield self._made(self._core, [InnerChunk(self._core, range(tokens), blocks)])
            last = self._chunks[-1]
            for sequences in self._batches:
                batch = self._composer.batch(None, unsent_sequences(self._core, sequences, blocks))
                assert batch is not None
                yield self._made(self._core, [self._composer.rows(batch)])
            late = InnerChunk(self._core, range(self._tokens_free - last, self._tokens_free), blocks)
            yield self._made(self._core, [late])


def unsent_composer(core: Core) -> Composer:
    """Of iterations that ask no other holder."""
    remote = RemoteAttention(core.layout, core.backend, AttentionBudget(_S))
    return Composer(core, remote, attend_deadline_s=_S)


def unsent_sequences(core: Core, count: int, blocks: list[int]) -> list[Generating]:
    """So many that generate, and that nobody sent, each in blocks of its own, as far as there are so many:
    KV is not read twice."""
    size = core.block_tokens
    each = max(min(_CONTEXT_TOKENS // size, len(blocks)), 1)
    made = []
    for number in range(count):
        first = number * each % (len(blocks) - each + 1)
        request = Request(
            request_id="calibration", session_id="", tenant="", salt=bytes(SALT_BYTES),
            tokens=(0,) * (each * size), prompt_tokens=each * size, sampling=SamplingParams(),
            store_control="", store_data="", matched_blocks=0, no_reuse=True,
        )  # fmt: skip
        sequence = Generating(key=number, request=request, block_tokens=size, chain=request.chain(core.info))
        sequence.append_run(LocalRun(first_block=0, blocks=blocks[first : first + each]))
        sequence.computed = each * size - 1
        made.append(sequence)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPredictor:
    """A file with what a predictor has learnt: another machine, model, number of threads, version of the
    compiled kernels or form of the weights makes it worthless."""

    kept: Kept
    model: Mapping[str, Any]  # which it is, for who plans with other models: config.json, how many layers

    @classmethod
    def of(cls, settings: EngineSettings, core: Core) -> KeptPredictor:
        model = f"{core.info.fingerprint.hex()} {core.layers}"
        if len(core.layers) < core.info.layers:
            model += " through all stages"
        if core.model.rank.ranks > 1:
            model += f" in {core.model.rank.ranks} ranks"
        products = core.backend.operators.multiplies
        return cls(
            kept=Kept.of(settings.predictor_file, model, *machine_facts(settings), products),
            model={"config": core.model.spec.config, "layers": len(core.layers)},
        )

    def read(self) -> Predictor | None:
        """None where there is none, or none of this machine and model."""
        return self.kept.read(Predictor.of)

    def write(self, predictor: Predictor) -> None:
        self.kept.write(predictor.learnt() | {"of": self.model})


def machine_facts(settings: EngineSettings) -> tuple[str, ...]:
    """On which what was measured depends, whatever the model."""
    return processor(), settings.device, str(settings.threads), kernels_version()


def calibrated(
    core: Core,
    settings: EngineSettings,
    *,
    chunk_tokens: int,
    generates: bool,
    core_lock: str,
    share: float = 1.0,
    iterations: Iterations = Iteration,
) -> tuple[Predictor, KeptPredictor]:
    """What is known of a core, as it was kept, or else as it is measured for some seconds: alone on the
    cores, where engines of the host share them. `share`: what its layers take of an iteration, whose rest
    other stages compute."""

    def measure(predictor: Predictor) -> None:
        calibration = Calibration(core, chunk_tokens=chunk_tokens, generates=generates, iterations=iterations)
        lock = CoreLock(Path(core_lock)) if core_lock else None
        try:
            calibration.run(predictor, seconds_max=settings.calibrate_s, share=share, core_lock=lock)
        finally:
            if lock is not None:
                lock.close()

    kept = KeptPredictor.of(settings, core)
    predictor = kept.read()
    if predictor is None:
        predictor = Predictor()
        if settings.calibrate_s:
            on_own_thread("calibrate", settings, partial(measure, predictor))
        kept.write(predictor)
    return predictor, kept
