from __future__ import annotations

from typing import Any

from kvcommons.pb import kvstore_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb.holder_pb2 import HeldSegment, InspectReply
from services.router.admission.classes import ClassObjectives, ServiceClass
from services.router.api.schemas.commons import CommonsPicture
from services.router.commons.view import SEQUENCES_MAX, QueueCounts, commons_view, merged
from services.router.turn.choice import Phase
from services.router.turn.dispatch import SequenceUnderWay


def instance(name: str, service: str, **load: Any) -> pb.Instance:
    return pb.Instance(id=name, service=service, data_address=f"unix:/{name}", load=pb.Load(**load))


def sequence(name: str = "0.0", **changed: Any) -> SequenceUnderWay:
    fields: dict[str, Any] = {
        "name": name,
        "phase": Phase.GENERATING,
        "prompt_tokens": 40,
        "tokens": 65,
        "block_tokens": 16,
        "prefill": "prefill-1",
        "decode": "decode-1",
        "borrowed": {},
        "resumptions": 0,
    }
    return SequenceUnderWay(**fields | changed)


def report(name: str, *, ended_ms: int | None = None, begun_ms: int = 5000, round: int = 1) -> Any:
    settlement = pb.Settlement(
        id=name,
        step=pb.Settlement.Step.SWITCH,
        round=round,
        legs=[pb.Leg(debtor="d", creditor="c", left_blocks=1, settled_blocks=2)],
    )
    return pb.SettlementReport(
        settlement=settlement, begun_ms=begun_ms, ended=ended_ms is not None, ended_ms=ended_ms or 0
    )


def view(**given: Any) -> dict[str, Any]:
    """As it is sent: what the schema says of it holds."""
    fields: dict[str, Any] = {
        "taken_at": 1.5,
        "instances": [],
        "ready": frozenset(),
        "silent_s": {},
        "held": {},
        "stats": {},
        "settlements": [],
        "sequences": [],
        "queue": QueueCounts(running=1, waiting=2, waiting_for_room=3, documents=4),
        "classes": [],
        "outcomes": {},
    }
    picture = commons_view(**fields | given)
    CommonsPicture.model_validate(picture)
    return picture


def test_loans_are_as_lenders_say_and_none_of_nothing() -> None:
    instances = [
        instance("decode-1", "decode", debts={"pool-1": 9}, loans={"decode-2": 2}),
        instance("pool-1", "attention_pool", loans={"decode-2": 4, "decode-1": 3, "decode-3": 0}),
        instance("kvstore-1", "kvstore", loans={"decode-1": 1}),
    ]
    assert view(instances=instances)["loans"] == [
        {"creditor": "decode-1", "debtor": "decode-2", "blocks": 2},
        {"creditor": "pool-1", "debtor": "decode-1", "blocks": 3},
        {"creditor": "pool-1", "debtor": "decode-2", "blocks": 4},
    ]


def test_a_lender_that_answers_is_shown_as_it_is_now_and_another_one_with_its_age() -> None:
    pools = [
        instance(name, "attention_pool", total_blocks=64, free_blocks=60, running=2, loans={"decode-1": 4})
        for name in ("pool-1", "pool-2")
    ]
    router = instance("router-1", "router")
    segments = [
        HeldSegment(owner="decode-1", blocks=5, lease_left_ms=900),
        HeldSegment(owner="decode-1", blocks=1, lease_left_ms=900),
        HeldSegment(owner="pool-1", blocks=7),  # its own
    ]
    held = {"pool-1": InspectReply(total_blocks=64, free_blocks=51, segments=segments)}
    picture = view(
        instances=[*pools, router], held=held, silent_s={"pool-1": 0.31, "pool-2": 7.04, "router-1": None}
    )
    assert picture["loans"] == [
        {"creditor": "pool-1", "debtor": "decode-1", "blocks": 6},
        {"creditor": "pool-2", "debtor": "decode-1", "blocks": 4},
    ]
    reported = ("free_blocks", "running", "silent_s", "answers")
    assert [tuple(one[name] for name in reported) for one in picture["instances"]] == [
        (51, 2, 0.3, True),
        (60, 2, 7.0, False),
        (0, 0, None, None),
    ]


