"""The heads of a layer's frames, as docs/formats/attention-layer.md has them; frames.h has the same bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvcommons.errors import DataLoss, UnsupportedParameter

VERSION = 1
_HEAD, _REPLY = struct.Struct("<HHIIIIIII"), struct.Struct("<HHIIIII")


class LayerHead(NamedTuple):
    """One layer of a plan, from its debtor. Payload: queries [queries, query_heads, head_dim] in float32,
    rotated for each row, then K and V [appended, 2, kv_heads, head_dim] in the KV dtype."""

    layer: int
    plan: int
    revision: int  # of the plan
    step: int
    deadline_ms: int  # from receipt
    queries: int  # of all rows
    appended: int  # those that bring K and V

    def pack(self) -> bytes:
        return _HEAD.pack(VERSION, *self, 0)

    @classmethod
    def unpack(cls, head: bytes) -> LayerHead:
        """Raises UnsupportedParameter for another version, DataLoss for what is no such head."""
        fields = _unpack(_HEAD, head)
        if fields[-1]:
            raise DataLoss(f"a layer's head has {fields[-1]} where 0 belongs: do both ends run one version?")
        return cls(*fields[:-1])


class LayerReply(NamedTuple):
    """Payload: outputs [queries, query_heads, head_dim], then lse [queries, query_heads], float32. Rows that
    are lost are empty: lse is -inf."""

    layer: int
    plan: int
    step: int
    queued_us: int  # the creditor had it, and computed for others or for itself
    computed_us: int
    lost: int  # of the plan's rows, so far: DescribePlan says which

    def pack(self) -> bytes:
        return _REPLY.pack(VERSION, *self)

    @classmethod
    def unpack(cls, head: bytes) -> LayerReply:
        """As LayerHead."""
        return cls(*_unpack(_REPLY, head))


def _unpack(layout: struct.Struct, head: bytes) -> tuple[int, ...]:
    """The fields behind the version."""
    version = int.from_bytes(head[:2], "little")
    if len(head) < 2 or version != VERSION:
        raise UnsupportedParameter(
            f"a layer's head of version {version}; this build speaks {VERSION}: run one version",
            param="version",
        )
    if len(head) != layout.size:
        raise DataLoss(
            f"a layer's head has {len(head)} bytes, not {layout.size}: do both ends run one version?"
        )
    return layout.unpack(head)[1:]
