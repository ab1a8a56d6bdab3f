"""Which blocks nobody has used for their time to live. Decisions only: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from services.kvstore.block import Block


class Ages:
    """`ttl_s`: None is for ever, and nothing is kept then."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self._used: OrderedDict[Block, float] = OrderedDict()  # when, least recent first

    def __len__(self) -> int:
        """Blocks whose time runs."""
        return len(self._used)

    def touch(self, blocks: Iterable[Block], now_s: float) -> None:
        """They were used, the last one as the most recent."""
        if self._ttl_s is None:
            return
        for block in blocks:
            self._used[block] = now_s
            self._used.move_to_end(block)

    def take_old(self, now_s: float) -> list[Block]:
        """The blocks to go now. What is in use begins its time anew."""
        old: list[Block] = []
        while self._ttl_s is not None and self._used:
            block, used_s = next(iter(self._used.items()))
            if used_s + self._ttl_s > now_s:
                break
            if block.pins or block.disk_pins:
                self.touch([block], now_s)
                continue
            del self._used[block]
            if not block.detached:
                old.append(block)
        return old
