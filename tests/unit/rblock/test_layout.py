from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.layout import Layout

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "block-identity.json").read_text())


def info(**changes: object) -> pb.ModelInfo:
    fields = {
        "layers": 16,
        "kv_heads": 4,
        "head_dim": 64,
        "block_tokens": 64,
        "kv_dtype": "bfloat16",
        "query_heads": 16,
    }
    return pb.ModelInfo(**(fields | changes))  # type: ignore[arg-type]


def test_sizes_of_the_246m_model() -> None:
    layout = Layout.of(info())
    assert layout.object_shape == (2, 4, 64, 64)
    assert layout.object_bytes == 64 << 10
    assert layout.block_bytes == 1 << 20
    assert Layout.of(info(kv_dtype="float32")).object_bytes == 128 << 10
    assert [layout.blocks_of(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("head_dim", 0), ("kv_dtype", "float16"), ("query_heads", 6)]
)
def test_what_is_no_layout_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInput) as error:
        Layout.of(info(**{field: value}))
    assert error.value.param == field


def test_golden_checksum() -> None:
    golden = GOLDEN["object"]
    identity = bytes.fromhex(GOLDEN["ids"][golden["block"]])
    assert f"{checksum(identity, golden['layer'], bytes(range(256))):x}" == golden["xxh3_64"]


def test_a_checksum_covers_place_as_well_as_bytes() -> None:
    payload = memoryview(bytearray(b"kv" * 100))
    right = checksum(b"a" * 32, 1, payload)
    assert checksum(b"a" * 32, 1, bytes(payload)) == right
    assert checksum(b"b" * 32, 1, payload) != right
    assert checksum(b"a" * 32, 2, payload) != right
    payload[17] ^= 1
    assert checksum(b"a" * 32, 1, payload) != right
