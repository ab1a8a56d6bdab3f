"""Which pair is tried next."""

from __future__ import annotations

from typing import Any

import pytest

from kvcommons.errors import ContextLengthExceeded
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.ledger_pb2 import HeadPart, Instance, Load
from kvcommons.rpc.channel import open_channel
from services.router.fleet.fleet import Fleet
from services.router.fleet.pairing import Pair, capacity_blocks, choose_pair, served_models, unfit_pools

MODEL = b"m" * 32


def instance(
    instance_id: str, *, model: bytes = MODEL, running: int = 0, free: int = 100, queued: int = 0
) -> Instance:
    return Instance(
        id=instance_id,
        model=ModelInfo(fingerprint=model, name="m"),
        load=Load(running=running, queued=queued, free_blocks=free, ready=True),
    )


def choose(
    prefills: list[Instance],
    decodes: list[Instance],
    *,
    under_way: dict[str, int] | None = None,
    affinity: str = "",
    failed: tuple[str, ...] = (),
) -> Pair | None:
    return choose_pair(
        prefills=prefills,
        decodes=decodes,
        model=MODEL,
        under_way=under_way or {},
        affinity=affinity,
        blocks=10,
        failed=failed,
    )


def test_both_are_needed_and_of_the_model() -> None:
    assert choose([instance("p")], []) is None
    assert choose([instance("p")], [instance("d", model=b"x" * 32)]) is None
    pair = choose([instance("p")], [instance("d")])
    assert pair is not None
    assert (pair.prefill.id, pair.decode.id) == ("p", "d")


def test_the_least_busy_counting_what_is_under_way_here() -> None:
    pair = choose(
        [instance("p1", queued=3), instance("p2", running=1)],
        [instance("d1"), instance("d2")],
        under_way={"d1": 2},
    )
    assert pair is not None
    assert (pair.prefill.id, pair.decode.id) == ("p2", "d2")


def test_a_decode_with_two_batches_gets_twice_the_sequences() -> None:
    """The first of a group that rotates: its batches and those of the others are to be alike."""
    first, second = instance("d1"), instance("d2")
    first.load.batches = 2
    under_way = {"d1": 0, "d2": 0}
    for _ in range(30):
        pair = choose([instance("p")], [first, second], under_way=under_way)
        assert pair is not None
        under_way[pair.decode.id] += 1
    assert under_way == {"d1": 20, "d2": 10}


def test_decode_with_room_goes_first_and_none_at_all_is_no_reason_to_refuse() -> None:
    pair = choose([instance("p")], [instance("d1", free=2), instance("d2", free=50, running=9)])
    assert pair is not None
    assert pair.decode.id == "d2"
    assert choose([instance("p")], [instance("d1", free=2)]) is not None


def test_who_has_room_with_what_others_lend_goes_before_who_has_none() -> None:
    decodes = [instance("d1", free=2), instance("d2", free=5, running=9)]
    pair = choose_pair(
        prefills=[instance("p")],
        decodes=decodes,
        model=MODEL,
        under_way={},
        affinity="",
        blocks=10,
        free_blocks={"d1": 8, "d2": 12},
    )
    assert pair is not None
    assert pair.decode.id == "d2"


def test_sessions_stay_where_they_were_until_it_is_much_busier() -> None:
    decodes = [instance(f"d{at}") for at in range(4)]
    home: dict[str, str] = {}
    for session in map(str, range(40)):
        pair = choose([instance("p")], decodes, affinity=session)
        assert pair is not None
        home[session] = pair.decode.id
        again = choose(
            [instance("p")], list(reversed(decodes)), affinity=session, under_way={pair.decode.id: 3}
        )
        assert again is not None
        assert again.decode.id == home[session]
        busy = choose([instance("p")], decodes, affinity=session, under_way={pair.decode.id: 9})
        assert busy is not None
        assert busy.decode.id != home[session]
    assert len(set(home.values())) == 4


def test_what_failed_is_passed_over_if_there_is_another() -> None:
    pair = choose([instance("p")], [instance("d1"), instance("d2")], failed=("d1", "p"))
    assert pair is not None
    assert (pair.prefill.id, pair.decode.id) == ("p", "d2")


