"""A layer's partial asked for once, as chunks of prompts need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.backend.interface import Backend, Partial
from kvcommons.backend.memory import TORCH_DTYPES
from kvcommons.holder.exchange import LayerExchange, Recipient, Share, ShareTiming
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline


class PendingPartial:
    """A creditor computes; `finish` or `cancel` it."""

    def __init__(self, exchange: LayerExchange) -> None:
        self._exchange = exchange

    def finish(self) -> tuple[Partial, ShareTiming]:
        """The partial of all rows, in order, in host memory, and what it took. Raises what the creditor
        raised (StaleEpoch where a row's segment is gone), Unavailable, DeadlineExceeded."""
        exchange = self._exchange
        try:
            exchange.receive()
            lost = exchange.lost()
            for error in (
                *exchange.failures.values(),
                *(one for rows in lost.values() for one in rows.values()),
            ):
                raise error
            return exchange.whole, exchange.take_timings()[0].shares[0]
        finally:
            exchange.end()

    def cancel(self) -> None:
        self._exchange.end()


def begin_attend(
    layout: Layout,
    backend: Backend,
    recipients: Sequence[Recipient],
    layer: int,
    q: Tensor,
    kv: Tensor | None,
    deadline: Deadline,
) -> PendingPartial:
    """Sends queries to a creditor's recipients, so that local attention can be computed meanwhile.

    q [sum of queries, query_heads, head_dim], rotated; kv, for rows with `append`, in order: K and V
    [appended, 2, kv_heads, head_dim] in the KV dtype. Both on the device.
    """
    answer = Partial(out=torch.empty(q.shape, dtype=torch.float32), lse=torch.empty(q.shape[:2]))
    if kv is None:
        nothing = torch.empty((0, 2, layout.kv_heads, layout.head_dim), dtype=TORCH_DTYPES[layout.kv_dtype])
        kv = backend.device.upload(nothing)
    share = Share(rows=range(len(q)), shifted=[], appended=range(len(kv)), answer=answer)
    native = q.dtype == TORCH_DTYPES[layout.kv_dtype]
    exchange = LayerExchange(layout, [(share, recipients)], [], answer, backend=backend, native=native)
    try:
        exchange.begin(0, deadline.left(), None)
        exchange.ask(layer, q, kv[:, 0], kv[:, 1], None)
    except BaseException:
        exchange.end()
        raise
    return PendingPartial(exchange)
