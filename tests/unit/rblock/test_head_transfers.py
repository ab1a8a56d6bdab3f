"""KV heads that some ranks have, on their way to holders that divide them otherwise."""

from __future__ import annotations

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.rblock.heads import HeadPart, divided, transfers

HEADS = 24


def heads(part: HeadPart | None, of: range) -> range:
    if part is None:
        return of
    size = len(of) // part.parts
    return of[part.number * size : (part.number + 1) * size]


@pytest.mark.parametrize(
    ("senders", "receivers"), [(1, 1), (1, 4), (4, 1), (2, 4), (4, 2), (3, 3), (2, 8), (6, 3)]
)
def test_each_head_arrives_once(senders: int, receivers: int) -> None:
    arrived: list[int] = []
    for sender in [None] if senders == 1 else divided(senders):
        for transfer in transfers(sender, receivers):
            place = heads(divided(receivers)[transfer.place] if receivers > 1 else None, range(HEADS))
            own = heads(sender, range(HEADS))
            assert heads(transfer.sent, own) == heads(transfer.received, place)
            arrived += heads(transfer.sent, own)
    assert sorted(arrived) == list(range(HEADS))


@pytest.mark.parametrize(("senders", "receivers"), [(2, 3), (3, 2), (4, 6)])
def test_shares_that_cut_each_other_are_refused(senders: int, receivers: int) -> None:
    with pytest.raises(
        InvalidInput, match=f"over {senders} ranks cannot be sent to a head group, or ranks, of {receivers}"
    ):
        transfers(divided(senders)[0], receivers)
