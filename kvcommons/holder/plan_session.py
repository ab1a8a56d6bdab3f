"""The creditor's side of a connection: the plans that its debtor opened there, and their layers
(DistAttention, Infinite-LLM, section 4.2: the debtor sends queries, the creditor answers a partial, the
debtor merges).

A layer comes about every millisecond. What a layer costs beside its keys would be Python's, whose code the
weights drive out of the caches between two layers: so the connection's thread serves layers on the native
path (creditor.cpp) wherever it can, and has in Python what is left."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from kvcommons.attention.native.exchange import NativeAllowance, ServingStage, TransferOutcome
from kvcommons.attention.native.structures import STRUCTURES
from kvcommons.backend.interface import Partial
from kvcommons.backend.memory import TORCH_DTYPES, byte_view
from kvcommons.errors import DeadlineExceeded, InvalidInput, KVCommonsError, Unavailable, UnknownPlan
from kvcommons.holder.allowance import Allowance, computing, new_allowance, refusal
from kvcommons.holder.holder import Holder
from kvcommons.holder.layer_head import LayerHead, LayerReply
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.served_plan import ServedPlan, check_rows
from kvcommons.pb import data_pb2 as pb
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.base import Bare, Observation, Observer
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange

# However long a peer is ready to wait: a segment stays pinned for no longer than this by an operation.
OPERATION_S = 60.0
# Of a connection. Those that were used last are kept: a debtor opens the others again.
PLANS_MAX, _ENTRIES_MAX = 16, 8 << 20
# After _REPORT_S without a layer those that were served are reported to the observer, and after _QUIET_S the
# thread waits as between any two requests. A debtor computes for some milliseconds between two layers.
_REPORT_S, _QUIET_S = 0.005, 0.1
# Layers that are reported to the observer at once, at most: that keeps the next one waiting for 0.4 ms.
_TOOK_MAX = 64


class Attention:
    """What all connections of a holder share. Thread-safe."""

    def __init__(
        self, holder: Holder, allowance: Allowance | None = None, tracer: Tracer | None = None
    ) -> None:
        """`allowance` bounds what is computed for others; None: nothing does. `tracer` makes a span of each
        layer of a plan that belongs to a trace."""
        self.holder = holder
        self.allowance = allowance or new_allowance(holder.memory.backend.attention.native_exchange)
        self.tracer = tracer or Tracer.off()
        self.served = 0  # layers on the native path, in all
        self._counting = threading.Lock()

    def session(self) -> PlanSession:
        """Of a connection."""
        return PlanSession(self)

    def count(self, served: int) -> None:
        with self._counting:
            self.served += served


class PlanSession:
    """A transport ConnectionSession."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._holder = attention.holder
        # A plan that was refused is there as its error, which is the answer to its layers.
        self._plans: OrderedDict[int, ServedPlan | KVCommonsError] = OrderedDict()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        # Layers on the native path spend what is granted: without an allowance of its own there is none.
        allowance, spends = attention.allowance, isinstance(attention.allowance, NativeAllowance)
        self._library = attention.holder.memory.backend.attention.native_exchange if spends else None
        self._serving = STRUCTURES["kvc_serving"](
            took_max=_TOOK_MAX, operation_ns=int(OPERATION_S * 1e9), brief=True,
            allowance=allowance.address if isinstance(allowance, NativeAllowance) else None,
        )  # fmt: skip
        self._took_ns, self._took_plan = (ctypes.c_int64 * _TOOK_MAX)(), (ctypes.c_uint32 * _TOOK_MAX)()
        self._serving.took_ns = ctypes.addressof(self._took_ns)
        self._serving.took_plan = ctypes.addressof(self._took_plan)

    def open(self, request: pb.OpenPlan, trace: str) -> None:
        """Never raises: what is wrong with the plan is the answer to its layers."""
        self._drop(request.plan)
        try:
            check_rows(len(request.rows))
            rows = [PlanRow.read(row) for row in request.rows]
            plan = ServedPlan(self._holder, request.plan, rows, step=request.step, trace=trace)
        except InvalidInput as error:
            self._plans[request.plan] = error
        else:
            self._plans[request.plan] = plan
        self._evict()

    def change(self, request: pb.ChangePlan) -> None:
        """As `open`. A change of a plan that is not known shows with its next layer."""
        plan = self._plans.get(request.plan)
        if not isinstance(plan, ServedPlan):
            return
        try:
            check_rows(max(len(request.placed), len(request.removed)))
            placed = [(one.index, PlanRow.read(one.row)) for one in request.placed]
            plan.change(request.revision, request.removed, placed, request.step)
        except InvalidInput as error:
            self._drop(request.plan)
            self._plans[request.plan] = error

    def describe(self, number: int) -> pb.PlanDescription:
        lost = self._find(number).lost
        return pb.PlanDescription(
            lost=[pb.LostRow(index=index, error=error.to_detail()) for index, error in lost]
        )

    def close(self) -> None:
        for number in list(self._plans):
            self._drop(number)

    def answer_layer(self, head: bytes, exchange: Exchange) -> None:
        """Raises UnknownPlan, where the debtor has to open the plan again; UnsupportedParameter for a head of
        another version, InvalidInput for a layer that is not of its plan."""
        layer = LayerHead.unpack(head)
        exchange.deadline = Deadline.after(min(layer.deadline_ms / 1000, OPERATION_S))
        if not layer.deadline_ms:
            raise InvalidInput("the layer has no deadline: set deadline_ms", param="deadline_ms")
        plan = self._find(layer.plan)
        self._plans.move_to_end(layer.plan)
        if plan.revision != layer.revision:
            raise UnknownPlan(
                f"plan {layer.plan} has revision {plan.revision} here, not {layer.revision}: open it again"
            )
        attention = self._attention
        span = attention.tracer.span("holder.attend_layer", parent=plan.trace, kind="server")
        with span if plan.trace else contextlib.nullcontext():
            self._answer(layer, plan, exchange)

    def follow(self, bare: Bare, tell: Observer) -> KVCommonsError | None:
        """A transport Follower: layers on the native path, until one comes that is not for it."""
        serving, quiet_s, looked_up = self._serving, 0.0, False
        serving.descriptor, serving.ask_ns = bare.descriptor, int(bare.ask_s * 1e9)
        serving.quiet_ns = int(_REPORT_S * 1e9)
        while quiet_s < _QUIET_S:
            outcome = self._serve(tell)
            if outcome is None:
                return None
            served = serving.took > 0
            quiet_s = 0.0 if served else quiet_s + _REPORT_S
            if serving.stage != ServingStage.NONE:
                return self._failure(outcome, tell)
            if outcome is TransferOutcome.CHANGED:
                if serving.pending and looked_up and not served:
                    return None  # it has not helped: Python says why
                looked_up = bool(serving.pending)
                plan = self._plans.get(serving.plan)
                if looked_up and isinstance(plan, ServedPlan):
                    plan.look_up(serving.step)
            elif outcome not in (TransferOutcome.DONE, TransferOutcome.LATE):
                return None
        return None

    def _serve(self, tell: Observer) -> TransferOutcome | None:
        """None: there is no plan for the native path."""
        plans = {one.number: one for one in self._plans.values() if isinstance(one, ServedPlan)}
        addresses = [address for plan in plans.values() if (address := plan.native()) is not None]
        if self._library is None or not addresses:
            return None
        serving, buffer = self._serving, self._memory_for(plans.values())
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        serving.plans, serving.count = ctypes.addressof(pointers), len(addresses)
        serving.buffer, serving.buffer_bytes = buffer.data_ptr(), buffer.numel()
        outcome = TransferOutcome(self._library.serve(ctypes.addressof(serving)))
        for plan in plans.values():
            plan.settle()
        self._attention.count(serving.took)
        for number, took_ns in zip(
            self._took_plan[: serving.took], self._took_ns[: serving.took], strict=True
        ):
            plan = plans[number]
            tell(_observation(plan.answer_bytes, plan.request_bytes, took_ns / 1e9))
        return outcome

    def _failure(self, outcome: TransferOutcome, tell: Observer) -> KVCommonsError:
        """The error that a layer is to be answered with; raises it where the connection is of no more use."""
        serving = self._serving
        error: DeadlineExceeded | Unavailable
        if serving.stage == ServingStage.QUEUING:
            error = DeadlineExceeded(refusal(self._attention.allowance))
        elif outcome is TransferOutcome.LATE:
            error = DeadlineExceeded("the debtor was slow or paused until the deadline")
        else:
            error = Unavailable("the debtor went away")
        tell(_observation(0, serving.received, serving.failed_ns / 1e9, error.code))
        if serving.stage != ServingStage.QUEUING:
            raise error
        return error

    def _answer(self, head: LayerHead, plan: ServedPlan, exchange: Exchange) -> None:
        layout = self._holder.memory.layout
        if head.layer >= layout.layers:
            raise InvalidInput(f"layer {head.layer} of a model with {layout.layers} layers", param="layer")
        due = plan.queries, plan.appended, plan.request_bytes
        if (head.queries, head.appended, exchange.payload_bytes) != due:
            raise InvalidInput(
                f"a layer of plan {plan.number} came with {head.queries} queries, {head.appended} of them "
                f"with K and "
                f"V, in {exchange.payload_bytes} bytes where {due[0]}, {due[1]} and {due[2]} belong"
            )
        q = torch.empty((plan.queries, layout.query_heads, layout.head_dim))
        kv = torch.empty(
            (plan.appended, 2, layout.kv_heads, layout.head_dim), dtype=TORCH_DTYPES[layout.kv_dtype]
        )
        partial = Partial(out=torch.empty_like(q), lse=torch.empty(q.shape[:2]))
        exchange.receive_payload([byte_view(q), byte_view(kv)])
        plan.begin(head.step)
        try:
            asked_s = time.monotonic()
            with computing(self._attention.allowance, exchange.deadline), torch.inference_mode():
                began_s = time.monotonic()
                plan.attend(head.layer, head.step, q, kv, partial)
                ended_s = time.monotonic()
        finally:
            plan.end()
        reply = LayerReply(
            layer=head.layer, plan=plan.number, step=head.step, queued_us=int((began_s - asked_s) * 1e6),
            computed_us=int((ended_s - began_s) * 1e6), lost=len(plan.lost),
        )  # fmt: skip
        exchange.reply_layer(reply.pack(), [byte_view(partial.out), byte_view(partial.lse)])
        exchange.follow = self.follow

    def _find(self, number: int) -> ServedPlan:
        plan = self._plans.get(number)
        if plan is None:
            raise UnknownPlan(f"plan {number} is not known on this connection: open it again")
        if isinstance(plan, KVCommonsError):
            raise plan
        return plan

    def _drop(self, number: int) -> None:
        plan = self._plans.pop(number, None)
        if isinstance(plan, ServedPlan):
            plan.close()

    def _evict(self) -> None:
        def entries() -> int:
            return sum(one.table_entries for one in self._plans.values() if isinstance(one, ServedPlan))

        while len(self._plans) > 1 and (len(self._plans) > PLANS_MAX or entries() > _ENTRIES_MAX):
            self._drop(next(iter(self._plans)))

    def _memory_for(self, plans: Iterable[ServedPlan]) -> Tensor:
        """For a layer of any of them on the native path: a request and its answer, aligned to 64 each."""
        wanted = max(plan.request_bytes + plan.answer_bytes for plan in plans) + 2 * 64
        if len(self._buffer) < wanted:
            self._buffer = torch.empty(wanted + wanted // 4, dtype=torch.uint8)
        return self._buffer[-self._buffer.data_ptr() % 64 :]


def _observation(sent_bytes: int, received_bytes: int, seconds: float, error: str = "") -> Observation:
    return Observation(
        op="attend_layer",
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        seconds=seconds,
        error=error,
    )
