"""What is learned from a layer's exchanges with holders: how quick each is, what messages cost, and where the
iteration's time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.mini_batches import ExchangeSize, MiniBatches
from kvcommons.holder.creditor import Creditor
from kvcommons.holder.exchange import LayerTiming, ShareTiming
from kvcommons.placement.auto import Rates

_WAITED_S = 50e-6


@dataclass(slots=True)
class _HolderTime:
    """What one holder took in a layer, all of its mini-batches together. How long an answer took is known
    only where it came while it was waited for."""

    waited_s: float = 0.0
    answered: bool = True
    computed_s: float = 0.0
    queued_s: float = 0.0
    read_bytes: int = 0
    began_s: float = 0.0  # when the first one was asked for
    last_s: float | None = None  # when the last answer came; None: it came before it was waited for


class RemoteTiming:
    """Passes what was measured to `rates`, `mini_batches` and the holders."""

    def __init__(self, rates: Rates, mini_batches: MiniBatches) -> None:
        self._rates = rates
        self._mini_batches = mini_batches

    def layer(
        self,
        timing: IterationTiming,
        layer: LayerTiming,
        shares: Sequence[tuple[Creditor, ExchangeSize]],
        *,
        largest: ExchangeSize,
        mini_batches: int,
        lost: bool,
        busy: bool,
    ) -> None:
        """A layer. `shares`: of each, its holder and what it was asked for; `largest` of the holders'
        exchanges, which was in so many `mini_batches`. `lost`: something is. `busy`: this instance computed
        attention of its own meanwhile."""
        timing.network_s += layer.asked_s - layer.asks_s
        timing.native_layers += layer.native
        blocked_s = layer.came_s - layer.waits_s
        heard: dict[Creditor, _HolderTime] = {}
        for answer in layer.shares:
            holder, exchange = shares[answer.share]
            self._hear(heard.setdefault(holder, _HolderTime()), answer, exchange)
            if mini_batches == 1 and answer.answered and answer.came_s - answer.waits_s > _WAITED_S:
                # One of several took some of the others' time, too.
                computed_s = answer.computed_us / 1e6
                took_s = answer.came_s - answer.began_s - computed_s - answer.queued_us / 1e6
                self._mini_batches.observe(exchange, network_s=max(took_s, 0.0), computed_s=computed_s)
        if layer.shares and blocked_s > _WAITED_S and not lost and not busy:
            self._mini_batches.took(largest, mini_batches, layer.came_s - layer.shares[0].began_s)
        for holder, one in heard.items():
            holder.waited(one.waited_s, one.answered)
            if one.last_s is not None and not lost:
                self._rates.attended_there(one.read_bytes, one.last_s - one.began_s)
        slowest = max(heard.values(), key=lambda one: one.computed_s, default=_HolderTime())
        timing.waited(blocked_s, computed_s=slowest.computed_s, queued_s=slowest.queued_s)

    def _hear(self, heard: _HolderTime, answer: ShareTiming, exchange: ExchangeSize) -> None:
        waited_s = answer.came_s - answer.waits_s
        heard.waited_s += waited_s
        if not answer.answered:
            heard.answered = False
            return
        if not heard.computed_s:  # those behind it have queued for it
            heard.queued_s = answer.queued_us / 1e6
        heard.computed_s += answer.computed_us / 1e6
        heard.began_s = heard.began_s or answer.began_s
        heard.read_bytes += exchange.read_bytes
        heard.last_s = answer.came_s if waited_s > _WAITED_S else None
