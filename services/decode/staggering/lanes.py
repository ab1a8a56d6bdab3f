"""Two batches at the same time: one's slices are computed while the other's attention is at the pool (Lamina,
section 5.1). Each has a thread; the engine's thread composes them and takes in what they made."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch

from kvcommons.backend.interface import Device
from kvcommons.engine.batch import Batch, holder_of
from kvcommons.engine.fair_lock import FairLock
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.sequence import Sequence
from kvcommons.engine.slices import Slices
from kvcommons.pb import common_pb2 as pb
from services.decode.staggering.pipelines import Division, Rotational, Staggering, Timing

Mode = Literal["auto", "on", "off"]
Tokens = list[list[pb.SampledToken]]  # of an iteration, by group
READY_S = 10.0  # for a thread to begin
LANES = 2  # of one model replica; more batches need more replicas: rotation.py


class BatchLane:
    """One batch. All but the iteration itself belongs to the engine's thread."""

    def __init__(
        self, number: int, landed: Callable[[BatchLane, Tokens | None], None], threads: int | None
    ) -> None:
        """`landed` is called on the lane's thread when an iteration has ended; without tokens where it
        failed. `threads`: of the model's operators; None: as many as others have."""
        self.number = number
        self._threads = threads
        self._ready = threading.Event()
        self.batch: Batch | None = None  # the one before, as long as nothing but its lengths has changed
        self.iteration: Iteration | None = None  # under way
        self._keys: frozenset[int] = frozenset()  # of sequences in it
        self.deferred: list[Callable[[], None]] = []  # about its sequences, for after the iteration
        self.began_s: float | None = None
        self._landed = landed
        self._iterations: queue.SimpleQueue[Iteration | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"decode-lane-{number}", daemon=True)

    def launch(self, iteration: Iteration, keys: Iterable[int]) -> None:
        """`keys`: of its sequences."""
        if self._thread.ident is None:
            threads = torch.get_num_threads()
            self._thread.start()
            self._ready.wait(READY_S)
            torch.set_num_threads(threads)  # for threads to come: the lane's own number became theirs
        self.iteration, self._keys = iteration, frozenset(keys)
        self._iterations.put(iteration)

    def has(self, key: int) -> bool:
        """Whether a sequence is in the iteration under way."""
        return self.iteration is not None and key in self._keys

    def close(self, timeout_s: float) -> None:
        """What has ended by then is landed yet; an iteration that has not is given up."""
        if self._thread.ident is None:
            return
        self._iterations.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.iteration = None

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._ready.set()
        with torch.inference_mode():
            while (iteration := self._iterations.get()) is not None:
                self._landed(self, iteration.run_or_fail())


class Lanes:
    """All of them."""

    def __init__(
        self,
        device: Device,
        post: Callable[[Callable[[], None]], None],
        land: Callable[[BatchLane, Tokens | None], None],
        model_lock: FairLock | None = None,
    ) -> None:
        """Each with its share of the cores, where there are so many: they are replicas then, and need no
        turns. Else they share one, and hold `model_lock` with other batches, one at a time. `land` is posted
        when an iteration has ended."""
        threads = torch.get_num_threads()
        apart = model_lock is None and device.host and threads >= LANES
        share = threads // LANES if apart else None

        def landed(lane: BatchLane, tokens: Tokens | None) -> None:
            post(lambda: land(lane, tokens))

        self.all = [BatchLane(number, landed, share) for number in range(LANES)]
        self.model_lock = None if apart else model_lock or FairLock()  # at the model

    @property
    def under_way(self) -> bool:
        return any(lane.iteration is not None for lane in self.all)

    def defer(self, key: int, command: Callable[[], None]) -> bool:
        """Whether the sequence is in an iteration under way: the command waits for its end."""
        for lane in self.all:
            if lane.has(key):
                lane.deferred.append(command)
                return True
        return False

    def changed(self) -> None:
        """Blocks of some sequence are others now: batches are composed anew."""
        for lane in self.all:
            lane.batch = None

    def rest(self) -> None:
        """They do not alternate any more."""
        self.changed()
        for lane in self.all:
            lane.began_s = None

    def close(self, timeout_s: float) -> None:
        """Waits for iterations under way."""
        for lane in self.all:
            lane.close(timeout_s)


def share_of(division: Division, lane: BatchLane, able: Mapping[int, Sequence]) -> list[int]:
    """The lane's of all sequences that can run."""
    tokens = {key: len(sequence.tokens) for key, sequence in able.items()}
    holders = {key: holder_of(sequence) for key, sequence in able.items()}
    return division.compose(lane.number, tokens, holders)


def timing_of(timing: IterationTiming, layers: int) -> Timing:
    """Of one layer, on the average, of an iteration whose slices were computed here."""
    return Timing(
        slice_s=timing.computed_s / layers,
        attend_s=timing.pool_s / layers,
        network_s=timing.network_s / layers,
    )


_WITHOUT_POOL = 2 * LANES  # iterations: of one lane's batch all KV may be here while the other's is not


class Pipelining:
    """Into how many batches the sequences are divided, from what was measured. Belongs to the engine's
    thread."""

    def __init__(self, mode: Mode, layers: int) -> None:
        self._mode = mode
        self._layers = layers
        self._staggering = Staggering(Rotational(LANES))
        self._without_pool = 0  # iterations in a row in which nobody else attended

    def batches(self, sequences: int, tokens: int) -> int:
        """`sequences` can run, whose KV is of so many tokens."""
        if self._mode == "on" and sequences >= LANES:
            return LANES
        if self._mode == "off" or sequences < LANES or self._without_pool >= _WITHOUT_POOL:
            self._staggering.give_up()
            return 1
        return self._staggering.decide(sequences, tokens)

    def gain(self, sequences: int, tokens: int) -> float:
        """Of what `batches` said last, over one batch. Never 0."""
        gain = self._staggering.gain(sequences, tokens) if self._staggering.on else 0.0
        return gain or 1.0

    def slices(self, lane: int, here: Slices, *, unrotated: bool) -> Slices:
        """For the next iteration of a lane's batch."""
        return here

    def ended(self, sequences: int, tokens: int, timing: IterationTiming, *, batch: int, alone: bool) -> None:
        """An iteration of `batch` sequences; `alone`: of the one batch, into which they are divided."""
        if alone:
            self._staggering.took_alone(sequences, tokens, timing_of(timing, self._layers))
        self._without_pool = 0 if timing.pool_s else self._without_pool + 1

    def took_staggered(self, sequences: int, tokens: int, lane: BatchLane) -> None:
        """A lane's next iteration begins. `sequences` and `tokens` are of all lanes."""
        now_s = time.monotonic()
        if lane.began_s is not None:
            self._staggering.took_staggered(sequences, tokens, (now_s - lane.began_s) / self._layers)
        lane.began_s = now_s
