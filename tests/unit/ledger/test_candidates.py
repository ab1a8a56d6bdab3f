from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import REFUSAL_S, SLOW_S, Candidates

MODEL = b"m" * 32


def lender(
    name: str,
    lendable: int,
    *,
    host: str = "h1",
    service: str = "decode",
    model: bytes = MODEL,
    ready: bool = True,
    owes: int = 0,
) -> pb.Instance:
    return pb.Instance(
        id=name,
        service=service,
        host=host,
        model=common_pb2.ModelInfo(fingerprint=model),
        load=pb.Load(lendable_blocks=lendable, ready=ready, debts={"other": owes} if owes else {}),
    )


def request(blocks: int = 1, *, debtor: str = "debtor", host: str = "h1") -> pb.CandidatesRequest:
    return pb.CandidatesRequest(debtor=debtor, host=host, model=MODEL, blocks=blocks)


def knowing(instances: list[pb.Instance], seed: int = 1) -> Candidates:
    candidates = Candidates(random.Random(seed))
    candidates.follow({one.id: one for one in instances})
    return candidates


def choose(instances: list[pb.Instance], blocks: int = 1) -> list[str]:
    return [one.id for one in knowing(instances).choose(request(blocks), 0.0)]


def test_near_before_far_then_the_most_lendable_and_three_at_most() -> None:
    instances = [
        lender("far-much", 900, host="h2"),
        lender("near-little", 2),
        lender("near-much", 50, service="attention_pool"),
        lender("far-more", 950, host="h3"),
        lender("far-little", 3, host="h2"),
    ]
    for seed in range(20):
        shuffled = random.Random(seed).sample(instances, len(instances))
        assert choose(shuffled) == ["near-much", "near-little", "far-more"]


def test_who_never_lends() -> None:
    never = [
        lender("debtor", 9),
        lender("empty", 0),
        lender("other-model", 9, model=b"n" * 32),
        lender("loading", 9, ready=False),
        lender("prefill", 9, service="prefill"),  # it can borrow, it never lends
        lender("store", 9, service="kvstore"),
    ]
    assert choose(never) == []
    assert choose([*never, lender("one", 1)]) == ["one"]


def test_all_blocks_from_one_if_anyone_has_them_else_what_there_is() -> None:
    instances = [lender("near", 4), lender("far", 40, host="h2")]
    assert choose(instances, blocks=4) == ["near", "far"]
    assert choose(instances, blocks=5) == ["far"]
    assert choose(instances, blocks=41) == ["near", "far"]


def test_who_borrows_lends_only_when_nobody_else_does() -> None:
    owing = lender("owing", 99, owes=1)
    assert choose([owing, lender("far", 1, host="h2")], blocks=9) == ["far"]
    assert choose([owing, lender("empty", 0)]) == ["owing"]


def test_a_refusal_holds_until_the_creditors_next_heartbeat() -> None:
    instances = {one.id: one for one in (lender("a", 9), lender("b", 8))}
    candidates = knowing(list(instances.values()))

    def ids(now: float) -> list[str]:
        for one in instances.values():
            if one.id in {"a", "b"} - refused:
                candidates.heartbeat(one)  # what was promised before does not count in this test
        return [one.id for one in candidates.choose(request(), now)]

    refused = {"a"}
    candidates.refused("a", 100.0)
    assert ids(100.1) == ["b"]
    # Another view says nothing about the refusal.
    candidates.follow({"a": lender("a", 7), "b": instances["b"]})
    assert ids(100.2) == ["b"]
    refused = set()
    assert ids(100.3) == ["a", "b"]
    # It may beat at another replica, unheard here: by then it has.
    refused = {"a"}
    candidates.refused("a", 200.0)
    assert ids(200.0 + REFUSAL_S - 0.01) == ["b"]
    assert ids(200.0 + REFUSAL_S) == ["a", "b"]


def test_pools_of_another_model_only_are_named() -> None:
    pool = lender("pool", 5, service="attention_pool", model=b"other")
    candidates = knowing([lender("a", 5), pool])
    assert "start pool with" in candidates.strangers(MODEL)
    assert candidates.strangers(b"other") == ""
    candidates.follow({})
    assert candidates.strangers(MODEL) == ""


def test_it_follows_who_comes_and_goes() -> None:
    a, b = lender("a", 9), lender("b", 8, host="h2")
    candidates = knowing([a, b])
    candidates.refused("a", 0.0)
    candidates.follow({"b": b})
    assert [one.id for one in candidates.choose(request(), 0.0)] == ["b"]
    candidates.follow({"a": a})
    assert [one.id for one in candidates.choose(request(), 0.0)] == ["a"]
    candidates.follow({})
    assert candidates.choose(request(), 0.0) == []
    candidates.refused("gone", 0.0)
    assert candidates.choose(request(), 9.0) == []


def test_debtors_that_ask_at_once_are_spread_by_what_creditors_have() -> None:
    candidates = knowing([lender("much", 30), lender("some", 20), lender("little", 10)])
    first = [candidates.choose(request(), 0.0)[0].id for _ in range(57)]
    assert {name: first.count(name) for name in ("much", "some", "little")} == {
        "much": 29,
        "some": 19,
        "little": 9,
    }


