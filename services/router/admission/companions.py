"""How many waiting jobs would profit from one block. Pure.

Identities are chained, so equal identities mean equal beginnings: the blocks of all waiting jobs are a radix
tree, and a count by identity is all of it that the queue needs.
"""

from __future__ import annotations

from collections.abc import Sequence


class Companions:
    """Waiting jobs by block."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Blocks that some waiting job has."""
        return len(self._jobs)

    def join(self, block_ids: Sequence[bytes]) -> None:
        """A job with these blocks waits from now on."""
        for block_id in block_ids:
            self._jobs[block_id] = self._jobs.get(block_id, 0) + 1

    def leave(self, block_ids: Sequence[bytes]) -> None:
        """It waits no longer."""
        for block_id in block_ids:
            left = self._jobs[block_id] - 1
            if left:
                self._jobs[block_id] = left
            else:
                del self._jobs[block_id]

    def of(self, block_ids: Sequence[bytes], on_device: int) -> int:
        """How many waiting jobs begin with the first `on_device` of these blocks and the next one, which is
        not on the device: whoever starts first brings it near for all of them. 1 where none is missing."""
        return self._jobs.get(block_ids[on_device], 1) if on_device < len(block_ids) else 1
