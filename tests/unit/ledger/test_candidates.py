from __future__ import annotations

import random

from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import REFUSAL_S, Candidates

MODEL = b"m" * 32


def lender(
    name: str,
    lendable: int,
    *,
    host: str = "h1",
    service: str = "decode",
    model: bytes = MODEL,
    ready: bool = True,
) -> pb.Instance:
    return pb.Instance(
        id=name,
        service=service,
        host=host,
        model=common_pb2.ModelInfo(fingerprint=model),
        load=pb.Load(lendable_blocks=lendable, ready=ready),
    )


def request(blocks: int = 1) -> pb.CandidatesRequest:
    return pb.CandidatesRequest(debtor="debtor", host="h1", model=MODEL, blocks=blocks)


def choose(instances: list[pb.Instance], blocks: int = 1, now: float = 0.0) -> list[str]:
    return [one.id for one in Candidates(random.Random(1)).choose(request(blocks), instances, now)]


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


def test_a_refusal_holds_until_the_creditors_next_heartbeat() -> None:
    candidates = Candidates(random.Random(1))
    instances = [lender("a", 9), lender("b", 8)]

    def ids(now: float) -> list[str]:
        return [one.id for one in candidates.choose(request(), instances, now)]

    candidates.refused("a", 100.0)
    assert ids(100.1) == ["b"]
    candidates.heard("b")
    assert ids(100.2) == ["b"]
    candidates.heard("a")
    assert ids(100.3) == ["a", "b"]
    # It may beat at another replica, unheard here: by then it has.
    candidates.refused("a", 200.0)
    assert ids(200.0 + REFUSAL_S - 0.01) == ["b"]
    assert ids(200.0 + REFUSAL_S) == ["a", "b"]


def test_equals_share_the_debtors_among_them() -> None:
    candidates = Candidates(random.Random(1))
    instances = [lender(f"c{index}", 10) for index in range(10)]
    first = [candidates.choose(request(), instances, 0.0)[0].id for _ in range(1000)]
    counts = [first.count(one.id) for one in instances]
    assert sum(counts) == 1000
    assert max(counts) < 2 * 100