def test_a_promise_is_forgotten_with_the_next_heartbeat_or_after_a_while() -> None:
    much, little = lender("much", 30), lender("little", 10)
    candidates = knowing([much, little])

    def first(now: float) -> str:
        return candidates.choose(request(25), now)[0].id

    assert first(0.0) == "much"
    assert first(0.1) == "little"  # of the five that are left nobody knows for certain
    candidates.heartbeat(much)
    assert first(0.2) == "much"
    assert first(0.2 + REFUSAL_S) == "much"


def test_a_promise_outlives_a_view_with_another_copy_of_the_same() -> None:
    """What etcd holds of a heartbeat takes its place in the view a moment later."""
    candidates = knowing([lender("much", 30), lender("little", 10)])
    assert candidates.choose(request(25), 0.0)[0].id == "much"
    candidates.follow({one.id: one for one in (lender("much", 30), lender("little", 10))})
    assert candidates.choose(request(25), 0.1)[0].id == "little"
    # News are others' word on what is left.
    candidates.follow({one.id: one for one in (lender("much", 29), lender("little", 10))})
    assert candidates.choose(request(25), 0.2)[0].id == "much"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.sampled_from(["h1", "h2"]), st.booleans()),
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_the_index_chooses_what_sorting_all_would(
    heartbeats: list[tuple[str, int, str, bool]], blocks: int
) -> None:
    candidates = Candidates(random.Random(1))
    known: dict[str, pb.Instance] = {}
    for name, lendable, host, borrows in heartbeats:
        known[name] = lender(name, lendable, host=host, owes=int(borrows))
        if lendable % 2:
            candidates.heartbeat(known[name])
        candidates.follow(dict(known))
    able = [one for one in known.values() if one.load.lendable_blocks]
    for group in (
        [one for one in able if not one.load.debts and one.load.lendable_blocks >= blocks],
        [one for one in able if not one.load.debts],
        [one for one in able if one.load.debts and one.load.lendable_blocks >= blocks],
        able,
    ):
        if group:
            break
    ranks = sorted((one.host != "h1", -one.load.lendable_blocks) for one in group)[:3]
    chosen = candidates.choose(request(blocks), 0.0)
    assert [(one.host != "h1", -one.load.lendable_blocks) for one in chosen] == ranks
    assert len({one.id for one in chosen}) == len(chosen)


@pytest.mark.parametrize("instances", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_instances_share_the_load_evenly(instances: int) -> None:
    """Half of them lend, half borrow, through three replicas that each know what they said themselves and
    what heartbeats tell, which are a second old and not all heard at once."""
    half = instances // 2
    dice = random.Random(7)
    lendable = {f"c{number}": 40 for number in range(half)}
    hosts = {name: f"h{number // 4}" for number, name in enumerate(lendable)}
    replicas = [Candidates(random.Random(seed)) for seed in range(3)]
    lent = dict.fromkeys(lendable, 0)
    names = list(lendable)
    for name in names:
        for replica in replicas:
            replica.heartbeat(lender(name, lendable[name], host=hosts[name]))
    debtors = [f"d{number}" for number in range(half)]
    for _ in range(4):
        dice.shuffle(debtors)
        dice.shuffle(names)
        for number, debtor in enumerate(debtors):
            asked = request(2, debtor=debtor, host=f"h{int(debtor[1:]) % (half // 4)}")
            for chosen in dice.choice(replicas).choose(asked, 0.0):
                if lendable[chosen.id] >= 2:
                    lendable[chosen.id] -= 2
                    lent[chosen.id] += 2
                    break
            # A heartbeat, at whichever replica it goes to; the others hear of it, too.
            beating = names[number]
            for replica in replicas:
                replica.heartbeat(lender(beating, lendable[beating], host=hosts[beating]))
    assert sum(lent.values()) == 4 * half * 2
    assert max(lent.values()) <= 2 * sum(lent.values()) / len(lent)


def test_who_is_slow_is_named_when_nobody_else_lends() -> None:
    instances = [lender("a", 90), lender("b", 20, owes=1), lender("c", 10, host="h2")]
    candidates = knowing(instances)

    def ids(now: float) -> list[str]:
        return [one.id for one in candidates.choose(request(), now)]

    candidates.slow("a", 0.0)
    assert ids(0.0) == ["c"]
    candidates.heartbeat(lender("a", 90))  # it beats, and is as slow as before
    assert ids(1.0) == ["c"]
    candidates.slow("c", 2.0)
    assert ids(2.0) == ["b"]
    candidates.slow("b", 2.0)
    assert ids(2.0) == ["a", "b", "c"]
    assert ids(SLOW_S + 1.0) == ["a"]
    assert ids(SLOW_S + 2.0) == ["a", "c"]
    candidates.slow("a", SLOW_S + 3.0)
    candidates.follow({"c": instances[2]})
    candidates.follow({one.id: one for one in instances})  # another life
    assert ids(SLOW_S + 3.0) == ["a", "c"]
