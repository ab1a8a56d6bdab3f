"""Which waiting job starts next. Decisions only: no I/O, no clock.

A job's `distance` says how far the KV of its prompt lies from where it is computed: device 0, DRAM 1, disk 2,
absent 3, as in Jha and Wang, "Improving Large Language Model Throughput with Efficient Long-Term Memory
Management", section V. Of a prompt whose blocks lie in several tiers it is their mean. The benchmark of
prefixes drives the same classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcommons.errors import InvalidInput

DEVICE, DRAM, DISK, ABSENT = 0.0, 1.0, 2.0, 3.0
OVERTAKES_MAX = 2048
_ON_DEVICE = 0.5  # a prompt of which this much is not there, which a new message at its end mostly is not

Rank = tuple[float, ...]


class Waiting(Protocol):
    """What is asked of a job that waits. `number` counts jobs as they come; `overtaken` counts the jobs that
    came later and started earlier."""

    @property
    def number(self) -> int: ...

    @property
    def queued_s(self) -> float: ...

    @property
    def distance(self) -> float: ...

    @property
    def overtaken(self) -> int: ...


class Scheduling(Protocol):
    """The order in which jobs start: the smallest rank first. Ranks of one policy have one length.

    `asks_distance`: whether the order depends on where prefixes lie.
    """

    asks_distance: bool

    def rank(self, job: Waiting, now_s: float) -> Rank: ...


class FirstCome:
    """FCFS: jobs start in the order in which they came."""

    asks_distance = False

    def rank(self, job: Waiting, now_s: float) -> Rank:
        return (job.number,)


class FastestPrefixFirst:
    """FPF (section V, F.1): the nearest prefix first, no matter how much later its job came.

    Throughput is the greatest of all here, and a job far from the device waits for as long as nearer ones
    come: there is no bound.
    """

    asks_distance = True

    def rank(self, job: Waiting, now_s: float) -> Rank:
        return (job.distance, job.number)


class RelaxedFastestPrefixFirst:
    """Relaxed-FPF (section V, F.2): the greatest (current_time - arrival_time) * (4 - N) first, N being the
    distance.

    A job with distance N overtakes those that waited less than (4 - N) / (4 - N') times as long as it did:
    nobody starves, for a job at distance 3 is passed only by jobs that waited more than a quarter as long.
    """

    asks_distance = True

    def rank(self, job: Waiting, now_s: float) -> Rank:
        return (-(now_s - job.queued_s) * (4.0 - job.distance), job.number)


class BoundedFastestPrefixFirst:
    """FPF, but no job is overtaken more than `overtakes_max` times.

    Jobs that were overtaken so often start before all others, in the order in which they came. The bound: of
    the jobs that came later than a given one, at most `overtakes_max` start before it. (One that reached the
    limit and came later is no exception: whoever overtook it overtook the given one too, which has therefore
    reached the limit as well and comes first.) So a job that came when `waiting` others waited starts after
    at most `waiting + overtakes_max` other starts: with jobs that run `service_s` each, one at a time, it
    waits at most (waiting + overtakes_max + 1) * service_s.

    To be forced to start in order is dear: prefixes would drive each other from the device before the others
    of each had their turn. So from half of the limit on a job is due: as soon as nobody is left whose prefix
    is on the device, those that are due start in the order in which they came, before what is nearer. Each
    brings its prefix near, and all that wait for it follow at the price of the nearest. That keeps FPF's
    throughput, and few ever reach the limit.
    """

    asks_distance = True

    def __init__(self, overtakes_max: int = OVERTAKES_MAX) -> None:
        self._overtakes_max = overtakes_max
        self._due = overtakes_max // 2

    def rank(self, job: Waiting, now_s: float) -> Rank:
        if job.overtaken >= self._overtakes_max:
            return (0.0, 0.0, job.number)
        if job.distance < _ON_DEVICE:
            return (1.0, 0.0, job.number)
        if job.overtaken >= self._due:
            return (2.0, 0.0, job.number)
        return (3.0, job.distance, job.number)


def scheduling(name: str, *, overtakes_max: int = OVERTAKES_MAX) -> Scheduling:
    """The policy behind the router's `policy` setting. Raises InvalidInput for an unknown name."""
    policies: dict[str, Callable[[], Scheduling]] = {
        "fcfs": FirstCome,
        "fpf": FastestPrefixFirst,
        "relaxed_fpf": RelaxedFastestPrefixFirst,
        "bounded_fpf": lambda: BoundedFastestPrefixFirst(overtakes_max),
    }
    if name not in policies:
        raise InvalidInput(
            f"router policy {name!r} is not one of {', '.join(policies)}: first come first served, fastest "
            "prefix first, its relaxed form, and the one that bounds how often a job is overtaken",
            param="policy",
        )
    return policies[name]()
