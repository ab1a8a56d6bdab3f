from __future__ import annotations

from kvcommons.engine.scheduler import Plan, Scheduler

NOBODY: frozenset[int] = frozenset()


def scheduler(*started: int, max_batch: int = 4) -> Scheduler:
    made = Scheduler(max_batch=max_batch)
    for key in started:
        made.reserve(key)
        made.start(key)
    return made


def plan(made: Scheduler, needy: set[int], free: int, freed: dict[int, int], *, borrow: bool = False) -> Plan:
    return made.plan(needy=frozenset(needy), free_blocks=free, freed_by=freed, may_borrow=borrow)


def test_the_oldest_started_sequences_run() -> None:
    made = scheduler(5, 3, 4, max_batch=2)
    made.reserve(1)
    assert plan(made, set(), 0, {}).batch == [3, 4]
    assert (made.running, made.queued) == (2, 1)
    made.remove(3)
    assert plan(made, set(), 0, {}).batch == [4, 5]
    made.start(1)
    assert plan(made, set(), 0, {}).batch == [1, 4]


def test_needy_sequences_take_free_blocks_oldest_first_and_the_youngest_gives_way() -> None:
    made = scheduler(1, 2, 3)
    decided = plan(made, {1, 2}, 1, {1: 9, 2: 9, 3: 2})
    assert decided == Plan(batch=[1, 2], grow=[1, 2], borrow=[], preempt=[3])


def test_a_sequence_that_is_itself_the_youngest_gives_way() -> None:
    made = scheduler(1, 2)
    assert plan(made, {2}, 0, {1: 9, 2: 3}) == Plan(batch=[1], preempt=[2])


def test_while_blocks_come_free_nobody_else_gives_way() -> None:
    made = scheduler(1, 2, 3)
    decided = made.plan(
        needy=frozenset({1, 3}),
        free_blocks=1,
        freed_by={1: 1, 2: 1, 3: 1},
        may_borrow=False,
        may_preempt=False,
    )
    assert decided == Plan(batch=[1, 2], grow=[1])
    assert made.any_running


def test_a_victim_whose_blocks_are_all_shared_is_passed_over() -> None:
    made = scheduler(1, 2, 3)
    assert plan(made, {1}, 0, {1: 1, 2: 1, 3: 0}) == Plan(batch=[1, 3], grow=[1], preempt=[2])


def test_a_needy_sequence_never_ends_an_older_one() -> None:
    made = scheduler(1, 2)
    made.reserve(3)
    assert plan(made, {2}, 0, {1: 5, 2: 0, 3: 0}) == Plan(batch=[1], preempt=[2])


def test_borrowers_sit_out_until_they_have_room() -> None:
    made = scheduler(1, 2, 3)
    assert plan(made, {1, 3}, 1, {}, borrow=True) == Plan(batch=[1, 2], grow=[1], borrow=[3])
    assert plan(made, {3}, 0, {}, borrow=True) == Plan(batch=[1, 2])
    made.borrowed(3)
    assert plan(made, set(), 0, {}, borrow=True).batch == [1, 2, 3]


def test_a_refused_borrower_ends_the_youngest_which_may_be_itself() -> None:
    made = scheduler(1, 2, 3)
    assert made.victim_for(2, {1: 4, 2: 4, 3: 4}) == 3
    assert made.victim_for(3, {1: 4, 2: 4, 3: 4}) == 3
    made.remove(3)  # it gave way, and its blocks are still being saved
    assert made.victim_for(1, {1: 4, 2: 0}, may_preempt=False) is None, "the oldest waits for them"


def test_what_is_unknown_is_ignored() -> None:
    made = scheduler(1)
    made.remove(9)
    made.borrowed(9)
    assert plan(made, set(), 0, {}).batch == [1]
