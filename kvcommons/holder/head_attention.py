"""Attention divided by heads: each part of a head group is asked for its own, and the partials are put side
by side. Nothing is merged: no head has keys at two parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcommons.attention.partial import Partial
from kvcommons.holder.attend_call import PendingPartial
from kvcommons.holder.layer_head import LayerReply
from kvcommons.holder.plan import PlanRow
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline


class Ask(Protocol):
    """RemoteHolder.begin_attend, of one part."""

    def __call__(
        self,
        layer: int,
        rows: Sequence[PlanRow],
        q: Tensor,
        appended: Sequence[Tensor],
        deadline: Deadline,
    ) -> PendingPartial: ...


@dataclass(frozen=True, slots=True)
class PendingHeads:
    """All parts compute; `finish_told` or `cancel` it."""

    calls: Sequence[PendingPartial]  # in the order of the parts

    def finish(self) -> Partial:
        """As `finish_told`, the partial alone."""
        return self.finish_told()[0]

    def finish_told(self) -> tuple[Partial, LayerReply]:
        """The partial of all heads, and what the slowest part says that it took. Raises what a part
        raised."""
        partials, replies = list[Partial](), list[LayerReply]()
        try:
            for call in self.calls:
                partial, reply = call.finish_told()
                partials.append(partial)
                replies.append(reply)
        except BaseException:
            self.cancel()
            raise
        whole = Partial(
            out=torch.cat([one.out for one in partials], dim=1),
            lse=torch.cat([one.lse for one in partials], dim=1),
        )
        return whole, max(replies, key=lambda one: one.computed_us)

    def cancel(self) -> None:
        for call in self.calls:
            call.cancel()


def begin_heads(
    layout: Layout,
    shares: Sequence[HeadPart],
    asks: Sequence[Ask],
    layer: int,
    rows: Sequence[Sequence[PlanRow]],
    q: Tensor,
    appended: Sequence[Tensor],
    deadline: Deadline,
) -> PendingHeads:
    """Sends each part its query heads, and its heads of K and V. `layout` is the whole model's; `shares`,
    `asks` and `rows` are the parts', in order; q and appended have all heads, as for one holder."""
    calls: list[PendingPartial] = []
    try:
        for share, ask, own in zip(shares, asks, rows, strict=True):
            queries, heads = share.query_heads(layout), share.kv_heads(layout)
            kv = [tensor[..., heads, :] for tensor in appended]
            calls.append(ask(layer, own, q[:, queries], kv, deadline))
    except BaseException:
        PendingHeads(calls).cancel()
        raise
    return PendingHeads(calls)
