"""What is learned from a layer's exchanges with holders: how quick each is, what messages cost, and where the
iteration's time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.mini_batches import ExchangeSize, MiniBatches
from kvcommons.holder.creditor import Creditor
from kvcommons.placement.auto import Rates

_WAITED_S = 50e-6


class ShareAnswer(NamedTuple):
    """A holder's answer to a share. How long it took is known only where it came while it was waited for."""

    holder: Creditor
    exchange: ExchangeSize
    began_s: float  # when it was asked for
    waited_s: float
    came_s: float
    queued_s: float = 0.0
    computed_s: float = 0.0
    answered: bool = True  # and not late
    alone: bool = False  # nothing else was asked of this holder in this layer


@dataclass(slots=True)
class _HolderTime:
    """What one holder took in a layer, all of its mini-batches together."""

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
        answers: Sequence[ShareAnswer],
        blocked_s: float,
        came_s: float,
        *,
        whole: tuple[ExchangeSize, int] | None,
        busy: bool,
    ) -> None:
        """A layer whose answers were waited for so long, up to `came_s`. `whole`: the largest of the
        holders' exchanges, and in how many mini-batches it was; None where something is lost. `busy`: this
        instance computed attention of its own meanwhile."""
        heard: dict[Creditor, _HolderTime] = {}
        for answer in answers:
            self._hear(heard.setdefault(answer.holder, _HolderTime()), answer)
            waited = answer.answered and answer.waited_s > _WAITED_S
            if waited and answer.alone:  # one of several took some of the others' time, too
                took_s = answer.came_s - answer.began_s - answer.computed_s - answer.queued_s
                self._mini_batches.observe(
                    answer.exchange, network_s=max(took_s, 0.0), computed_s=answer.computed_s
                )
        if whole is not None and answers and blocked_s > _WAITED_S and not busy:
            self._mini_batches.took(*whole, came_s - answers[0].began_s)
        for holder, one in heard.items():
            holder.waited(one.waited_s, one.answered)
            if one.last_s is not None and whole is not None:
                self._rates.attended_there(one.read_bytes, one.last_s - one.began_s)
        slowest = max(heard.values(), key=_computed_s, default=_HolderTime())
        timing.waited(blocked_s, computed_s=slowest.computed_s, queued_s=slowest.queued_s)

    def _hear(self, heard: _HolderTime, answer: ShareAnswer) -> None:
        heard.waited_s += answer.waited_s
        if not answer.answered:
            heard.answered = False
            return
        if not heard.computed_s:  # those behind it have queued for it
            heard.queued_s = answer.queued_s
        heard.computed_s += answer.computed_s
        heard.began_s = heard.began_s or answer.began_s
        heard.read_bytes += answer.exchange.read_bytes
        heard.last_s = answer.came_s if answer.waited_s > _WAITED_S else None


def _computed_s(heard: _HolderTime) -> float:
    return heard.computed_s
