"""Batches of sequences that generate, as they go down the line one behind the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcommons.engine.batch import Batch
from kvcommons.engine.core import Core
from kvcommons.engine.sequence import Sequence as GeneratingSequence

KEPT_MAX = 64  # batches: more than any line has under way


def next_batch(ready: Sequence[int], under_way: Collection[int], stages: int) -> list[int]:
    """Whose tokens enter the line next, of the sequences that are `ready`, oldest first: so many that each
    stage may have a batch, and none whose last token is still `under_way`."""
    size = -(-len(ready) // stages)
    return [key for key in ready if key not in under_way][:size]


class SteppedBatches:
    """A batch of the same sequences, in the same blocks, a token on, is stepped on instead of made anew.
    Belongs to the thread that computes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._kept: dict[tuple[int, ...], tuple[Batch, list[int]]] = {}  # by keys, with their blocks

    def of(self, sequences: Sequence[GeneratingSequence]) -> Batch:
        """Of these sequences, in this order."""
        keys, blocks = tuple(one.key for one in sequences), [one.blocks for one in sequences]
        batch, had = self._kept.pop(keys, (None, []))
        computed = [one.computed for one in sequences]
        if batch is not None and had == blocks and (batch.positions + 1).tolist() == computed:
            batch.step()
        else:
            batch = Batch(list(sequences), self._core.block_tokens, self._core.backend)
        self._kept[keys] = batch, blocks
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        return batch
