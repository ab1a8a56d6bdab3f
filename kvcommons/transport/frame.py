"""The fixed header before every frame. docs/formats/data-frame.md is its page, a golden test pins it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvcommons.errors import DataLoss, TooLarge, UntrustedPeer
from kvcommons.transport.base import Limits

MAGIC = b"KVCF"
VERSION = 1
# magic, version, flags, head bytes, payload bytes
_HEADER = struct.Struct("<4sHHIQ")
HEADER_BYTES = _HEADER.size
_FLAG_LAST, _FLAG_LAYER = 1, 2
# What a peer says first that wants a token (docs/formats/token-greeting.md).
_CHALLENGE = b"KVCT"


class Header(NamedTuple):
    head_bytes: int
    payload_bytes: int
    last: bool  # after this frame the sender takes no more, and closes
    layer: bool  # the head is a layer's (docs/formats/attention-layer.md), and no protobuf


def pack(
    head_bytes: int, payload_bytes: int, limits: Limits, *, last: bool = False, layer: bool = False
) -> bytes:
    """`last` and `layer` as in Header. Raises TooLarge for a frame that the peer would refuse."""
    _check(head_bytes, payload_bytes, limits)
    flags = _FLAG_LAST * last | _FLAG_LAYER * layer
    return _HEADER.pack(MAGIC, VERSION, flags, head_bytes, payload_bytes)


def unpack(header: bytes | bytearray, limits: Limits) -> Header:
    """Raises DataLoss for what is no frame of this version, TooLarge over a limit."""
    magic, version, flags, head_bytes, payload_bytes = _HEADER.unpack(header)
    if magic == _CHALLENGE:
        raise UntrustedPeer("this address asks for a token: set token_file in all services of the stack")
    if magic != MAGIC:
        raise DataLoss(
            f"not a data frame: it begins with {magic!r}; is something else talking to this address?"
        )
    if version != VERSION or flags & ~(_FLAG_LAST | _FLAG_LAYER):
        raise DataLoss(
            f"data frame of version {version}, flags {flags}; this build speaks {VERSION}: run one version"
        )
    _check(head_bytes, payload_bytes, limits)
    return Header(head_bytes, payload_bytes, bool(flags & _FLAG_LAST), bool(flags & _FLAG_LAYER))


def _check(head_bytes: int, payload_bytes: int, limits: Limits) -> None:
    if head_bytes > limits.head_bytes:
        raise TooLarge(f"data frame with a head of {head_bytes} bytes; the limit is {limits.head_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise TooLarge(
            f"data frame with a payload of {payload_bytes} bytes; the limit is {limits.payload_bytes}"
        )
