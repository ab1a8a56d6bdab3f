"""Pools with a part of the KV heads each: a creditor only together."""

from __future__ import annotations

from typing import Any

import pytest

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import REFUSAL_S, SLOW_S, Candidates
from services.ledger.server import MODELS_MAX, LedgerService
from tests.unit.ledger.test_candidates import MODEL, knowing, lender, request


def part(
    name: str, heads: str, lendable: int = 9, *, group: str = "g", model: bytes = MODEL, ready: bool = True
) -> pb.Instance:
    one = lender(name, lendable, service="attention_pool", model=model, ready=ready)
    number, parts = heads.split("/")
    one.heads.CopyFrom(pb.HeadPart(group=group, number=int(number), parts=int(parts)))
    one.control_address = f"unix:/{name}"
    return one


def named(candidates: Candidates, blocks: int = 1, now: float = 0.0) -> list[str]:
    return [one.id for one in candidates.choose(request(blocks), now)]


def test_a_group_is_one_creditor_that_lends_what_its_smallest_part_can() -> None:
    parts = [part("c", "2/3", 9), part("a", "0/3", 7), part("b", "1/3", 5)]
    for some in ([], parts[:1], parts[:2], parts[1:]):
        assert named(knowing(some)) == []
    (group,) = knowing(parts).choose(request(6), 0.0)
    assert (group.id, group.load.lendable_blocks) == ("a", 5)
    assert [one.id for one in group.members] == ["a", "b", "c"]
    assert group.members[2].control_address == "unix:/c"


def test_groups_and_single_pools_stand_beside_each_other() -> None:
    pools = [part(f"{group}{n}", f"{n}/2", 8, group=group) for group in "gh" for n in range(2)]
    assert sorted(named(knowing([*pools, lender("single", 4)]))) == ["g0", "h0", "single"]
    assert named(knowing([*pools[:3], lender("single", 4)])) == ["g0", "single"]


def test_what_a_part_says_counts_and_a_part_that_goes_takes_the_group_with_it() -> None:
    parts = {one.id: one for one in (part("a", "0/2"), part("b", "1/2"))}
    candidates = knowing(list(parts.values()))
    candidates.heartbeat(part("b", "1/2", 3))
    assert candidates.choose(request(), 0.0)[0].load.lendable_blocks == 3
    candidates.heartbeat(part("b", "1/2", 0))
    assert named(candidates) == []
    candidates.follow(parts)
    candidates.heartbeat(part("b", "1/2", 2))
    assert named(candidates) == ["a"]
    for gone in ("a", "b"):
        candidates.follow({name: one for name, one in parts.items() if name != gone})
        assert named(candidates) == []
        candidates.follow(parts)
        assert named(candidates) == ["a"]
    candidates.heartbeat(part("b", "1/2", ready=False))
    assert named(candidates) == []


def test_a_part_that_was_killed_and_started_again_is_there_once() -> None:
    """Its record stays until its lease runs out, under another id but with the same address."""
    before, again = part("b", "1/2"), part("b2", "1/2", 4)
    again.control_address, again.started_ms = before.control_address, 5
    for pools in ([before, again], [again, before]):
        candidates = knowing([part("a", "0/2"), *pools])
        (group,) = candidates.choose(request(), 0.0)
        assert ([one.id for one in group.members], group.load.lendable_blocks) == (["a", "b2"], 4)
        assert candidates.shortfall(MODEL) == ""


def test_one_that_lives_again_as_something_else() -> None:
    candidates = knowing([part("a", "0/2"), part("b", "1/2")])
    candidates.heartbeat(lender("b", 4))
    assert named(candidates) == ["b"]
    candidates.heartbeat(lender("a", 4))
    assert sorted(named(candidates)) == ["a", "b"]
    candidates.heartbeat(part("a", "1/2", group="other"))
    candidates.heartbeat(part("b", "0/2", group="other"))
    assert named(candidates) == ["b"]


