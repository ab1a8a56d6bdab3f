"""What is learned from a layer's exchanges with holders: what messages cost, and where the iteration's time
went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.division import ExchangeSize, ShareDivision
from kvcommons.holder.exchange import LayerTiming, ShareTiming
from kvcommons.holder.head_group import Creditor

_WAITED_S = 50e-6


@dataclass(slots=True)
class _HolderTime:
    """What one holder took in a layer, all of its messages together."""

    waited_s: float = 0.0
    answered: bool = True
    computed_s: float = 0.0
    queued_s: float = 0.0


class RemoteTiming:
    """Passes what was measured to `division` and the holders."""

    def __init__(self, division: ShareDivision) -> None:
        self._division = division

    def layer(
        self,
        timing: IterationTiming,
        layer: LayerTiming,
        shares: Sequence[tuple[Creditor, ExchangeSize]],
        *,
        largest: ExchangeSize,
        messages: int,
        lost: bool,
        busy: bool,
    ) -> None:
        """A layer. `shares`: of each, its holder and what it was asked for; `largest` of the holders'
        exchanges, which was in so many `messages`. `lost`: something is. `busy`: this instance computed
        attention of its own meanwhile."""
        timing.network_s += layer.asked_s - layer.asks_s
        timing.native_layers += layer.native
        blocked_s = layer.came_s - layer.waits_s
        heard: dict[Creditor, _HolderTime] = {}
        for answer in layer.shares:
            holder, exchange = shares[answer.share]
            self._hear(heard.setdefault(holder, _HolderTime()), answer)
            if messages == 1 and answer.answered and answer.came_s - answer.waits_s > _WAITED_S:
                # One of several took some of the others' time, too.
                computed_s = answer.computed_us / 1e6
                took_s = answer.came_s - answer.began_s - computed_s - answer.queued_us / 1e6
                self._division.observe(exchange, network_s=max(took_s, 0.0), computed_s=computed_s)
        if layer.shares and blocked_s > _WAITED_S and not lost and not busy:
            self._division.took(largest, messages, layer.came_s - layer.shares[0].began_s)
        for holder, one in heard.items():
            holder.waited(one.waited_s, one.answered)
        slowest = max(heard.values(), key=lambda one: one.computed_s, default=_HolderTime())
        timing.waited(blocked_s, computed_s=slowest.computed_s, queued_s=slowest.queued_s)

    def _hear(self, heard: _HolderTime, answer: ShareTiming) -> None:
        heard.waited_s += answer.came_s - answer.waits_s
        if not answer.answered:
            heard.answered = False
            return
        if not heard.computed_s:  # those behind it have queued for it
            heard.queued_s = answer.queued_us / 1e6
        heard.computed_s += answer.computed_us / 1e6
