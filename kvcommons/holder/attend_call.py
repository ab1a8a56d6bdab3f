"""A layer's partial asked for at one holder: rows that attend over segments there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention.memory import byte_view
from kvcommons.attention.partial import Partial
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.client import DataClient, PendingCall
from kvcommons.transport.deadline import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendPart:
    """Rows that attend over one segment; see AttendSegment in data.proto."""

    ref: SegmentRef
    rows: int
    first_position: int
    length: int  # from first_block on
    append: bool = False
    first_block: int = 0  # within the segment


@dataclass(frozen=True, slots=True)
class PendingPartial:
    """A holder computes; `finish` or `cancel` it."""

    call: PendingCall
    rows: int
    query_heads: int
    head_dim: int

    def finish(self) -> Partial:
        """The partial of all parts' rows, in order, on the CPU. Raises what the holder raised (StaleEpoch),
        Unavailable, DeadlineExceeded."""
        return self.finish_told()[0]

    def finish_told(self) -> tuple[Partial, data_pb2.AttendLayerReply]:
        """And what the holder says that it took."""
        out = torch.empty((self.rows, self.query_heads, self.head_dim), dtype=torch.float32)
        lse = torch.empty((self.rows, self.query_heads), dtype=torch.float32)
        reply = self.call.finish([byte_view(out), byte_view(lse)])
        return Partial(out=out, lse=lse), reply.attend_layer

    def cancel(self) -> None:
        self.call.cancel()


def attend_request(parts: Sequence[AttendPart]) -> data_pb2.AttendLayer:
    """For `begin_attend`: the same parts of all layers need to be written down once only."""
    return data_pb2.AttendLayer(segments=[_attend_segment(part) for part in parts])


def begin_attend(
    client: DataClient,
    layer: int,
    parts: Sequence[AttendPart] | data_pb2.AttendLayer,
    q: Tensor,
    appended: Sequence[Tensor],
    deadline: Deadline,
) -> PendingPartial:
    """Asks a holder's data plane for a partial: see RemoteHolder.begin_attend."""
    request = data_pb2.DataRequest(
        traceparent=current_traceparent(),
        attend_layer=parts if isinstance(parts, data_pb2.AttendLayer) else attend_request(parts),
    )
    request.attend_layer.layer = layer
    payload = [byte_view(tensor.detach().cpu().contiguous()) for tensor in (q.float(), *appended)]
    call = client.begin(request, payload, deadline=deadline)
    return PendingPartial(call=call, rows=q.shape[0], query_heads=q.shape[1], head_dim=q.shape[2])


def _attend_segment(part: AttendPart) -> data_pb2.AttendSegment:
    return data_pb2.AttendSegment(
        handle=part.ref.handle,
        epoch=part.ref.epoch,
        rows=part.rows,
        first_position=part.first_position,
        append=part.append,
        length=part.length,
        generation=part.ref.generation,
        first_block=part.first_block,
    )
