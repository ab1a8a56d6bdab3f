"""Identities are pinned: a change of one byte would orphan every stored block."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommons.rblock.identity import IdentityChain, block_id, reusable_blocks, tenant_salt

GOLDEN = Path(__file__).parents[2] / "golden" / "block-identity.json"
MODEL = bytes(range(32))
SALT = tenant_salt(b"golden secret", "alice")


def test_golden_identities() -> None:
    golden = json.loads(GOLDEN.read_text())
    salt = tenant_salt(golden["secret"].encode(), golden["tenant"])
    assert salt.hex() == golden["salt"]
    chain = IdentityChain(salt, bytes.fromhex(golden["model"]), golden["block_tokens"])
    chain.extend(golden["tokens"])
    assert [identity.hex() for identity in chain.ids] == golden["ids"]


def test_tenants_share_no_identity() -> None:
    other = tenant_salt(b"golden secret", "bob")
    assert block_id(SALT, MODEL, b"", [1, 2]) != block_id(other, MODEL, b"", [1, 2])
    assert tenant_salt(b"another secret", "alice") != SALT


@pytest.mark.parametrize(
    "other",
    [
        (MODEL[:-1] + b"\xff", b"", [1, 2, 3, 4]),
        (MODEL, b"p" * 32, [1, 2, 3, 4]),
        (MODEL, b"", [1, 2, 3, 5]),
        (MODEL, b"", [1, 2, 3]),
        (MODEL, b"", [2, 1, 3, 4]),
    ],
)
def test_everything_counts(other: tuple[bytes, bytes, list[int]]) -> None:
    assert block_id(SALT, *other) != block_id(SALT, MODEL, b"", [1, 2, 3, 4])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_a_chain_does_not_depend_on_how_tokens_come(tokens: list[int], cuts: list[int]) -> None:
    whole = IdentityChain(SALT, MODEL, 4)
    whole.extend(tokens)
    parts = IdentityChain(SALT, MODEL, 4)
    new: list[bytes] = []
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(edges):
        new += parts.extend(tokens[start:end])
    assert parts.ids == whole.ids == new
    assert len(whole.ids) == len(tokens) // 4
    assert parts.tokens == len(tokens)


def test_a_chain_after_a_truncation_never_meets_a_plain_one() -> None:
    plain, truncated = IdentityChain(SALT, MODEL, 2), IdentityChain(SALT, MODEL, 2, parent=b"t" * 32)
    plain.extend([1, 2, 3, 4])
    truncated.extend([1, 2, 3, 4])
    assert not set(plain.ids) & set(truncated.ids)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_has_no_kv(tokens: int, blocks: int) -> None:
    assert reusable_blocks(tokens, 16) == blocks


def test_what_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        IdentityChain(SALT, MODEL, 4).extend([1, -1])
    with pytest.raises(ValueError, match="salt secret is empty"):
        tenant_salt(b"", "alice")
