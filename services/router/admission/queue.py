"""The job queue: bounded, in the order of a scheduling policy, each job with a deadline. Pure: the clock is
an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import count

from kvcommons.errors import Overloaded
from services.router.admission.prefixes import PrefixSharers
from services.router.admission.scheduling import ABSENT, FirstCome, Rank, Scheduling

_RETRY_AFTER_MS_MIN = 1000
_RETRY_AFTER_MS_MAX = 60_000
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What a job could reuse: its prompt's blocks, in order. Without reuse there are none."""

    model: bytes
    block_ids: Sequence[bytes]
    home: bytes = b""  # the key whose home has them


NO_PREFIX = Prefix(model=b"", block_ids=())


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request that waits or runs. `cost`: how many choices it generates at once."""

    cost: int
    number: int  # of jobs in the order in which they came
    queued_s: float
    deadline_s: float
    started_s: float | None = None
    prefix: Prefix = NO_PREFIX
    distance: float = ABSENT  # of the prefix; see `scheduling`
    on_device: int = 0  # so many of the prefix's blocks are there
    overtaken: int = 0  # jobs that came later and started earlier


class JobQueue:
    """Lets jobs of up to `max_running` choices run; up to `max_waiting` choices wait, and more are
    refused. The job that is next by the policy is not overtaken for being too large to start now."""

    def __init__(self, *, max_running: int, max_waiting: int, policy: Scheduling | None = None) -> None:
        """Without a policy it is first come, first served."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._policy = policy or FirstCome()
        self._waiting: dict[Job, None] = {}  # in the order in which they came
        self._sharers = PrefixSharers()
        self._running: set[Job] = set()
        self._numbers = count()
        self._service_s = 1.0  # how long a job runs, smoothed

    @property
    def waiting(self) -> int:
        """Choices that wait."""
        return sum(job.cost for job in self._waiting)

    @property
    def running(self) -> int:
        """Choices under way."""
        return sum(job.cost for job in self._running)

    @property
    def jobs(self) -> list[Job]:
        """Jobs that wait, in the order in which they came."""
        return list(self._waiting)

    def submit(self, *, cost: int, now_s: float, deadline_s: float) -> Job:
        """A job that runs at once (`started_s` set) or waits for `advance` to start it.

        Raises Overloaded, with the time after which to try again, when too many wait.
        """
        job = Job(
            cost=min(cost, self._max_running),
            number=next(self._numbers),
            queued_s=now_s,
            deadline_s=deadline_s,
        )
        if not self._waiting and self._fits(job):
            self._start(job, now_s)
            return job
        if self.waiting + job.cost > self._max_waiting:
            raise Overloaded(
                f"{self.waiting} jobs are waiting already; try again later",
                retry_after_ms=self.retry_after_ms(),
            )
        self._waiting[job] = None
        return job

    def set_prefix(self, job: Job, prefix: Prefix) -> None:
        """Sets what a job could reuse; called once, before it waits for long."""
        job.prefix = prefix
        if job in self._waiting:
            self._sharers.join(prefix.block_ids)

    def advance(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Jobs that start now, and jobs whose deadline passed while they waited (they leave the queue)."""
        expired = [job for job in self._waiting if job.deadline_s <= now_s]
        for job in expired:
            self._drop(job)
        started: list[Job] = []
        while self._waiting and self.running < self._max_running:
            job = min(self._waiting, key=lambda waiting: self._rank(waiting, now_s))
            if not self._fits(job):
                break
            self._drop(job)
            for other in self._waiting:
                if other.number > job.number:
                    break
                other.overtaken += 1
            self._start(job, now_s)
            started.append(job)
        return started, expired

    def leave(self, job: Job, now_s: float) -> None:
        """The job is done, or was given up, wherever it was. Call `advance` afterwards."""
        if job in self._running:
            self._running.remove(job)
            ran_s = now_s - (job.started_s if job.started_s is not None else now_s)
            self._service_s += _SMOOTHING * (ran_s - self._service_s)
        elif job in self._waiting:
            self._drop(job)

    def look_ahead(self, jobs_max: int, now_s: float) -> list[tuple[Job, float]]:
        """The next jobs, and in how many seconds each will likely start, by how long jobs run."""
        order = nsmallest(jobs_max, self._waiting, key=lambda job: self._rank(job, now_s))
        turnover_s = self._service_s / self._max_running
        return [(job, (place + 1) * turnover_s) for place, job in enumerate(order)]

    def retry_after_ms(self) -> int:
        """How long until the queue has likely moved on by one job."""
        turnover_s = self._service_s * max(1, self.waiting) / self._max_running
        return int(min(max(turnover_s * 1000, _RETRY_AFTER_MS_MIN), _RETRY_AFTER_MS_MAX))

    def _rank(self, job: Job, now_s: float) -> Rank:
        sharers = self._sharers.of(job.prefix.block_ids, job.on_device)
        return self._policy.rank(job, sharers, now_s)

    def _drop(self, job: Job) -> None:
        del self._waiting[job]
        self._sharers.leave(job.prefix.block_ids)

    def _fits(self, job: Job) -> bool:
        return self.running + job.cost <= self._max_running

    def _start(self, job: Job, now_s: float) -> None:
        job.started_s = now_s
        self._running.add(job)
