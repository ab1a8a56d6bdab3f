"""What the holders of a spread prompt have to do for a chunk of it."""

from __future__ import annotations

from typing import cast

from kvcommons.backend.interface import Backend
from kvcommons.prefill.spread import Holders
from kvcommons.prefill.targets import Place, Target
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout

SIZE = 4


def holders(heads: HeadPart | None = None) -> Holders:
    """Nobody is asked."""
    return Holders(cast(Layout, None), cast(Backend, None), attend_deadline_s=1.0, heads=heads)


def target(address: str, first_block: int, blocks: int, *parts: str) -> Target:
    return Target(
        data_address=address,
        handle=1,
        epoch=1,
        first_block=first_block,
        blocks=blocks,
        parts=tuple(Place(data_address=part, handle=1, epoch=1) for part in parts),
    )


def test_a_chunk_waits_for_the_holder_that_has_most_of_what_is_before_it() -> None:
    spread = (target("a", 0, 3), target("b", 3, 4), target("a", 7, 2))
    most = [holders().most_tokens(spread, SIZE, before) for before in (0, 5, 18, 28, 36)]
    assert most == [0, 5, 12, 16, 20], "the first one has two runs of it"


def test_a_part_of_a_head_group_does_its_share_of_the_heads() -> None:
    grouped = (target("a", 0, 4, "a", "b"), target("c", 4, 1))
    assert holders().most_tokens(grouped, SIZE, 20) == 8
    rank = HeadPart(number=1, parts=2)
    assert holders(rank).most_tokens(grouped[:1], SIZE, 16) == 16, "its own heads lie at one part"
