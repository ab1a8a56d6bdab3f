"""Blocks of a segment at another holder, read into this one's memory: how KV moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvcommons.backend.memory import BlockMemory
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Of one read: a holder's connection is not kept from partials for longer than this takes.
_READ_BYTES = 4 << 20


class Source(Protocol):
    """Whoever reads blocks of segments."""

    def read_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, into: Sequence[Buffer], deadline: Deadline
    ) -> None:
        """One layer of whole blocks, one writable buffer an object."""


class DataSource:
    """A holder's data plane, for a reader that borrows nothing there."""

    def __init__(self, client: DataClient) -> None:
        self._client = client

    def read_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, into: Sequence[Buffer], deadline: Deadline
    ) -> None:
        read_blocks(self._client, ref, layer, first_block, into, deadline)


def read_blocks(
    client: DataClient,
    ref: SegmentRef,
    layer: int,
    first_block: int,
    into: Sequence[Buffer],
    deadline: Deadline,
) -> None:
    """One layer of whole blocks of a segment. Raises what the holder raised (StaleEpoch), Unavailable,
    DeadlineExceeded."""
    read = data_pb2.ReadBlocks(
        handle=ref.handle,
        epoch=ref.epoch,
        generation=ref.generation,
        layer=layer,
        first_block=first_block,
        blocks=len(into),
    )
    request = data_pb2.DataRequest(traceparent=current_traceparent(), read_blocks=read)
    client.call(request, into=into, deadline=deadline)


def copy_blocks(
    source: Source,
    ref: SegmentRef,
    first_block: int,
    memory: BlockMemory,
    blocks: Sequence[int],
    deadline: Deadline,
) -> None:
    """All layers of blocks `first_block` … of a segment into physical `blocks` of `memory`. Raises as
    `read_blocks`; the content of `blocks` is undefined then."""
    step = max(1, _READ_BYTES // memory.layout.object_bytes)
    for layer in range(memory.layout.layers):
        for begin in range(0, len(blocks), step):
            with memory.write_buffers(layer, blocks[begin : begin + step]) as buffers:
                source.read_blocks(ref, layer, first_block + begin, buffers, deadline)
