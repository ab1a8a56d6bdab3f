"""Which waiting request starts next. Decisions only: no I/O, no clock.

A request's `distance` says how far the KV of its prompt lies from where it is computed: device 0, DRAM 1,
disk 2, absent 3, as in Jha and Wang, "Improving Large Language Model Throughput with Efficient Long-Term
Memory Management", section V. Of a prompt whose blocks lie in several tiers it is their mean. The benchmark
of prefixes drives the same classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvcommons.errors import InvalidInput

DEVICE, DRAM, DISK, ABSENT = 0.0, 1.0, 2.0, 3.0
OVERTAKES_MAX = 8192
_ON_DEVICE = 0.5  # a prompt of which this much is not there, which a new message at its end mostly is not
_TIER_COST = 1000.0  # a tier farther away weighs as much as waiting about 30 times as long

PATIENCE_S = 60.0  # of a request that was promised nothing, beside those that were
DOCUMENT_PATIENCE_S = 300.0  # of a part of a document, for whose end nobody waits as for an answer
_LATE = 10  # objectives of a request that cannot meet its own any more

SortKey = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """To whom a request belongs, and what it was promised."""

    tenant: str = ""
    ttft_s: float = math.inf  # from its arrival to its first token
    expected_s: float = 0.0  # from its start to its first token
    patience_s: float = PATIENCE_S  # without an objective: until it has to start


NO_PROMISE = Promise()


class OrderedRequest(Protocol):
    """What is asked of a request that waits. `number` counts requests as they come; `overtaken` counts the
    requests that came later and started earlier; `delay_s` is of its tenant (`TenantShares`)."""

    @property
    def number(self) -> int: ...

    @property
    def queued_s(self) -> float: ...

    @property
    def distance(self) -> float: ...

    @property
    def overtaken(self) -> int: ...

    @property
    def promise(self) -> Promise: ...

    @property
    def delay_s(self) -> float: ...


class Scheduling(Protocol):
    """The order in which requests start: the smallest sort key first. Those of one policy have one length.

    `asks_distance`: whether the order depends on where prefixes lie.
    """

    asks_distance: bool

    def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
        """`sharers`: the waiting requests, this one among them, that need the next block which it lacks."""


class FirstCome:
    """FCFS: requests start in the order in which they came."""

    asks_distance = False

    def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
        return (request.number,)


class FastestPrefixFirst:
    """FPF (section V, F.1): the nearest prefix first, no matter how much later its request came.

    Throughput is the greatest of all here, and a request far from the device waits for as long as nearer ones
    come: there is no bound.
    """

    asks_distance = True

    def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
        return (request.distance, request.number)


class RelaxedFastestPrefixFirst:
    """Relaxed-FPF (section V, F.2): the greatest (current_time - arrival_time) * (4 - N) first, N being the
    distance.

    A request with distance N overtakes those that waited less than (4 - N) / (4 - N') times as long as it
    did: nobody starves, for a request at distance 3 is passed only by requests that waited more than a
    quarter as long.
    """

    asks_distance = True

    def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
        return (-(now_s - request.queued_s) * (4.0 - request.distance), request.number)


class BoundedFastestPrefixFirst:
    """FPF by groups, with a bound: no request is overtaken more than `overtakes_max` times.

    1. Requests that were overtaken so often start before all others, in the order in which they came.
    2. Then, as with FPF, those whose prefix is on the device.
    3. When there are none, some prefix has to be brought there, and all that wait for it follow at the price
       of the device. Next is the request with the greatest sharers * waited^2 / 1000^distance.

    Why 3: what brings a prefix near is paid once a group. A queue that is kept full of W requests, and
    prefixes wanted with probabilities p, are given; a prefix that is served every T starts has p * T / 2
    requests in the queue, which together are W. The sum of the costs c / T is smallest where p * T^2 / c is
    the same for all (Lagrange), and when it is served a prefix has p * T sharers, the first of which has
    waited for T: so sharers * waited / c is equal wherever the best plan serves one, as in the R x W rule for
    broadcasts (Aksoy and Franklin, "RxW", 1999). FPF takes the oldest instead, which is worse by Cauchy and
    Schwarz wherever prefixes are not alike. Waiting counts twice over here, which costs little of that and
    shortens the longest waits.

    Theorem. Of the requests that came later than a given one, at most `overtakes_max` start before it; so a
    request that came when `waiting` others waited starts after at most `waiting + overtakes_max` other
    starts, and where requests run one at a time, `service_s` each, waits at most (waiting + overtakes_max +
    1) * service_s.

    Proof. A request that was overtaken `overtakes_max` times comes by 1 before every later one: before those
    that were overtaken less, and before those that were overtaken as often, for it has the smaller number.
    Those that start before it and did not come later waited when it came.

    The bound binds only where prefixes are wanted very unequally: elsewhere 3 lets nobody wait so long. One
    that is small is dear, for prefixes then drive each other from the device before all of their requests
    started: whoever wants fairness above all has `relaxed_fpf`.
    """

    asks_distance = True

    def __init__(self, overtakes_max: int = OVERTAKES_MAX) -> None:
        self._overtakes_max = overtakes_max

    def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
        if request.overtaken >= self._overtakes_max:
            return (0.0, 0.0, request.number)
        if request.distance < _ON_DEVICE:
            return (1.0, 0.0, request.number)
        waited_s = now_s - request.queued_s
        return (2.0, -sharers * waited_s**2 / _TIER_COST**request.distance, request.number)


class LeastSlackFirst:
    """The least slack first, which is a request's objective for the first token, less what it has waited,
    less what its prompt is expected to take. Slack shrinks for all alike, so the order is that of the moments
    at which requests have to start.

    1. Without an objective a request is to start within its patience, PATIENCE_S or DOCUMENT_PATIENCE_S.
    2. One that is late would come before all others, and with it many would be late that need not be. It has
       ten times its objective instead, its patience at most.
    3. Each has to start later by its tenant's delay, which grows with what the tenant has had beyond others,
       and with what its requests have waited for each other. So of two tenants that both want more than half
       of the machine each gets half, whatever their requests were promised, and one whose requests are few
       does not wait for the many of another. Among a tenant's own it changes nothing.

    Theorem. A request that came at t with patience p, whose tenant's delay is never more than d meanwhile, is
    passed only by requests that came before t + p + d.

    Proof. By 1 and 2 it has to start at t + p + d or before. No request has to start before it came:
    by 2, where its objective leaves it no such moment, it has ten times that. The smaller moment starts
    first.
    """

    asks_distance = False

    def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
        promise = request.promise
        start_s = request.queued_s + promise.patience_s
        if promise.ttft_s < promise.patience_s:
            in_time_s = request.queued_s + promise.ttft_s - promise.expected_s
            late_s = request.queued_s + _LATE * promise.ttft_s
            start_s = in_time_s if in_time_s >= now_s else min(late_s, start_s)
        return (start_s + request.delay_s, request.number)


def scheduling(name: str, *, overtakes_max: int = OVERTAKES_MAX) -> Scheduling:
    """The policy behind the router's `policy` setting. Raises InvalidInput for an unknown name."""
    policies: dict[str, Callable[[], Scheduling]] = {
        "slack": LeastSlackFirst,
        "fcfs": FirstCome,
        "fpf": FastestPrefixFirst,
        "relaxed_fpf": RelaxedFastestPrefixFirst,
        "bounded_fpf": lambda: BoundedFastestPrefixFirst(overtakes_max),
    }
    if name not in policies:
        raise InvalidInput(
            f"router policy {name!r} is not one of {', '.join(policies)}: least slack first, first come "
            "first served, fastest prefix first, its relaxed form, and the one that bounds how often a "
            "request is overtaken",
            param="policy",
        )
    return policies[name]()
