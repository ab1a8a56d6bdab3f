"""Layer after layer without the interpreter: what follows an answered request on its connection.

A layer's partial is asked for about every millisecond, and most of what it cost beside its keys was Python
whose code the weights had driven out of the caches since the layer before."""

from __future__ import annotations

import threading

from kvcommons.attention.native.serve import Layers, Outcome, Served, Serving, Stage, Turn
from kvcommons.errors import DeadlineExceeded, StaleEpoch, Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.holder import Holder
from kvcommons.holder.rows import RowPlan
from kvcommons.holder.segment import Stay
from kvcommons.transport.base import Bare, Observation, Observer

BUSY = "the holder was busy until the deadline: spread the load over more holders"
# However long a peer is ready to wait: a segment stays pinned for no longer than this by an operation.
OPERATION_S = 60.0
# After so long without a request the observer is told of those that were served, and after so long in all the
# thread waits as between any two requests. A debtor computes for some milliseconds between two layers.
_TOLD_S, _QUIET_S = 0.005, 0.1


# Of a connection: a debtor's batches and mini-batches may take turns on its connections.
_PLANS_MAX = 8


class Following:
    """Of one holder. Thread-safe. Segments stay pinned meanwhile: whoever changes one ends that, at once
    where no request is under way. What asks for anything but a layer of an iteration that Python has seen, or
    of a later one, or where the budget has to be waited for, stays in the socket."""

    def __init__(self, holder: Holder, turn: Turn, budget: AttentionBudget | None) -> None:
        self._holder = holder
        self._turn = turn
        self._allowance = budget.allowance if budget is not None else None
        self._here = _Connection()
        self._counting = threading.Lock()
        self.served = 0  # requests, in all

    def follow(self, plan: RowPlan, bare: Bare, tell: Observer) -> DeadlineExceeded | None:
        """For the connection's thread, after a request of `plan`. Returns what a request is to be answered
        with that has been received, if any; raises Unavailable or DeadlineExceeded where the connection is of
        no more use."""
        layers = plan.natively(self._turn)
        if layers is None:
            return None
        others = [known for known in self._here.plans if known[0].refs != plan.refs]
        stays: list[Stay] = []
        try:
            self._here.plans = [
                known for known in [*others[1 - _PLANS_MAX :], (plan, layers)] if self._stays(*known, stays)
            ]
            return self._serve([layers for _, layers in self._here.plans], bare, tell)
        finally:
            for stay in stays:
                self._holder.leave(stay)

    def _stays(self, plan: RowPlan, layers: Layers, stays: list[Stay]) -> bool:
        """Pins the segments, if they are as they were."""
        layers.begin()
        try:
            stay = self._holder.stay(plan.refs, layers.end)
        except StaleEpoch:
            return False
        stays.append(stay)
        segments = [pin.segment for pin in stay.pins]  # none where it has been ended since
        return bool(segments) and plan.holds_for(segments)

    def _serve(self, plans: list[Layers], bare: Bare, tell: Observer) -> DeadlineExceeded | None:
        serving, quiet_s = Serving(self._turn, plans, self._allowance, operation_s=OPERATION_S), 0.0
        while plans and quiet_s < _QUIET_S:
            served = serving.serve(bare.descriptor, ask_s=bare.ask_s, quiet_s=_TOLD_S)
            quiet_s = 0.0 if served.requests else quiet_s + _TOLD_S
            with self._counting:
                self.served += len(served.requests)
            for layers, seconds in served.requests:
                tell(_observation(layers.sent_bytes, layers.received_bytes, seconds))
            if served.stage is not Stage.NONE:
                return _failure(served, tell)
            if served.outcome not in (Outcome.DONE, Outcome.LATE):
                break
        return None


class _Connection(threading.local):
    """Each has a thread of its own: what was served on it."""

    def __init__(self) -> None:
        self.plans: list[tuple[RowPlan, Layers]] = []


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
