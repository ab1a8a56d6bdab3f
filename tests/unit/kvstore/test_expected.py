"""Hints of routers as jobs that policies are told of: by a policy that writes down what it hears."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.expected import SAME_JOB_S, ExpectedJobs, ExpectedUse
from services.kvstore.policies.base import nothing_pinned
from services.kvstore.policies.hit_density import HitDensity
from tests.unit.kvstore.samples import block_ids

A, B, C, D = block_ids(4)
MODEL = b"m" * 32


class Listening(HitDensity[bytes]):
    """The default policy, and what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, bytes]] = []
        self.waiting: dict[int, bytes] = {}

    def expect(self, job: int, run: Sequence[bytes]) -> None:
        if job >= 0:
            assert job not in self.waiting
            self.waiting[job] = run[-1]
            self.heard.append(("expect", run[-1]))
        super().expect(job, run)

    def forget(self, job: int, run: Sequence[bytes]) -> None:
        if self.waiting.pop(job, None) is not None:
            self.heard.append(("forget", run[-1]))
        super().forget(job, run)

    def move(self, job: int, to: int, run: Sequence[bytes]) -> None:
        assert to not in self.waiting
        self.waiting[to] = self.waiting.pop(job)
        self.heard.append(("move", run[-1]))
        super().move(job, to, run)

    def use(self, job: int, run: Sequence[bytes], hits: int) -> None:
        self.waiting.pop(job, None)
        self.heard.append(("use", run[-1]))
        super().use(job, run, hits)

    @property
    def order(self) -> list[bytes]:
        return [self.waiting[job] for job in sorted(self.waiting)]

    def reported(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard


def use(at_s: float, *ids: bytes, model: bytes = MODEL) -> ExpectedUse:
    return ExpectedUse(model=model, block_ids=ids, at_s=at_s)


def listening(window: int | None = None) -> tuple[ExpectedJobs, Listening]:
    policy = Listening()
    jobs = ExpectedJobs(
        lambda model: [policy] if model == MODEL else [], None if window is None else lambda: window
    )
    return jobs, policy


def test_jobs_join_stay_and_leave_and_routers_are_merged() -> None:
    jobs, policy = listening()
    jobs.replace("r", [use(1.0, A), use(5.0, B)])
    jobs.replace("s", [use(3.0, C), use(3.0, C, model=b"other")])
    assert policy.order == [A, C, B]
    policy.reported()
    jobs.replace("r", [use(1.1, A), use(5.1, B)])
    assert policy.reported() == []  # the same jobs still wait
    jobs.replace("r", [use(4.0, B)])
    assert policy.reported() == [("forget", A)]
    assert policy.order == [C, B]


def test_who_is_overtaken_moves() -> None:
    jobs, policy = listening()
    jobs.replace("r", [use(1.0, A), use(2.0, B), use(3.0, C)])
    policy.reported()
    jobs.replace("r", [use(1.0, C), use(2.0, A), use(3.0, B)])
    assert policy.order == [C, A, B]
    assert policy.reported() == [("move", A), ("move", B)]


def test_equal_prompts_are_jobs_of_their_own() -> None:
    jobs, policy = listening()
    jobs.replace("r", [use(1.0, A), use(1.0, A)])
    jobs.replace("s", [use(1.0, A)])
    assert policy.order == [A, A, A]
    assert jobs.serve(MODEL, [A], 1, now_s=1.0)
    assert policy.order == [A, A]
    jobs.replace("r", [use(1.0, A)])
    jobs.replace("s", [])
    assert policy.order == [A]


def test_a_job_that_is_served_is_not_forgotten_again_and_not_served_twice() -> None:
    jobs, policy = listening()
    jobs.replace("r", [use(1.0, A, B)])
    assert jobs.serve(MODEL, [A, B], 2, now_s=1.0)
    assert not jobs.serve(MODEL, [A, B], 2, now_s=1.5)  # the decode side reads it, too
    jobs.replace("r", [])
    assert policy.reported() == [("expect", B), ("use", B)]
    assert jobs.serve(MODEL, [A, B], 2, now_s=1.5 + SAME_JOB_S)
    assert policy.reported() == [("use", B)]


def test_policies_see_the_window_only() -> None:
    jobs, policy = listening(window=2)
    jobs.replace("r", [use(1.0, A), use(2.0, B), use(3.0, C)])
    assert policy.order == [A, B]
    jobs.replace("s", [use(1.5, D)])
    assert policy.order == [A, D]
    jobs.replace("r", [use(3.0, C)])
    assert policy.order == [D, C]


def test_a_model_whose_blocks_come_later_hears_of_what_waits() -> None:
    known: list[Listening] = []
    jobs = ExpectedJobs(lambda model: known)
    jobs.replace("r", [use(1.0, A), use(2.0, B)])
    known.append(Listening())
    jobs.began(MODEL)
    assert known[0].order == [A, B]


def test_eviction_follows_the_queue_through_all_of_it() -> None:
    """Who nobody expects goes first, then the queue's tail, as it is after the last hint."""
    jobs, policy = listening()
    for block in (A, B, C, D):
        policy.admit(block)
        jobs.serve(MODEL, [block], 1, now_s=0.0)
    jobs.replace("r", [use(1.0, A), use(2.0, B), use(3.0, C)])
    jobs.replace("r", [use(1.0, C), use(2.0, A), use(3.0, B)])
    gone = []
    while (block := policy.victim(nothing_pinned)) is not None:
        gone.append(block)
        policy.remove(block)
    assert gone == [D, B, A, C]


def test_an_answer_goes_with_its_prompt_the_deepest_first() -> None:
    """Blocks made by decode, which no run names before the next turn."""
    policy: HitDensity[bytes] = HitDensity()
    policy.admit(A)
    policy.use(1, [A], 0)
    policy.admit(B, A)
    policy.admit(C, B)
    gone = []
    while (block := policy.victim(nothing_pinned)) is not None:
        gone.append(block)
        policy.remove(block)
    assert gone == [C, B, A]
