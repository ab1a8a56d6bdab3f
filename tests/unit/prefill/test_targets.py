from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.pb import common_pb2
from kvcommons.prefill.push import Pusher
from kvcommons.prefill.targets import Target, TargetTable, Write, writes
from kvcommons.rblock.heads import HeadPart


def test_writes_go_to_the_holder_of_each_block() -> None:
    own = Target(data_address="a", handle=1, epoch=1, first_block=6, blocks=4)
    lent = Target(data_address="b", handle=2, epoch=1, first_block=2, blocks=4)
    assert writes((own, lent), 4, 4) == [
        Write(target=own, first=6, count=2),
        Write(target=lent, first=4, count=2),
    ]
    assert writes((own, lent), 0, 2) == []
    assert writes((own, lent), 5, -1) == []
    assert writes((own, lent), 9, 5) == [Write(target=own, first=9, count=1)]


def test_a_table_covers_what_joins_it() -> None:
    """Decode's own target may hold nothing, where its first block lies elsewhere."""
    own = common_pb2.SegmentPlace(data_address="a", handle=1, epoch=1, first_block=4, blocks=0)
    lent = common_pb2.SegmentPlace(data_address="b", handle=2, epoch=1, first_block=0, blocks=4)
    table = TargetTable([own, lent])
    seen = table.now
    assert table.blocks == 4
    table.add([common_pb2.SegmentPlace(data_address="c", handle=3, epoch=1, first_block=4, blocks=3)])
    assert (table.blocks, len(table.now), len(seen)) == (7, 3, 2)
    assert [write.count for write in writes(table.now, 2, 4)] == [2, 2]
    assert TargetTable(()).blocks == 0


def ranks(stages: int, tensor: int, parts: int) -> Target:
    """A decode of so many stages, of a layer each, and ranks, whose KV heads are so many shares."""
    place = common_pb2.SegmentPlace(data_address="0/0", handle=1, epoch=1, first_block=0, blocks=4)
    for stage in range(stages):
        for rank in range(tensor):
            one = place.stages.add(
                data_address=f"{stage}/{rank}", handle=1, epoch=1, first_layer=stage, layers=1
            )
            if parts > 1:
                one.heads.CopyFrom(HeadPart(number=rank * parts // tensor, parts=parts).message())
    return Target.of(place)


@pytest.mark.parametrize(
    ("sender", "target", "arrives"),
    [
        (None, ranks(2, 1, 1), ["1/0 all of all"]),
        (None, ranks(2, 2, 2), ["1/0 0/2 of all", "1/1 1/2 of all"]),
        (None, ranks(2, 4, 2), [f"1/{rank} {rank // 2}/2 of all" for rank in range(4)]),
        ("1/2", ranks(2, 2, 2), ["1/1 all of all"]),
        ("1/2", ranks(2, 4, 2), ["1/2 all of all", "1/3 all of all"]),
        ("1/2", ranks(2, 2, 1), ["1/0 all of 1/2", "1/1 all of 1/2"]),
        ("1/4", ranks(2, 2, 2), ["1/0 all of 1/2"]),
    ],
)
def test_a_layer_goes_to_the_ranks_that_have_its_heads(
    sender: str | None, target: Target, arrives: list[str]
) -> None:
    """Where several ranks have the same head, to each of them."""
    assert sent(sender, target) == arrives


def test_shares_of_heads_that_cut_each_other_are_refused() -> None:
    with pytest.raises(InvalidInput, match="take a tensor"):
        sent("1/3", ranks(2, 2, 2))


def sent(sender: str | None, target: Target) -> list[str]:
    """Where layer 1 goes: address, which heads of the sender's, which of the receiver's."""
    unused: Any = SimpleNamespace()
    heads = HeadPart.parse(sender) if sender is not None else None
    pusher, found = Pusher(unused, unused, call_deadline_s=1.0, heads=heads), list[str]()

    def put(*call: Any) -> None:
        *_, place, transfer = call
        found.append(f"{place.data_address} {transfer.sent or 'all'} of {transfer.received or 'all'}")

    pusher._write = put  # type: ignore[method-assign]
    delivery: Any = unused
    pusher.write(delivery, 1, Write(target=target, first=0, count=4), [1, 2, 3, 4])
    return found
