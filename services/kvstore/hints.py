"""What the routers' queues will ask for next: received, merged, bounded, forgotten in time.

Decisions only: no I/O, no clock, no lock.

Each router sends the look-ahead of its queue with expected starts and repeats it while jobs wait; a newer
hint replaces the older one of the same router. Merged, soonest first, they give the windows of Gao et al.,
"AttentionStore", section 3.3: the blocks of the next uses that together fit into DRAM are fetched from disk
and spared from eviction there, those that fit into DRAM and disk together are spared on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ROUTERS_MAX = 64
BLOCKS_MAX = 16_384  # of one router
TTL_S_MAX = 60.0

Window = Mapping[bytes, Mapping[bytes, int]]
"""By model: the blocks of a window, and their places in the order of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedUse:
    """A job that waits at a router. `at_s`: when it will likely start, on the store's clock."""

    model: bytes
    block_ids: Sequence[bytes]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hint:
    uses: Sequence[ExpectedUse]
    until_s: float


class Hints:
    """The hints of all routers. `slot_bytes`: what a block of a model takes, 0 for an unknown model."""

    def __init__(
        self,
        slot_bytes: Callable[[bytes], int],
        *,
        dram_bytes: int,
        disk_bytes: int,
        blocks_max: int = BLOCKS_MAX,
    ) -> None:
        self._slot_bytes = slot_bytes
        self._window_bytes = {False: dram_bytes, True: dram_bytes + disk_bytes}
        self._blocks_max = blocks_max
        self._hints: dict[str, _Hint] = {}
        self._upcoming: list[ExpectedUse] | None = []  # None: to be merged anew
        self._windows: dict[bool, Window] = {}

    def __len__(self) -> int:
        """Routers whose hints are known."""
        return len(self._hints)

    def put(self, router: str, uses: Sequence[ExpectedUse], *, now_s: float, ttl_s: float) -> int:
        """Replaces what this router hinted. How many of its first uses are kept: of the others, and of too
        many routers, nothing is remembered."""
        self.expire(now_s)
        self._hints.pop(router, None)
        self._changed()
        if len(self._hints) >= ROUTERS_MAX:
            return 0
        kept: list[ExpectedUse] = []
        blocks = 0
        for use in uses:
            blocks += len(use.block_ids)
            if blocks > self._blocks_max:
                break
            kept.append(use)
        if kept:
            self._hints[router] = _Hint(uses=kept, until_s=now_s + min(ttl_s, TTL_S_MAX))
        return len(kept)

    def expire(self, now_s: float) -> None:
        """Forgets what was not repeated in time: its router is gone, or has other things to do."""
        old = [router for router, hint in self._hints.items() if hint.until_s <= now_s]
        for router in old:
            del self._hints[router]
        if old:
            self._changed()

    def upcoming(self) -> Sequence[ExpectedUse]:
        """The uses of all routers, soonest first."""
        if self._upcoming is None:
            merged = [use for hint in self._hints.values() for use in hint.uses]
            self._upcoming = sorted(merged, key=lambda use: use.at_s)
        return self._upcoming

    def window(self, *, disk: bool) -> Window:
        """The blocks of the next uses that together have room: in DRAM, or in both tiers. A block that
        several jobs use takes its room once, and has the place of its first use."""
        window = self._windows.get(disk)
        if window is None:
            window = self._windows[disk] = self._fill(self._window_bytes[disk])
        return window

    def _fill(self, left_bytes: int) -> Window:
        window: dict[bytes, dict[bytes, int]] = {}
        place = 0
        for use in self.upcoming():
            size = self._slot_bytes(use.model)
            if not size:
                continue  # no block of this model is stored
            blocks = window.setdefault(use.model, {})
            for block_id in use.block_ids:
                if block_id in blocks:
                    continue
                left_bytes -= size
                if left_bytes < 0:
                    return window
                blocks[block_id] = place
                place += 1
        return window

    def _changed(self) -> None:
        self._upcoming = None
        self._windows.clear()
