from __future__ import annotations

from kvcommons.prefill.targets import Target, TargetTable, Write, writes


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
    own = Target(data_address="a", handle=1, epoch=1, first_block=4, blocks=0)
    table = TargetTable([own, Target(data_address="b", handle=2, epoch=1, first_block=0, blocks=4)])
    seen = table.now
    assert table.blocks == 4
    table.add([Target(data_address="c", handle=3, epoch=1, first_block=4, blocks=3)])
    assert (table.blocks, len(table.now), len(seen)) == (7, 3, 2)
    assert [write.count for write in writes(table.now, 2, 4)] == [2, 2]
    assert TargetTable(()).blocks == 0
