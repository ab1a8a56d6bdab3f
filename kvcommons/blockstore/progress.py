"""Which layer of which block is due next at a store: what was dropped, refused or lost is not sent on.
Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Blocks begun and never finished (their sequence ended in between) are forgotten, oldest first.
_BEGUN_MAX = 65536


class Progress:
    """Of the blocks begun at one store by one writer. A block starts with the writer's first layer at any
    time; any other layer is sent only right after the one before it, for a block with a layer missing never
    becomes readable."""

    def __init__(self, begun_max: int = _BEGUN_MAX) -> None:
        self._begun_max = begun_max
        self._due: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()  # (model, block) to layer

    def runs(self, model: bytes, layer: int, block_ids: Sequence[bytes], first: int = 0) -> list[range]:
        """Indices of blocks for which this layer is worth sending, as runs of consecutive ones."""
        runs: list[range] = []
        for index, block_id in enumerate(block_ids):
            if layer != first and self._due.get((model, block_id)) != layer:
                continue
            if runs and runs[-1].stop == index:
                runs[-1] = range(runs[-1].start, index + 1)
            else:
                runs.append(range(index, index + 1))
        return runs

    def sent(self, model: bytes, layer: int, stop: int, block_ids: Sequence[bytes]) -> None:
        """The store took this layer of these blocks; the writer's last one is before `stop`."""
        for block_id in block_ids:
            self._due.pop((model, block_id), None)
            if layer + 1 < stop:
                self._due[model, block_id] = layer + 1
        while len(self._due) > self._begun_max:
            self._due.popitem(last=False)

    def unwanted(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        """The store has these already, or will not have them: no more layers until they begin anew."""
        for block_id in block_ids:
            self._due.pop((model, block_id), None)

    def lost(self) -> None:
        """The store went away, and may have forgotten what it had in parts."""
        self._due.clear()
