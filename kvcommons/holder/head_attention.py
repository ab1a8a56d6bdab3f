"""Attention divided by heads: each part of a head group is asked for its own, and the partials are put side
by side. Nothing is merged: no head has keys at two parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcommons.attention.partial import Partial
from kvcommons.holder.attend_call import AttendPart, PendingPartial
from kvcommons.pb import data_pb2
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline


class Ask(Protocol):
    """RemoteHolder.begin_attend, of one part."""

    def __call__(
        self,
        layer: int,
        parts: Sequence[AttendPart] | data_pb2.AttendLayer,
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

    def finish_told(self) -> tuple[Partial, data_pb2.AttendLayerReply]:
        """The partial of all heads, and what the slowest part says that it took. Raises what a part
        raised."""
        partials, slowest = [], data_pb2.AttendLayerReply()
        try:
            for call in self.calls:
                partial, told = call.finish_told()
                partials.append(partial)
                slowest = max(slowest, told, key=lambda one: one.computed_us)
        except BaseException:
            self.cancel()
            raise
        whole = Partial(
            out=torch.cat([one.out for one in partials], dim=1),
            lse=torch.cat([one.lse for one in partials], dim=1),
        )
        return whole, slowest

    def cancel(self) -> None:
        for call in self.calls:
            call.cancel()


def begin_heads(
    layout: Layout,
    shares: Sequence[HeadPart],
    asks: Sequence[Ask],
    layer: int,
    wordings: Sequence[Sequence[AttendPart] | data_pb2.AttendLayer],
    q: Tensor,
    appended: Sequence[Tensor],
    deadline: Deadline,
) -> PendingHeads:
    """Sends each part its query heads, and its heads of K and V. `layout` is the whole model's; `shares`,
    `asks` and `wordings` are the parts', in order; q and appended have all heads, as for one holder."""
    calls: list[PendingPartial] = []
    try:
        for share, ask, wording in zip(shares, asks, wordings, strict=True):
            queries, heads = share.query_heads(layout), share.kv_heads(layout)
            kv = [tensor[..., heads, :, :] for tensor in appended]
            calls.append(ask(layer, wording, q[:, queries], kv, deadline))
    except BaseException:
        PendingHeads(calls).cancel()
        raise
    return PendingHeads(calls)
