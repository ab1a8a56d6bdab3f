"""Blocks of a segment at another holder: read into this one's memory, or sent to a kvstore. How KV moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSave:
    """Full blocks of a segment, on their way to a kvstore."""

    store: str  # its data address
    tenant: str
    parent: bytes  # identity of the block before them; empty at the sequence's beginning
    block_ids: Sequence[bytes]
    first_block: int  # within the segment
    first_index: int  # the same block's, within the sequence


def read_request(ref: SegmentRef, layer: int, first_block: int, blocks: int) -> data_pb2.DataRequest:
    """For one layer of whole blocks of a segment."""
    return data_pb2.DataRequest(
        traceparent=current_traceparent(),
        read_blocks=data_pb2.ReadBlocks(
            handle=ref.handle,
            epoch=ref.epoch,
            generation=ref.generation,
            layer=layer,
            first_block=first_block,
            blocks=blocks,
        ),
    )


def write_request(ref: SegmentRef, layer: int, first_block: int, blocks: int) -> data_pb2.DataRequest:
    """The other way."""
    return data_pb2.DataRequest(
        traceparent=current_traceparent(),
        write_blocks=data_pb2.WriteBlocks(
            handle=ref.handle,
            epoch=ref.epoch,
            generation=ref.generation,
            layer=layer,
            first_block=first_block,
            blocks=blocks,
        ),
    )


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
    client.call(read_request(ref, layer, first_block, len(into)), into=into, deadline=deadline)


def copy_blocks(
    read: Callable[[SegmentRef, int, int, Sequence[Buffer], Deadline], None],
    ref: SegmentRef,
    first_block: int,
    memory: BlockMemory,
    blocks: Sequence[int],
    deadline: Deadline,
) -> None:
    """All layers of blocks `first_block` … of a segment into physical `blocks` of `memory`. `read`: a
    creditor's `read_blocks`, or this module's with its client. Raises as that; the content of `blocks` is
    undefined then."""
    step = max(1, _READ_BYTES // memory.layout.object_bytes)
    for layer in range(memory.layout.layers):
        for begin in range(0, len(blocks), step):
            with memory.write_buffers(layer, blocks[begin : begin + step]) as buffers:
                read(ref, layer, first_block + begin, buffers, deadline)
