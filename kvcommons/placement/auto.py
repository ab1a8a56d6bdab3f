"""Which policy a sequence gets, from rates that were measured: a pure decision.

Where the KV is, the query can go (attention there, a round trip a layer), or the KV can come to the query
(once, all of it): figures 11 and 12 of Infinite-LLM. A round trip costs the same however long the context is,
reading KV grows with it; several holders that compute at the same time divide it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcommons.placement.base import FreeBlocks, Next, Placement, SequenceLayout
from kvcommons.placement.fixed import Grow, Offload, Overflow

_KEPT = 0.9  # of an average, by the next observation


@dataclass(slots=True, kw_only=True)
class Rates:
    """Measured, as averages that forget. The defaults are of a host with one memory and two cores."""

    here_bytes_s: float = 10e9  # KV read by attention in this process
    there_bytes_s: float = 10e9  # by one other holder
    wait_s: float = 200e-6  # for a partial of one layer, beside the reading
    network_bytes_s: float = 1e9  # of KV that moves

    def attended_here(self, read_bytes: int, seconds: float) -> None:
        self.here_bytes_s = _toward(self.here_bytes_s, read_bytes, seconds)

    def attended_there(self, read_bytes: int, seconds: float) -> None:
        """One layer's partial of one holder, from asking to its arrival."""
        read_s = read_bytes / self.there_bytes_s
        if read_s > self.wait_s:
            self.there_bytes_s = _toward(self.there_bytes_s, read_bytes, max(seconds - self.wait_s, 1e-6))
        else:
            self.wait_s = _KEPT * self.wait_s + (1 - _KEPT) * max(seconds - read_s, 1e-6)

    def copied(self, moved_bytes: int, seconds: float) -> None:
        self.network_bytes_s = _toward(self.network_bytes_s, moved_bytes, seconds)


def _toward(average: float, amount: int, seconds: float) -> float:
    return _KEPT * average + (1 - _KEPT) * amount / max(seconds, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of attention, from rates and the size of KV."""

    rates: Rates
    layers: int
    block_bytes: int  # in all layers

    def token_s(self, *, here_blocks: int, away_blocks: int, holders: int) -> float:
        """Of one token, beside all else. What is here is read while the others compute."""
        here_s = here_blocks * self.block_bytes / self.rates.here_bytes_s
        if not away_blocks:
            return here_s
        read_s = away_blocks * self.block_bytes / holders / self.rates.there_bytes_s
        return max(here_s, read_s + self.layers * self.rates.wait_s)

    def fetch_s(self, blocks: int) -> float:
        """KV to the query."""
        return blocks * self.block_bytes / self.rates.network_bytes_s

    def pays_to_fetch(self, *, blocks: int, tokens_left: int) -> bool:
        """Whether bringing blocks home once costs less than `tokens_left` queries that go to them."""
        away_s = self.token_s(here_blocks=0, away_blocks=blocks, holders=1)
        here_s = self.token_s(here_blocks=blocks, away_blocks=0, holders=1)
        return self.fetch_s(blocks) < tokens_left * (away_s - here_s)


class Auto:
    """Here where it fits and is quickest; else whichever of the others makes a token soonest. Between equals
    the one that borrows least."""

    name = "auto"
    borrows = True
    offloads = False

    def __init__(self, costs: Costs, *, holder_blocks: int, holders_max: int) -> None:
        self._costs = costs
        self._holder_blocks = holder_blocks
        self._holders_max = holders_max

    def of(self, *, blocks: int, found: int, free: FreeBlocks) -> Placement:
        """The policy for a sequence of `blocks` more than the `found` ones."""
        total = blocks + found
        overflow = Overflow()
        if blocks <= free.beside_others():
            here_s = self._costs.token_s(here_blocks=total, away_blocks=0, holders=1)
        else:
            here_s = self._costs.token_s(
                here_blocks=free.beside_others() + found,
                away_blocks=blocks - free.beside_others(),
                holders=1,
            )
        best: Placement = overflow
        best_s = here_s
        # All on one holder, while this instance has nothing to read.
        offload_s = self._costs.token_s(here_blocks=found, away_blocks=blocks, holders=1)
        if offload_s < best_s:
            best, best_s = Offload(), offload_s
        holders = min(-(-blocks // self._holder_blocks), self._holders_max)
        if holders > 1:
            share = -(-total // (holders + 1))
            grow_s = self._costs.token_s(here_blocks=share, away_blocks=total - share, holders=holders)
            if grow_s < best_s:
                best = Grow(holder_blocks=self._holder_blocks)
        return best

    def otherwise(self) -> Placement:
        return Overflow()

    def arrive(self, *, blocks: int, found: int, free: FreeBlocks) -> SequenceLayout:
        return self.of(blocks=blocks, found=found, free=free).arrive(blocks=blocks, found=found, free=free)

    def next_block(self, *, blocks: int, tail_blocks: int, tail_away: bool) -> Next:
        return Next.HERE_FIRST

    def comes_home(self) -> bool:
        return True
