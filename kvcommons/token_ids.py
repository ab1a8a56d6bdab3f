"""Token ids in a row: 32 bits each, little-endian where they are bytes. A conversation has a million of them,
and Python takes a third of a second to go through so many one by one."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4


def token_array(tokens: Sequence[int] = ()) -> array[int]:
    """Behaves as a list of them, and is copied, cut and joined as memory is. Raises ValueError for a token id
    that does not fit 32 bits."""
    try:
        made = array("I", tokens)
    except OverflowError as error:
        raise ValueError("a token id does not fit 32 bits") from error
    assert made.itemsize == TOKEN_BYTES
    return made


def packed(tokens: Sequence[int]) -> bytes:
    """As bytes, for who hashes or sends them. Raises as `token_array`."""
    made = tokens if isinstance(tokens, array) and sys.byteorder == "little" else token_array(tokens)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def unpacked(data: bytes) -> array[int]:
    """What `packed` made bytes of. Raises ValueError for bytes that are no whole token ids."""
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole token ids of {TOKEN_BYTES}")
    made = token_array()
    made.frombytes(data)
    if sys.byteorder == "big":
        made.byteswap()
    return made
