"""Iterations of several batches at the same time: the engine's executor where staggered pipelining or
rotation may pay (Lamina, section 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer, Inline, Work
from kvcommons.engine.fair_lock import FairLock
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.slices import LocalSlices, Slices
from services.decode.staggering.lanes import LANES, BatchLane, Lanes, Tokens, share_of
from services.decode.staggering.pipelines import Division


class StaggeringPolicy(Protocol):
    """Into how many batches the sequences are divided, and who computes their slices (`Pipelining`,
    `Rotation`). Belongs to the engine's thread."""

    def batches(self, sequences: int, tokens: int) -> int: ...

    def slices(self, lane: int, here: Slices, *, unrotated: bool) -> Slices: ...

    def ended(
        self, sequences: int, tokens: int, timing: IterationTiming, *, batch: int, alone: bool
    ) -> None: ...

    def took_staggered(self, sequences: int, tokens: int, lane: BatchLane) -> None: ...


class Staggered:
    """Prompts are never in a staggered batch: while there are any, all is computed in one iteration at
    a time, and here."""

    def __init__(
        self,
        core: Core,
        composer: Composer,
        policy: StaggeringPolicy,
        *,
        model_lock: FairLock | None = None,
        close_s: float,
    ) -> None:
        """`model_lock` is of the model, where other batches compute on it too. `close_s` is how long
        iterations under way may take at the end."""
        self._composer = composer
        self._policy = policy
        self._lanes = Lanes(core.backend.device, self._post, self._landed, model_lock)
        self._here = LocalSlices(core.model, self._lanes.model_lock)
        self._alone = LocalSlices(core.model, model_lock)  # while no lane computes
        self._close_s = close_s
        self._inline = Inline(composer)
        self._division = Division()
        self._work: Work

    def check(self) -> None:
        self._inline.check()

    def advance(self, work: Work) -> bool:
        self._work = work
        if self._policy.batches(*work.load()) == 1 or work.prompts():
            # Staggered batches end first.
            return False if self._lanes.under_way else self._advance_alone(work)
        if self._division.batches == 1:
            self._division.spread(LANES)
            self._inline.changed()
        for lane in self._lanes.all * 2:  # composing one may give sequences to the one before
            if lane.iteration is None:
                self._launch(work, lane)
        if not self._lanes.under_way:
            work.idle()
        return False

    def _landed(self, lane: BatchLane, tokens: Tokens | None) -> None:
        """A lane's iteration has ended; without tokens where it failed."""
        iteration, lane.iteration = lane.iteration, None
        if iteration is None:
            return  # it was given up, and ended just then
        if tokens is not None and not iteration.failures:
            self._policy.ended(*self._work.load(), iteration.timing, batch=iteration.rows, alone=False)
        self._work.take_results(iteration, tokens)
        deferred, lane.deferred = lane.deferred, []
        for command in deferred:
            command()

    def generate(self, work: Work) -> None:
        self._inline.generate(work)

    def defer(self, key: int, command: Callable[[], None]) -> bool:
        return self._inline.defer(key, command) or self._lanes.defer(key, command)

    def changed(self) -> None:
        self._inline.changed()
        self._lanes.changed()

    def leave(self, key: int) -> None:
        self._inline.leave(key)
        self._division.leave(key)

    def close(self) -> None:
        self._lanes.close(self._close_s)

    def _post(self, command: Callable[[], None]) -> None:
        self._work.post(command)

    def _advance_alone(self, work: Work) -> bool:
        """One iteration of all that can run, here and now."""
        if self._division.batches > 1:
            self._division = Division()
            self._lanes.rest()
        slices = (lambda _: self._alone) if work.prompts() else self._slices(self._lanes.all[0], self._alone)
        iteration = self._inline.compose(work, slices)
        if iteration is None:
            return False
        tokens = self._inline.run(work, iteration)
        if tokens is not None and not iteration.failures and not work.prompts():
            self._policy.ended(*work.load(), iteration.timing, batch=iteration.rows, alone=True)
        work.take_results(iteration, tokens)
        return True

    def _launch(self, work: Work, lane: BatchLane) -> None:
        """The lane's next iteration, of its share of all that can run."""
        ready = work.make_room()
        shared = share_of(self._division, lane, ready)
        lane.batch = self._composer.batch(lane.batch, [ready[key] for key in shared])
        work.answer_switches()
        if lane.batch is None:
            lane.began_s = None
            return
        self._policy.took_staggered(*work.load(), lane)
        slices = self._slices(lane, self._here)(lane.batch.has_heads)
        lane.launch(self._composer.iteration(lane.batch, slices=slices), shared)

    def _slices(self, lane: BatchLane, here: Slices) -> Callable[[bool], Slices]:
        return lambda has_heads: self._policy.slices(lane.number, here, unrotated=has_heads)