def test_room_is_all_of_one_decode_and_what_all_others_lend_at_most() -> None:
    decodes = [instance("d1"), instance("d2")]
    decodes[0].load.total_blocks, decodes[1].load.total_blocks = 10, 30
    pools = [instance("a1"), instance("a2", model=b"x" * 32)]
    for pool in pools:
        pool.load.total_blocks = pool.load.lend_blocks_max = 100
    assert capacity_blocks(decodes, pools, MODEL) == 130
    assert capacity_blocks([instance("d3")], pools, MODEL) is None
    decodes[0].load.lend_blocks_max = 5  # half of its blocks, however many are free
    assert capacity_blocks(decodes, pools, MODEL) == 135
    decodes[1].load.lend_blocks_max = 30
    assert capacity_blocks(decodes, pools, MODEL) == 140
    decodes[1].load.lend_blocks_max = 15
    assert capacity_blocks(decodes, pools, MODEL) == 135
    heads = [instance(f"h{number}") for number in range(2)]
    for number, pool in enumerate(heads):  # the same blocks, half of the heads each
        pool.load.total_blocks = pool.load.lend_blocks_max = 50
        pool.heads.CopyFrom(HeadPart(group="g", number=number, parts=2))
    assert capacity_blocks(decodes, [*pools, *heads], MODEL) == 185
    for decode in decodes:  # which borrow nothing, whoever lends
        decode.load.only_here = True
    assert capacity_blocks(decodes, [*pools, *heads], MODEL) == 30


def test_models_need_both_services() -> None:
    prefills = [instance("p1"), instance("p2", model=b"n" * 32)]
    decodes = [instance("d1"), instance("d2"), instance("d3", model=b"o" * 32)]
    assert [one.id for one in served_models(prefills, decodes)] == ["d1"]


class View:
    """What the ledger says, without a ledger."""

    records = ""

    def __init__(self) -> None:
        self.there: dict[str, list[Instance]] = {}

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        return self.there.get(service, [])

    def silent_s(self, instance_id: str) -> float | None:
        return None

    def suspect(self, instance_id: str) -> None: ...


def test_room_that_is_away_for_a_moment_refuses_nobody() -> None:
    view, now_s = View(), [0.0]
    fleet = Fleet(view, open_channel, clock=lambda: now_s[0])
    decode, pool = instance("d"), instance("a")
    decode.load.total_blocks = pool.load.lend_blocks_max = 10
    model = ModelInfo(fingerprint=MODEL, block_tokens=16)
    view.there = {"prefill": [instance("p")], "decode": [decode], "attention_pool": [pool]}

    def place() -> bool:
        return fleet.place(model, affinity="", tokens=15 * 16, failed=()) is not None

    assert place()
    view.there["attention_pool"] = []  # it died
    now_s[0] = 30.0
    assert place()
    view.there["attention_pool"] = [pool]
    now_s[0] = 80.0
    assert place()
    view.there["attention_pool"] = []
    now_s[0] = 130.0
    assert place()
    now_s[0] = 141.0
    with pytest.raises(ContextLengthExceeded, match="10 in all"):
        place()


def test_a_pool_that_fits_no_decode_is_named_with_its_reason() -> None:
    def layout(fingerprint: bytes, **fields: Any) -> ModelInfo:
        known = {"name": "m", "kv_dtype": "bfloat16", "block_tokens": 64, "layers": 2}
        return ModelInfo(fingerprint=fingerprint, **known | fields)

    decodes = [instance("d1"), instance("d2")]
    decodes[0].model.CopyFrom(layout(MODEL))
    decodes[1].model.CopyFrom(layout(b"n" * 32, name="n"))
    fits, wide, long, other = pools = [instance(f"a{at}") for at in range(4)]
    fits.model.CopyFrom(layout(MODEL))
    wide.model.CopyFrom(layout(b"w" * 32, kv_dtype="float32"))
    long.model.CopyFrom(layout(b"l" * 32, name="n", block_tokens=16))
    other.model.CopyFrom(layout(b"o" * 32))
    assert unfit_pools([], pools) == {}
    found = unfit_pools(decodes, pools)
    assert found == {
        "a1": "its dtype is float32 and decode's bfloat16",
        "a2": "its block_tokens is 16 and decode's 64",
        "a3": "its model has other weights or another config than decode's",
    }
    view = View()
    view.there = {"decode": decodes[:1], "attention_pool": [wide]}
    decodes[0].load.total_blocks = 64
    fleet = Fleet(view, open_channel)
    with pytest.raises(ContextLengthExceeded, match=r"64 in all.*a1 lends nothing, for its dtype is float32"):
        fleet.check(decodes[0].model, 65 * 64)
