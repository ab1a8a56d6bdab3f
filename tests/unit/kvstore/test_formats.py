"""What lies on disk is pinned byte by byte, and what another version wrote is refused, not guessed at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss
from kvcommons.pb import common_pb2
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore import session as rules
from services.kvstore.folder import UnknownFormat
from services.kvstore.index import (
    IndexEntry,
    StoredCopy,
    decode_entry,
    decode_key,
    decode_stored,
    encode_entry,
    encode_key,
)
from services.kvstore.slab import decode_header, encode_header
from services.kvstore.tier import PAGE_BYTES, BlockShape, Slot
from services.kvstore.turn_lease import TurnLease, decode_document, decode_lease, encode_lease

GOLDEN = Path(__file__).parents[2] / "golden"
SHAPE = BlockShape(model=bytes(range(32)), layers=3, object_bytes=5000)
ENTRY = IndexEntry(
    model=bytes(range(32)),
    tenant="alice",
    parent=bytes(range(32, 64)),
    first_index=7,
    slot=Slot(3, 41),
    generation=(5 << 40) + 2,
    created_ms=1_750_000_000_123,
    checksums=(1, 2**64 - 1, 0x97114D1DBC3732B7),
)
LEASE = TurnLease(turn_id="turn-1", owner="router-a", fencing=9, expires_ms=1_750_000_060_000)
DOCUMENT = pb.Document(
    format=1,
    model=bytes(range(32)),
    model_name="demo",
    tokens=[1, 300, 70000],
    messages=[pb.Message(role="system", content="All cats are called Zuzu.")],
)
DOCUMENT_STATE = pb.DocumentState(
    tokens=1_000_000,
    computed_tokens=400_000,
    tokens_per_s=812.5,
    left_ms=900_000,
    begun_ms=1_750_000_000_000,
    role="system",
    model_name="demo",
    waits_for="no prefill is ready",
)
RECORD = pb.SessionRecord(
    format=1,
    tenant="alice",
    session_id="s-1",
    version=2,
    model=bytes(range(32)),
    model_name="demo",
    tokens=[1, 300, 70000],
    messages=[pb.Message(role="user", content="Hi"), pb.Message(role="assistant", content="Hello")],
    block_ids=[bytes(range(32))],
    truncations=[pb.TruncationRecord(at_token=100, kept_head_tokens=16, dropped_tokens=32)],
    created_ms=1_750_000_000_000,
    last_used_ms=1_750_000_000_001,
    ttl_s=60,
    parent="s-0",
    root="s-0",
    dropped_tokens=32,
    last_turn_id="turn-1",
)
CALL = pb.ToolCall(id="call_1", name="weather", arguments='{"city": "Rome"}')
RECORD_2 = pb.SessionRecord()
RECORD_2.CopyFrom(RECORD)
RECORD_2.MergeFrom(
    pb.SessionRecord(
        format=2,
        messages=[
            pb.Message(role="assistant", reasoning="hm", tool_calls=[CALL]),
            pb.Message(role="tool", content="sunny", tool_call_id="call_1"),
            pb.Message(role="assistant", content="It is sunny.", end_token=40),
        ],
        parent_messages=3,
        tools='[{"type": "function", "function": {"name": "weather"}}]',
        incarnation=bytes(16),
    )
)


ANSWERED = pb.AnsweredRequest(
    key=b"k" * 16,
    request=b"r" * 16,
    turn_id="turn-2",
    created_s=1_750_000_000,
    service_tier="default",
    finish_reason="stop",
    matched_stop="END",
    prompt_tokens=30,
    completion_tokens=10,
    cached_tokens=16,
    reasoning_tokens=2,
    shown=[pb.ShownToken(start=3, token=common_pb2.SampledToken(token=7, position=30, logprob=-0.5))],
    dropped_tokens=32,
    kv="kept",
)


def test_golden_slab_header() -> None:
    golden = (GOLDEN / "slab-header.bin").read_bytes()
    assert encode_header(3, SHAPE, 100) == golden.ljust(PAGE_BYTES, b"\0")
    assert decode_header(golden) == (3, SHAPE, 100)


def test_golden_index_entry() -> None:
    golden = (GOLDEN / "index-entry.bin").read_bytes()
    assert encode_entry(ENTRY) == golden
    assert decode_entry(golden) == ENTRY
    assert decode_stored(golden) == StoredCopy(ENTRY.slot, ENTRY.generation, ENTRY.checksums)
    key = encode_key(ENTRY.model, b"b" * 32)
    assert key == b"\x20\x00" + ENTRY.model + b"b" * 32
    assert decode_key(key) == (ENTRY.model, b"b" * 32)


def test_golden_session_record_and_lease() -> None:
    assert RECORD.SerializeToString(deterministic=True) == (GOLDEN / "session-record.bin").read_bytes()
    # Of before there were tools.
    assert rules.decode_record((GOLDEN / "session-record.bin").read_bytes()) == RECORD
    assert RECORD_2.SerializeToString(deterministic=True) == (GOLDEN / "session-record-2.bin").read_bytes()
    assert rules.decode_record((GOLDEN / "session-record-2.bin").read_bytes()) == RECORD_2
    assert encode_lease(LEASE) == (GOLDEN / "turn-lease.bin").read_bytes()
    assert decode_lease((GOLDEN / "turn-lease.bin").read_bytes()) == LEASE


def test_golden_answer_that_may_be_asked_for_again() -> None:
    """It is behind its message; a version that does not know it passes it over."""
    golden = (GOLDEN / "answered-request.bin").read_bytes()
    record = pb.SessionRecord()
    record.CopyFrom(RECORD_2)
    record.messages[-1].answered.CopyFrom(ANSWERED)
    assert record.messages[-1].SerializeToString(deterministic=True) == golden
    assert rules.decode_record(record.SerializeToString()).messages[-1] == pb.Message.FromString(golden)


def test_golden_document_and_its_lease() -> None:
    assert DOCUMENT.SerializeToString(deterministic=True) == (GOLDEN / "document.bin").read_bytes()
    assert decode_document((GOLDEN / "document.bin").read_bytes()) == DOCUMENT
    lease = dataclasses.replace(LEASE, document=DOCUMENT_STATE)
    assert encode_lease(lease) == (GOLDEN / "document-lease.bin").read_bytes()
    assert decode_lease((GOLDEN / "document-lease.bin").read_bytes()) == lease


def test_other_versions_are_refused() -> None:
    header = bytearray(encode_header(3, SHAPE, 100))
    header[8] = 2
    with pytest.raises(UnknownFormat, match="format 2"):
        decode_header(bytes(header))
    with pytest.raises(UnknownFormat, match="format 2"):
        decode_entry(b"\x02" + encode_entry(ENTRY)[1:])
    with pytest.raises(UnknownFormat, match="format 2"):
        decode_stored(b"\x02" + encode_entry(ENTRY)[1:])
    with pytest.raises(UnknownFormat, match=r"format 3; .* reads 1 and 2"):
        rules.decode_record(pb.SessionRecord(format=3, tenant="alice").SerializeToString())
    with pytest.raises(UnknownFormat, match="unknown format"):
        decode_lease(b"\x03" + encode_lease(LEASE)[1:])
    with pytest.raises(UnknownFormat, match="format 2"):
        decode_document(pb.Document(format=2, tokens=[1]).SerializeToString())


@pytest.mark.parametrize("place", [0, 12, 20, 84, 100])
def test_a_damaged_slab_header_is_noticed(place: int) -> None:
    header = bytearray(encode_header(3, SHAPE, 100))
    header[place] ^= 0x10
    with pytest.raises(DataLoss):
        decode_header(bytes(header))


@pytest.mark.parametrize("length", [1, 20, -1])
@pytest.mark.parametrize("decode", [decode_entry, decode_stored])
def test_a_cut_index_entry_is_noticed(decode: Callable[[bytes], object], length: int) -> None:
    with pytest.raises(ValueError, match="index entry"):
        decode(encode_entry(ENTRY)[:length])


def test_an_entry_at_the_beginning_of_a_sequence_has_no_parent() -> None:
    first = ENTRY._replace(parent=b"", first_index=0, tenant="ünïcode")
    assert decode_entry(encode_entry(first)) == first
