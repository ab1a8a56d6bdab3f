"""Which policy a sequence gets, by what iterations were measured to cost: a pure decision.

Where the KV is, the query can go (attention there, a round trip a layer), or the KV can come to the query
(once, all of it): figures 11 and 12 of Infinite-LLM. A round trip costs the same however long the context is,
reading KV grows with it; several holders that compute at the same time divide it.
"""

from __future__ import annotations

from kvcommons.engine.predictor import Predictor
from kvcommons.placement.base import FreeBlocks, Next, Placement, SequenceLayout
from kvcommons.placement.fixed import Grow, Offload, Overflow

# Of a host with one memory and two cores, until it is measured.
_READ_BYTE_S = 1e-10  # of KV that attention reads
_EXCHANGE_LAYER_S = 200e-6  # beside the reading, to have a holder attend
_MOVED_BYTE_S = 1e-9
_KEPT = 0.9  # of an average, by the next observation


class Costs:
    """Seconds of attention, from what the predictor has learnt of iterations and from the size of KV; and of
    KV that moves, which is no iteration's business."""

    def __init__(self, predictor: Predictor, *, layers: int, block_bytes: int) -> None:
        """`block_bytes`: in all layers."""
        self._predictor = predictor
        self._layers = layers
        self._block_bytes = block_bytes
        self._moved_byte_s = _MOVED_BYTE_S

    def moved(self, moved_bytes: int, seconds: float) -> None:
        """KV from holder to holder has taken so long."""
        self._moved_byte_s = _KEPT * self._moved_byte_s + (1 - _KEPT) * seconds / moved_bytes

    def token_s(self, *, here_blocks: int, away_blocks: int, holders: int) -> float:
        """Of one token, beside all else. What is here is read while the others compute."""
        here_s = here_blocks * self._block_bytes * self._known("read_bytes", _READ_BYTE_S)
        if not away_blocks:
            return here_s
        away_s = away_blocks * self._block_bytes / holders * self._known("away_bytes", _READ_BYTE_S)
        return max(here_s, away_s + self._known("exchanges", self._layers * _EXCHANGE_LAYER_S))

    def fetch_s(self, blocks: int) -> float:
        """KV to the query."""
        return blocks * self._block_bytes * self._moved_byte_s

    def _known(self, amount: str, otherwise: float) -> float:
        measured = getattr(self._predictor.most, amount) > 0
        return self._predictor.costs.of_one(amount) if measured else otherwise

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
