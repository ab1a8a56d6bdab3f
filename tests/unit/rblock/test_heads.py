"""Parts of the KV heads: which they are, and where they lie in an object."""

from __future__ import annotations

import pytest
import torch

from kvcommons.errors import InvalidInput
from kvcommons.rblock.heads import HeadPart, divided
from kvcommons.rblock.layout import Layout

WHOLE = Layout(layers=3, kv_heads=6, block_tokens=4, head_dim=2, kv_dtype="float32", query_heads=12)


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_are_equal_and_together_all_heads(parts: int) -> None:
    made = divided(parts)
    shares = [part.layout(WHOLE) for part in made]
    assert all(share == shares[0] for share in shares)
    assert shares[0].object_bytes * parts == WHOLE.object_bytes
    heads, queries = list(range(6)), list(range(12))
    assert [head for part in made for head in heads[part.kv_heads(WHOLE)]] == heads
    assert [head for part in made for head in queries[part.query_heads(WHOLE)]] == queries


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_pieces_are_the_parts_objects_in_place(parts: int) -> None:
    objects = torch.arange(2 * 2 * 6 * 4 * 2, dtype=torch.float32).view(2, *WHOLE.object_shape)
    buffers = [memoryview(one.view(-1).numpy()) for one in objects]
    for part in divided(parts):
        pieces = part.pieces(buffers)
        expected = objects[:, :, part.kv_heads(WHOLE)].contiguous()
        assert b"".join(pieces) == expected.numpy().tobytes()
    pieces[0][:4] = bytes(4)
    assert buffers[0].cast("B")[(parts - 1) * len(pieces[0]) :][:4] == bytes(4)


def test_query_heads_follow_their_kv_heads() -> None:
    """Query head h reads KV head h // (query heads over KV heads)."""
    for part in divided(3):
        queries, heads = range(12)[part.query_heads(WHOLE)], range(6)[part.kv_heads(WHOLE)]
        assert sorted({query // 2 for query in queries}) == list(heads)


def test_every_part_has_a_model_of_its_own() -> None:
    whole = bytes(32)
    models = {part.model(whole) for parts in (2, 3) for part in divided(parts)} | {whole}
    assert len(models) == 6
    assert {len(model) for model in models} == {32}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1", "is no part of a whole"),
        ("a/2", "is no part of a whole"),
        ("-1/2", "is no part of a whole"),
        ("2/2", "the last one is 1/2"),
        ("0/1", "divides nothing"),
        ("0/0", "divides nothing"),
    ],
)
def test_a_part_that_is_not_there(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        HeadPart.parse(text)


def test_heads_that_cannot_be_divided() -> None:
    part = HeadPart.parse("3/4")
    assert (part, str(part)) == (HeadPart(number=3, parts=4), "3/4")
    with pytest.raises(InvalidInput, match=r"6 KV heads cannot be divided into 4 .* can into 2, 3, 6"):
        part.layout(WHOLE)
