"""One layer's partial asked for at one holder, in Python: what needs no plan from layer to layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcommons.attention.memory import byte_view
from kvcommons.attention.partial import Partial
from kvcommons.errors import KVCommonsError, UnknownPlan
from kvcommons.holder.layer_head import LayerReply
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PlanConnection, PlanPool
from kvcommons.transport.deadline import Deadline


@dataclass(slots=True)
class PendingPartial:
    """A holder computes; `finish` or `cancel` it."""

    plans: PlanPool
    plan: PlanConnection | None
    layer: int
    q: Tensor
    kv: Tensor
    deadline: Deadline
    began_s: float = field(default_factory=time.monotonic)

    def finish(self) -> Partial:
        """The partial of all rows, in order, on the CPU. Raises what the holder raised (StaleEpoch where a
        row's segment is gone), Unavailable, DeadlineExceeded."""
        return self.finish_told()[0]

    def finish_told(self) -> tuple[Partial, LayerReply]:
        """And what the holder says that it took."""
        plan = self.plan
        assert plan is not None, "it was finished, or cancelled"
        out = torch.empty(self.q.shape, dtype=torch.float32)
        lse = torch.empty(self.q.shape[:2], dtype=torch.float32)
        into = [byte_view(out), byte_view(lse)]
        try:
            try:
                reply = plan.receive(self.layer, into, self.deadline)
            except UnknownPlan:
                plan.reopen(self.deadline, connection=False)
                self.send()
                reply = plan.receive(self.layer, into, self.deadline)
            if reply.lost:
                for error in plan.lost(self.deadline).values():
                    raise error
        except KVCommonsError as error:
            plan.observe(self.began_s, time.monotonic(), self.q.nbytes + self.kv.nbytes, 0, error.code)
            self._give()
            raise
        except BaseException:
            self.cancel()
            raise
        plan.observe(self.began_s, time.monotonic(), self.q.nbytes + self.kv.nbytes, out.nbytes + lse.nbytes)
        self._give()
        return Partial(out=out, lse=lse), reply

    def send(self) -> None:
        assert self.plan is not None
        payload = [byte_view(self.q), byte_view(self.kv)] if self.kv.numel() else [byte_view(self.q)]
        self.plan.send(self.layer, len(self.q), len(self.kv), payload, self.deadline)

    def cancel(self) -> None:
        if self.plan is not None:
            self.plan.drop()
            self._give()

    def _give(self) -> None:
        plan, self.plan = self.plan, None
        if plan is not None:
            self.plans.give(plan)


def begin_attend(
    plans: PlanPool,
    layer: int,
    rows: Sequence[PlanRow],
    q: Tensor,
    appended: Sequence[Tensor],
    deadline: Deadline,
) -> PendingPartial:
    """Asks a holder's data plane for a partial: see RemoteHolder.begin_attend."""
    kv = torch.cat(list(appended)) if appended else torch.empty(0)
    pending = PendingPartial(
        plans, plans.take(rows), layer, q.detach().float().cpu().contiguous(), kv.cpu().contiguous(), deadline
    )
    try:
        assert pending.plan is not None
        pending.plan.user = pending
        pending.plan.prepare(rows, deadline)
        pending.send()
    except BaseException:
        pending.cancel()
        raise
    return pending
