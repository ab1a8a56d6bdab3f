"""In how many mini-batches a holder is sent its share of a batch (Lamina, section 5.2.1, figure 10). A
decision only, from what was measured.

Of one message nothing is computed while it is on the way, nor while its answer is. Of several, the holder
attends over one while the next is coming and the answer before is going. Each costs what a message costs
however small it is, so this pays where bytes take long beside attention: over a network, with a large batch;
on one host hardly ever.
"""

from __future__ import annotations

from kvcommons.engine.regression import Regression
from kvcommons.engine.remote.division import ExchangeSize

_KEPT = 0.98  # of an observation's weight, by the next one
_NUMBERS = (1, 2, 4, 8)  # each of them has a connection of its own
_LEARNT = 0.05  # of what a layer took
_FORGOTTEN = 0.002  # of that, by an iteration in another number
_PAYS = 1.1  # a gain
_DIVIDED, _WHOLE = 200, 4  # iterations in a row, while several messages pay
# Before anything was measured, and as what an empty message takes for as long as all are of about one size: a
# message on one host, as if it had been seen so often.
_EMPTY_S, _EMPTY_WEIGHT = 100e-6, 4.0
_READ_BYTE_S = 1e-10  # 10 GB of KV a second


class MiniBatches:
    """A `ShareDivision`. Threads may share it; what both tell at the same time may count once.

    Of whole messages it knows what a byte adds, by a line through what was observed, and computes from that
    what several would take. How far that is from what they took is what it learns of each number: messages
    that follow each other disturb each other, too.
    """

    def __init__(self, number: int = 0) -> None:
        """Always so many; 0: by what was measured."""
        self._number = number
        self._network = Regression(kept=_KEPT, empty=(_EMPTY_WEIGHT, _EMPTY_S))
        self._read_byte_s = _READ_BYTE_S
        self._over = dict.fromkeys(_NUMBERS, 1.0)  # what it took over what was computed
        self._last = 1
        self._trial = 0  # of those iterations

    def observe(self, exchange: ExchangeSize, *, network_s: float, computed_s: float) -> None:
        """One message. The holder computed so long; there and back took `network_s`, what it had queued left
        out."""
        self._network.observe(exchange.asked_bytes + exchange.answered_bytes, network_s)
        if exchange.read_bytes:
            self._read_byte_s += (computed_s / exchange.read_bytes - self._read_byte_s) * (1 - _KEPT)

    def took(self, exchange: ExchangeSize, number: int, seconds: float) -> None:
        """An exchange in so many, from asking to the last answer."""
        if number in self._over:
            over = seconds / max(self._computed_s(exchange, number), 1e-9)
            self._over[number] += (over - self._over[number]) * _LEARNT

    @property
    def byte_s(self) -> float:
        """What a byte of a message adds."""
        return max(self._network.slope_s() or 0.0, 0.0)

    @property
    def empty_s(self) -> float:
        """What a message takes, there and back, however small it is."""
        return max(self._network.at(0.0, self.byte_s), 0.0)

    def seconds(self, exchange: ExchangeSize, number: int) -> float:
        """From asking to the last answer."""
        return self._over[number] * self._computed_s(exchange, number)

    def decide(self, exchange: ExchangeSize, *, busy: bool = False) -> int:
        """For an iteration whose largest exchange this is; `busy`: it has attention of its own to compute
        meanwhile, which hides messages already. What was decided last stays unless another number is clearly
        better: a batch that is divided anew takes time too. Only whole messages tell what a byte adds, so
        now and then some iterations are not divided: else a network that has become quicker would never be
        noticed."""
        if self._number or busy:
            return self._number or 1
        able = [number for number in _NUMBERS if number <= max(exchange.rows, 1)]
        for number in _NUMBERS:
            if number != self._last:  # that was bad once is tried again some day
                self._over[number] += (1 - self._over[number]) * _FORGOTTEN
        best = min(able, key=lambda number: self.seconds(exchange, number))
        if self._last not in able or self.seconds(exchange, self._last) > _PAYS * self.seconds(
            exchange, best
        ):
            self._last = best
        self._trial = (self._trial + 1) % (_DIVIDED + _WHOLE) if self._last > 1 else 0
        return self._last if self._trial < _DIVIDED else 1

    def _computed_s(self, exchange: ExchangeSize, number: int) -> float:
        """Three stages (there, attention, back), through which mini-batches go one behind the other."""
        there_s, back_s = exchange.asked_bytes * self.byte_s, exchange.answered_bytes * self.byte_s
        attend_s = exchange.read_bytes * self._read_byte_s
        longest_s = max(there_s, attend_s, back_s)
        return number * self.empty_s + (there_s + attend_s + back_s + (number - 1) * longest_s) / number
