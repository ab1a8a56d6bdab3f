"""Token ids in a row, as they are hashed and sent."""

from __future__ import annotations

import pytest

from kvcommons.token_ids import packed, token_array, unpacked

TOKENS = [0, 1, 65_536, 2**32 - 1]


def test_what_is_packed_is_unpacked() -> None:
    whole = b"\0\0\0\0\1\0\0\0\0\0\1\0\xff\xff\xff\xff"
    for tokens in (TOKENS, tuple(TOKENS), token_array(TOKENS)):
        assert packed(tokens) == whole
        assert list(tokens) == TOKENS
    assert list(unpacked(whole)) == TOKENS
    assert packed([]) == b""
    assert not unpacked(b"")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        packed([5, token])


def test_bytes_that_are_no_whole_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        unpacked(bytes(7))
