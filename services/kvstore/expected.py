"""The routers' queues as eviction policies see them. Decisions only: no I/O, no clock, no lock.

A hint names prompts and when they will likely start. Here each becomes a job with a number that grows along
the merged queue, which joins, moves, is served, or leaves. Routers give their jobs no names that a store
would know, so a job is identified by its router and the last block of its prompt (identities are chained: an
equal end is an equal prompt)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.kvstore.policies.base import Policy

SAME_JOB_S = 2.0  # who reads the same prompt again so soon does so for the same job, on another instance
_RECENT_MAX = 256
_PLACES = 1 << 16  # of jobs that start in the same millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedUse:
    """A job that waits at a router. `at_s`: when it will likely start, on the store's clock."""

    model: bytes
    block_ids: Sequence[bytes]
    at_s: float


@dataclass(slots=True)
class _Job:
    number: int
    use: ExpectedUse
    announced: bool = False
    served: bool = False


_Name = tuple[bytes, bytes, int]  # model, last block, how many alike are before it at this router


class ExpectedJobs:
    """`policies`: of a model, none for one without blocks. `window`: policies see so many jobs; None: all."""

    def __init__(
        self, policies: Callable[[bytes], Iterable[Policy[bytes]]], window: Callable[[], int] | None = None
    ) -> None:
        self._policies = policies
        self._window = window
        self._jobs: dict[str, dict[_Name, _Job]] = {}  # by router
        self._recent: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()  # prompts, when they were used
        self._reserved: set[int] = set()  # numbers of jobs that wait
        self._served = 0

    def replace(self, router: str, uses: Sequence[ExpectedUse]) -> None:
        """What waits at this router from now on, soonest first."""
        before = self._jobs.pop(router, {})
        after: dict[_Name, _Job] = {}
        alike: dict[tuple[bytes, bytes], int] = {}
        last = -1
        for use in uses:
            if not use.block_ids:
                continue
            key = (use.model, use.block_ids[-1])
            alike[key] = alike.get(key, -1) + 1
            name = (*key, alike[key])
            job = before.get(name)
            if job is None or job.served:  # though one like it was served, this one waits
                job = _Job(self._number(max(last + 1, int(use.at_s * 1000) * _PLACES)), use)
            else:
                del before[name]
                if job.number <= last:  # it was overtaken; else it keeps its number
                    self._tell_move(job, self._number(last + 1))
            last = job.number
            after[name] = job
        for job in before.values():
            self._leave(job)
        if after:
            self._jobs[router] = after
        self._announce()

    def began(self, model: bytes) -> None:
        """The first blocks of this model came: its policies are new, and know of no job."""
        for job in self._all():
            if job.use.model == model and job.announced:
                for policy in self._policies(model):
                    policy.expect(job.number, job.use.block_ids)

    def serve(self, model: bytes, run: Sequence[bytes], hits: int, now_s: float) -> bool:
        """Somebody reads these blocks, of which the first `hits` are stored. False: for a job that is known
        to be served already."""
        key = (model, run[-1])
        again = self._recent.get(key, float("-inf")) + SAME_JOB_S > now_s
        self._recent[key] = now_s
        self._recent.move_to_end(key)
        if len(self._recent) > _RECENT_MAX:
            self._recent.popitem(last=False)
        waiting = [job for job in self._all() if not job.served and job.announced and _is_for(job, key)]
        job = min(waiting, key=lambda job: job.number, default=None)
        if job is None and again:
            return False
        if job is not None:
            job.served = True
        self._served += 1
        number = -self._served if job is None else job.number
        for policy in self._policies(model):
            policy.use(number, run, hits)
        return True

    def _all(self) -> Iterable[_Job]:
        return (job for jobs in self._jobs.values() for job in jobs.values())

    def _announce(self) -> None:
        jobs = sorted((job for job in self._all() if not job.served), key=lambda job: job.number)
        end = len(jobs) if self._window is None else self._window()
        for place, job in enumerate(jobs):
            if (place < end) != job.announced:
                if job.announced:
                    self._tell_forget(job)
                else:
                    job.announced = True
                    for policy in self._policies(job.use.model):
                        policy.expect(job.number, job.use.block_ids)

    def _tell_move(self, job: _Job, number: int) -> None:
        if job.announced and not job.served:
            for policy in self._policies(job.use.model):
                policy.move(job.number, number, job.use.block_ids)
        self._reserved.discard(job.number)
        job.number = number

    def _leave(self, job: _Job) -> None:
        self._tell_forget(job)
        self._reserved.discard(job.number)

    def _tell_forget(self, job: _Job) -> None:
        if job.announced and not job.served:
            for policy in self._policies(job.use.model):
                policy.forget(job.number, job.use.block_ids)
        job.announced = False

    def _number(self, number: int) -> int:
        """That one, or the next that no job has."""
        while number in self._reserved:
            number += 1
        self._reserved.add(number)
        return number


def _is_for(job: _Job, key: tuple[bytes, bytes]) -> bool:
    return job.use.model == key[0] and job.use.block_ids[-1] == key[1]
