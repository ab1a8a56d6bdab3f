"""Session records as this router saw them last: a turn's begin need not bring again what is known here."""

from __future__ import annotations

from collections import OrderedDict

from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.token_ids import TOKEN_BYTES

COPIES_BYTES = 64 << 20


class RecordCopies:
    """Each is of the session as its `last_turn_id` left it. Those used least recently go first, once there
    are more bytes than `bytes_max`. Nobody changes a record that is here."""

    def __init__(self, bytes_max: int = COPIES_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._records: OrderedDict[tuple[str, str], tuple[pb.SessionRecord, int]] = OrderedDict()

    def get(self, tenant: str, session_id: str) -> pb.SessionRecord:
        """One without a `last_turn_id` where nothing is known."""
        known = self._records.get((tenant, session_id))
        return known[0] if known is not None else pb.SessionRecord()

    def put(self, record: pb.SessionRecord) -> None:
        key = record.tenant, record.session_id
        _, before = self._records.pop(key, (None, 0))
        size = _size_bytes(record)
        self._records[key] = record, size
        self._bytes += size - before
        while self._bytes > self._bytes_max:
            self._bytes -= self._records.popitem(last=False)[1][1]


def grown(record: pb.SessionRecord, added: pb.SessionRecord, *, kept_blocks: int) -> pb.SessionRecord:
    """A record with what came after it behind it, and with the head of what came after: no turn sets any
    field of a head back to nothing. Of its blocks the first `kept_blocks` stay."""
    after = pb.SessionRecord()
    _merge(after, record)
    del after.block_ids[kept_blocks:]
    _merge(after, added)
    return after


def _merge(into: pb.SessionRecord, record: pb.SessionRecord) -> None:
    """As MergeFrom, which encodes and decodes all tokens: that of a container copies memory."""
    for field, value in record.ListFields():
        if hasattr(value, "MergeFrom"):
            getattr(into, field.name).MergeFrom(value)
        else:
            setattr(into, field.name, value)


def _size_bytes(record: pb.SessionRecord) -> int:
    """About what it takes in memory; its ByteSize would encode all tokens."""
    messages = sum(message.ByteSize() for message in record.messages)
    return TOKEN_BYTES * len(record.tokens) + sum(map(len, record.block_ids)) + messages