def test_of_a_head_group_the_first_part_tells_what_it_lends() -> None:
    parts = [instance(f"pool-{number}", "attention_pool") for number in range(2)]
    for number, one in enumerate(parts):
        one.heads.group, one.heads.number, one.heads.parts = "pools", number, 2
    segments = [HeldSegment(owner="decode-1", blocks=5, lease_left_ms=900)]
    held = {one.id: InspectReply(segments=segments) for one in parts}
    assert view(instances=parts, held=held)["loans"] == [
        {"creditor": "pool-0", "debtor": "decode-1", "blocks": 5}
    ]


def test_what_nobody_lends_of_a_sequence_lies_at_decode() -> None:
    instances = [instance("decode-1", "decode"), instance("pool-1", "attention_pool")]
    for borrowed, own in ((2, 3), (9, 0)):  # of five; a borrowed tail may have room left
        one = sequence(borrowed={"pool-1": borrowed})
        (shown,) = view(instances=instances, sequences=[one])["sequences"]
        assert shown["holders"] == [
            {"instance": "decode-1", "blocks": own},
            {"instance": "pool-1", "blocks": borrowed},
        ]
    waiting = sequence(phase=Phase.WAITING, decode="", prefill="")
    (shown,) = view(instances=instances, sequences=[waiting])["sequences"]
    assert (shown["decode"], shown["prefill"], shown["holders"]) == (None, None, [])


def test_a_picture_is_bounded_and_says_what_it_leaves_out() -> None:
    sequences = (sequence(f"{number}.0") for number in range(SEQUENCES_MAX + 7))
    picture = view(sequences=sequences)
    assert len(picture["sequences"]) == SEQUENCES_MAX
    assert picture["sequences_left_out"] == 7


def test_a_kvstore_that_does_not_answer_is_there_without_figures() -> None:
    stores = [instance("kvstore-1", "kvstore"), instance("kvstore-2", "kvstore")]
    stats = {"kvstore-2": kvstore_pb2.StatsReply(dram_blocks=3, dram_capacity_blocks=8, pending_writes=1)}
    first, second = view(instances=stores, stats=stats)["tiers"]
    assert first["kvstore"] == "kvstore-1"
    assert set(first.values()) == {"kvstore-1", None}
    assert (second["dram_blocks"], second["dram_capacity_blocks"], second["disk_blocks"]) == (3, 8, 0)


def test_of_two_ledgers_the_one_that_drives_a_settlement_knows_best() -> None:
    left, driven = report("s", ended_ms=10, round=1), report("s", round=3, begun_ms=100)
    assert merged([left, driven]) == merged([driven, left]) == [driven]
    before, after = report("t", ended_ms=900), report("t", ended_ms=20)
    assert merged([before, after]) == merged([after, before]) == [after]
    young, old = report("a", begun_ms=1), report("b", begun_ms=9)
    assert merged([young, old]) == [old, young]


def test_a_settlement_tells_its_step_and_what_is_left_of_each_leg() -> None:
    (shown,) = view(settlements=[report("s")])["settlements"]
    assert (shown["step"], shown["round"], shown["begun_s"], shown["ended_s"]) == ("switch", 1, 5.0, None)
    assert shown["legs"] == [{"debtor": "d", "creditor": "c", "left_blocks": 1, "settled_blocks": 2}]


def test_a_class_has_its_objectives_and_what_came_of_them() -> None:
    fast = ServiceClass(name="fast", objectives=ClassObjectives(ttft_s=0.5))
    (shown,) = view(classes=[fast], outcomes={"fast": {"met": 3}, "gone": {"met": 1}})["classes"]
    assert shown == {
        "name": "fast", "ttft_s": 0.5, "tbt_s": None, "met": 3, "missed": 0, "refused": 0, "best_effort": 0,
    }  # fmt: skip
