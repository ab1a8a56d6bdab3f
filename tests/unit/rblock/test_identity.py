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
    cut = golden["truncation"]
    chain = IdentityChain(salt, bytes.fromhex(golden["model"]), golden["block_tokens"], ids=chain.ids)
    chain.truncate(head_tokens=cut["head_tokens"], dropped_tokens=cut["dropped_tokens"])
    assert chain.parent.hex() == cut["id"]
    assert [identity.hex() for identity in chain.extend(cut["tokens"])] == [cut["next"]]


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


def test_a_chain_goes_on_from_identities() -> None:
    whole = IdentityChain(SALT, MODEL, 2)
    whole.extend([1, 2, 3, 4, 5])
    later = IdentityChain(SALT, MODEL, 2, ids=whole.ids)
    assert later.tokens == 4
    later.extend([5, 6])
    whole.extend([6])
    assert later.ids == whole.ids


def test_a_truncation_changes_what_follows() -> None:
    def after(parent: bytes = b"", **changes: int) -> list[bytes]:
        chain = IdentityChain(SALT, MODEL, 2, parent=parent)
        chain.extend([1, 2])
        chain.truncate(**({"head_tokens": 0, "dropped_tokens": 2} | changes))
        parts = IdentityChain(SALT, MODEL, 2, ids=chain.ids, parent=chain.parent)
        parts.extend([3, 4])
        chain.extend([3])
        chain.extend([4])
        assert parts.ids == chain.ids
        return chain.ids

    plain = IdentityChain(SALT, MODEL, 2)
    plain.extend([1, 2, 3, 4])
    made = [
        plain.ids,
        after(),
        after(head_tokens=2),
        after(dropped_tokens=4),
        after(parent=b"t" * 32),
    ]
    assert [ids[0] for ids in made[:4]] == [plain.ids[0]] * 4
    assert len({ids[1] for ids in made}) == len(made)


def test_a_truncation_is_at_a_blocks_border() -> None:
    chain = IdentityChain(SALT, MODEL, 2)
    chain.extend([1, 2, 3])
    with pytest.raises(ValueError, match="border"):
        chain.truncate(head_tokens=0, dropped_tokens=2)
