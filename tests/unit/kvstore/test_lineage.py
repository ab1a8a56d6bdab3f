"""What is left of a prompt that makes room, block by block, is its beginning."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.lineage import by_worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    block_id: bytes
    parent: bytes
    first_index: int
    created_ms: int


def entry(prompt: str, created_ms: int) -> Entry:
    """The last block of a prompt with a letter a block."""
    return Entry(
        block_id=prompt.encode(),
        parent=prompt[:-1].encode(),
        first_index=len(prompt) - 1,
        created_ms=created_ms,
    )


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text("ab", min_size=1, max_size=6), st.integers(0, 5), max_size=20))
def test_nothing_goes_before_what_continues_it(stored: dict[str, int]) -> None:
    """Whatever was stored when, and whatever is missing in between."""
    order = by_worth(entry(prompt, created_ms) for prompt, created_ms in stored.items())
    assert sorted(order) == sorted(prompt.encode() for prompt in stored)
    place = {block_id: number for number, block_id in enumerate(order)}
    for prompt in stored:
        parent = place.get(prompt[:-1].encode())
        assert parent is None or parent > place[prompt.encode()]


def test_the_older_prompt_goes_first_whole() -> None:
    old = [entry("x" + "y" * depth, 10 + depth) for depth in range(3)]
    new = [entry("ab", 100), entry("a", 1)]  # its beginning is older than all, its end newer
    assert by_worth([*new, *old]) == [b"xyy", b"xy", b"x", b"ab", b"a"]
