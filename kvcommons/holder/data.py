"""The holder's data plane: blocks in, blocks out, partials, and a sequence's start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcommons.errors import InvalidInput, UnsupportedParameter
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.holder import Holder
from kvcommons.holder.plan_session import OPERATION_S, Attention, PlanSession
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import common_pb2
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.heads import HeadPart
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange

StartHook = Callable[[pb.StartSequence], None]
HistoryHook = Callable[[pb.AwaitHistory, Deadline], int]
PlacesHook = Callable[[pb.AwaitPlaces, Deadline], Sequence[common_pb2.SegmentPlace]]


class HolderData:
    """A DataServer's handler. `on_start_sequence` is called by a data thread once prefill has delivered all
    of a sequence; it must not block. `history` waits until what is fetched of a sequence's leading blocks is
    there, and says how many are; `places` until more of a sequence's blocks have a place, and says where.
    What they raise goes back to prefill."""

    def __init__(
        self,
        holder: Holder,
        *,
        on_start_sequence: StartHook | None = None,
        history: HistoryHook | None = None,
        places: PlacesHook | None = None,
        budget: AttentionBudget | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`budget` bounds what is computed for others; None: nothing does. `tracer` makes a span of each
        request that belongs to a trace. A DataServer's `session` is `attention.session`."""
        self._tracer = tracer or Tracer.off()
        self._holder = holder
        allowance = budget.allowance if budget is not None else None
        self.attention = Attention(holder, allowance, self._tracer)
        self._on_start_sequence = on_start_sequence
        self._history = history
        self._places = places

    def __call__(self, request: pb.DataRequest, exchange: Exchange) -> None:
        exchange.deadline = exchange.deadline.within(OPERATION_S)
        if not request.traceparent:
            self._answer(request, exchange)
            return
        op = request.WhichOneof("op")
        with self._tracer.span(f"holder.{op}", parent=request.traceparent, kind="server"):
            self._answer(request, exchange)
        exchange.follow = None  # its next ones belong to the trace too

    def _answer(self, request: pb.DataRequest, exchange: Exchange) -> None:
        op = request.WhichOneof("op")
        if op == "write_blocks":
            self._write(request.write_blocks, exchange)
        elif op == "read_blocks":
            self._read(request.read_blocks, exchange)
        elif op in ("open_plan", "change_plan", "describe_plan"):
            self._plan(op, request, exchange)
        elif op == "start_sequence" and self._on_start_sequence is not None:
            self._start(request.start_sequence, self._on_start_sequence, exchange)
        elif op == "await_history" and self._history is not None:
            self._await(request.await_history, self._history, exchange)
        elif op == "await_places" and self._places is not None:
            self._place(request.await_places, self._places, exchange)
        else:
            raise UnsupportedParameter(f"this holder does not answer {op}", param="op")

    def _plan(self, op: str, request: pb.DataRequest, exchange: Exchange) -> None:
        session = exchange.session
        if not isinstance(session, PlanSession):
            raise UnsupportedParameter("this holder attends over nobody's KV", param="op")
        if op == "describe_plan":
            described = session.describe(request.describe_plan.plan)
            exchange.reply(pb.DataReply(plan_description=described))
            return
        exchange.one_way = True
        if op == "open_plan":
            session.open(request.open_plan, request.traceparent)
        else:
            session.change(request.change_plan)
        exchange.follow = session.follow

    def _write(self, write: pb.WriteBlocks, exchange: Exchange) -> None:
        layout = self._holder.memory.layout
        _check_layer(write.layer, self._holder.memory.layers)
        part = HeadPart.of(write.heads) if write.HasField("heads") else None
        own = layout if part is None else part.layout(layout)
        ref = SegmentRef(handle=write.handle, epoch=write.epoch, generation=write.generation)
        with self._holder.pinned([ref]) as (segment,):
            blocks = self._holder.blocks(segment, write.first_block, write.blocks, write=True)
            due = len(blocks) * own.object_bytes
            if exchange.payload_bytes != due:
                raise InvalidInput(
                    f"{len(blocks)} blocks came with {exchange.payload_bytes} bytes, not {due}"
                )
            with self._holder.memory.write_buffers(write.layer, blocks, part) as buffers:
                exchange.receive_payload(buffers)
        exchange.reply(pb.DataReply(done=pb.Done()))

    def _read(self, read: pb.ReadBlocks, exchange: Exchange) -> None:
        _check_layer(read.layer, self._holder.memory.layers)
        ref = SegmentRef(handle=read.handle, epoch=read.epoch, generation=read.generation)
        with self._holder.pinned([ref]) as (segment,):
            blocks = self._holder.blocks(segment, read.first_block, read.blocks)
            exchange.reply(pb.DataReply(done=pb.Done()), self._holder.memory.read_buffers(read.layer, blocks))

    def _start(self, start: pb.StartSequence, hook: StartHook, exchange: Exchange) -> None:
        with self._holder.pinned([SegmentRef(handle=start.handle, epoch=start.epoch)]):
            hook(start)
        exchange.reply(pb.DataReply(done=pb.Done()))

    def _await(self, wanted: pb.AwaitHistory, hook: HistoryHook, exchange: Exchange) -> None:
        with self._holder.pinned([SegmentRef(handle=wanted.handle, epoch=wanted.epoch)]):
            blocks = hook(wanted, exchange.deadline)
        exchange.reply(pb.DataReply(placed_history=pb.PlacedHistory(blocks=blocks)))

    def _place(self, wanted: pb.AwaitPlaces, hook: PlacesHook, exchange: Exchange) -> None:
        with self._holder.pinned([SegmentRef(handle=wanted.handle, epoch=wanted.epoch)]):
            places = hook(wanted, exchange.deadline)
        exchange.reply(pb.DataReply(places=pb.Places(places=places)))


def _check_layer(layer: int, layers: range) -> None:
    if layer not in layers:
        raise InvalidInput(f"layer {layer}, and {layers.start} … {layers[-1]} are here", param="layer")
