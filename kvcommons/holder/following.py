"""Layer after layer without the interpreter: what follows an answered request on its connection.

A layer's partial is asked for about every millisecond, and most of what it cost beside its keys was Python
whose code the weights had driven out of the caches since the layer before."""

from __future__ import annotations

import threading

from kvcommons.attention.native.serve import Outcome, Served, Serving, Stage, Turn
from kvcommons.errors import DeadlineExceeded, StaleEpoch, Unavailable
from kvcommons.holder.holder import Holder
from kvcommons.holder.rows import RowPlan
from kvcommons.transport.base import Bare, Observation, Observer

BUSY = "the holder was busy until the deadline: spread the load over more holders"
# However long a peer is ready to wait: a segment stays pinned for no longer than this by an operation.
OPERATION_S = 60.0
# After so long without a request the observer is told of those that were served, and after so long in all the
# thread waits as between any two requests. A debtor computes for some milliseconds between two layers.
_TOLD_S, _QUIET_S = 0.005, 0.1


class Following:
    """Of one holder. Thread-safe. The segments stay pinned meanwhile: whoever changes one ends that, at once
    where no request is under way. What is not the next layer, or the next iteration's first one, is left for
    Python."""

    def __init__(self, holder: Holder, turn: Turn) -> None:
        self._holder = holder
        self._turn = turn
        self._counting = threading.Lock()
        self.served = 0  # requests, in all

    def follow(self, plan: RowPlan, bare: Bare, tell: Observer) -> DeadlineExceeded | None:
        """For the connection's thread, after a request of `plan`. Returns what a request is to be answered
        with that has been received, if any; raises Unavailable or DeadlineExceeded where the connection is of
        no more use."""
        with plan.buffers() as buffers:
            serving = plan.serving(self._turn, buffers, OPERATION_S)
            if serving is None:
                return None
            try:
                stay = self._holder.stay(plan.refs, serving.end)
            except StaleEpoch:
                return None
            try:
                if not plan.holds_for([pin.segment for pin in stay.pins]):
                    return None
                return self._serve(serving, bare, tell)
            finally:
                self._holder.leave(stay)

    def _serve(self, serving: Serving, bare: Bare, tell: Observer) -> DeadlineExceeded | None:
        quiet_s = 0.0
        while quiet_s < _QUIET_S:
            served = serving.serve(bare.descriptor, ask_s=0.0 if quiet_s else bare.ask_s, quiet_s=_TOLD_S)
            quiet_s = 0.0 if served.seconds else quiet_s + _TOLD_S
            with self._counting:
                self.served += len(served.seconds)
            for seconds in served.seconds:
                tell(_observation(serving.sent_bytes, serving.received_bytes, seconds))
            if served.stage is not Stage.NONE:
                return _failure(served, tell)
            if served.outcome not in (Outcome.DONE, Outcome.LATE):
                break
        return None


def _failure(served: Served, tell: Observer) -> DeadlineExceeded:
    """As `follow`."""
    error: DeadlineExceeded | Unavailable
    if served.stage is Stage.QUEUING:
        error = DeadlineExceeded(BUSY)
    elif served.outcome is Outcome.LATE:
        error = DeadlineExceeded("the debtor was slow or paused until the deadline")
    else:
        error = Unavailable("the debtor went away")
    tell(_observation(0, served.received_bytes, served.failed_s, error.code))
    if isinstance(error, Unavailable) or served.stage is not Stage.QUEUING:
        raise error
    return error


def _observation(sent_bytes: int, received_bytes: int, seconds: float, error: str = "") -> Observation:
    return Observation(
        op="attend_layer",
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        seconds=seconds,
        error=error,
    )
