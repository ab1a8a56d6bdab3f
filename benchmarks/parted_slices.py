"""The parts of an iteration's time: its timing tells attention from all else, and the end of the model is
taken apart here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.slices import LocalSlices
from kvcommons.model.sampling import SamplingRow, sample
from kvcommons.model.slices import Model, State
from kvcommons.pb import common_pb2 as pb


class PartedSlices(LocalSlices):
    """Of one iteration, with the seconds that its head and its sampling take."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.seconds = {"head": 0.0, "sampling": 0.0}

    def end(
        self, timing: IterationTiming, state: State, attention: Tensor, rows: Sequence[SamplingRow]
    ) -> list[pb.SampledToken]:
        with timing.slice(nullcontext()):
            closed = self._model.close(state, attention)
            with self._part("head"):
                logits = self._model.head(closed)
            with self._part("sampling"):
                return sample(logits, rows, self._model.backend.device)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began_s


def parts_of(model: Model, run: Callable[[PartedSlices], Iteration]) -> dict[str, float]:
    """Seconds of the parts of an iteration, which are all of it: `matrices` are the layers' slices, `rest` is
    what is left. `run` carries it out with these slices."""
    slices = PartedSlices(model)
    timing = run(slices).timing
    found = {
        "matrices": timing.slices_s - sum(slices.seconds.values()),
        "attention": timing.here_s,
        **slices.seconds,
    }
    return found | {"rest": timing.own_s - sum(found.values())}
