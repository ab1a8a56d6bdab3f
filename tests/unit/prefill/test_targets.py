from __future__ import annotations

from kvcommons.prefill.targets import Target, Write, writes


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