def test_a_refusal_and_slowness_are_the_groups() -> None:
    candidates = knowing([part("a", "0/2"), part("b", "1/2"), lender("single", 2)])
    candidates.refused("a", 0.0)
    candidates.heartbeat(part("b", "1/2"))
    assert named(candidates, now=0.1) == ["single"]
    assert sorted(named(candidates, now=REFUSAL_S)) == ["a", "single"]
    candidates.slow("a", REFUSAL_S)
    assert named(candidates, now=REFUSAL_S) == ["single"]
    assert sorted(named(candidates, now=REFUSAL_S + SLOW_S)) == ["a", "single"]


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([part("a", "0/3")], "head group 'g' lacks 1/3, 2/3: start a pool for each"),
        ([part("a", "0/2"), part("b", "1/2", ready=False)], "lacks 1/2"),
        ([part("a", "0/2"), part("b", "1/2"), part("c", "1/2")], "part 1/2 more than once (b, c)"),
        ([part("a", "0/2"), part("b", "1/4")], "parts of different numbers (a 0/2, b 1/4)"),
        (
            [part("a", "0/2"), part("b", "1/2", model=b"n" * 32)],
            "parts of different models (a 6d6d6d6d6d6d, b 6e6e6e6e6e6e): start all with one model",
        ),
    ],
)
def test_it_is_said_what_is_wrong_with_a_group(pools: list[pb.Instance], says: str) -> None:
    candidates = knowing(pools)
    assert named(candidates) == []
    assert says in candidates.shortfall(MODEL)
    assert candidates.shortfall(b"x" * 32) == ""


def test_nothing_is_wrong_with_a_group_that_has_no_room() -> None:
    assert knowing([part("a", "0/2"), part("b", "1/2", 0)]).shortfall(MODEL) == ""


def test_what_a_group_was_named_for_counts_until_the_part_with_the_fewest_blocks_beats() -> None:
    small, large = part("a0", "0/2", 30), part("a1", "1/2", 40)
    candidates = knowing([small, large, part("b0", "0/2", 20, group="b"), part("b1", "1/2", 20, group="b")])
    assert named(candidates, 25) == ["a0"]
    candidates.heartbeat(large)
    assert named(candidates, 15) == ["b0"]  # five are left of a
    candidates.heartbeat(small)
    assert named(candidates, 25) == ["a0"]
    candidates.heartbeat(large)
    assert named(candidates, 25, REFUSAL_S) == ["a0"]  # the same promise, run out


def test_parts_that_lend_the_same_do_not_each_forget_what_the_group_was_named_for() -> None:
    pools = [
        part(f"{group}{n}", f"{n}/3", 30 if group == "a" else 20, group=group)
        for group in "ab"
        for n in range(3)
    ]
    candidates = knowing(pools)
    assert named(candidates, 25) == ["a0"]
    for later in pools[1:3]:
        candidates.heartbeat(later)
    assert named(candidates, 15) == ["b0"]


async def test_what_groups_lack_is_logged_once_for_each_model(caplog: pytest.LogCaptureFixture) -> None:
    models = [bytes([number]) * 32 for number in range(2)]
    candidates = knowing(
        [part(f"p{number}", "0/2", group=f"g{number}", model=model) for number, model in enumerate(models)]
    )
    parts: dict[str, Any] = dict.fromkeys(("registry", "mirror", "feed", "debts", "reports"))
    service = LedgerService(**parts, candidates=candidates, heartbeat_ms=1000, lease_s=10.0)
    for number in (0, 1, 0, 1):
        await service.Candidates(pb.CandidatesRequest(debtor="d", model=models[number], blocks=1), None)
    assert len(caplog.records) == 2
    for number in range(2, 2 * MODELS_MAX):
        model = bytes([number]) * 32
        candidates.heartbeat(part(f"p{number}", "0/2", group=f"g{number}", model=model))
        await service.Candidates(pb.CandidatesRequest(debtor="d", model=model, blocks=1), None)
    assert len(service._shortfalls) == MODELS_MAX
