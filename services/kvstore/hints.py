"""What the routers' queues will ask for next: received, merged, bounded, forgotten in time.

Decisions only: no I/O, no clock, no lock.

Each router sends the look-ahead of its queue with expected starts and repeats it while jobs wait; a newer
hint replaces the older one of the same router. Merged, soonest first, they go to the eviction policies
(`expected.py`), and give the fetch window of Gao et al., "AttentionStore", section 3.3.1: the next C_mem /
S_kv jobs, as far as what they want fits into DRAM together; their blocks are fetched from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.kvstore.expected import ExpectedJobs, ExpectedUse
from services.kvstore.policies.base import Policy
from services.kvstore.policies.window import Windows

ROUTERS_MAX = 64
BLOCKS_MAX = 131_072  # of all routers, each the same part: some 700 prompts of 12,000 tokens, in 12 MB
TTL_S_MAX = 60.0

Window = Mapping[bytes, Mapping[bytes, int]]
"""By model: the blocks of a window, and their places in the order of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hint:
    uses: Sequence[ExpectedUse]
    until_s: float


class Hints:
    """The hints of all routers. `slot_bytes`: what a block of a model takes, 0 for an unknown model.

    `policies`: of a model. With `paper_window` they see AttentionStore's eviction window only.
    """

    def __init__(
        self,
        slot_bytes: Callable[[bytes], int],
        *,
        dram_bytes: int,
        disk_bytes: int,
        blocks_max: int = BLOCKS_MAX,
        policies: Callable[[bytes], Iterable[Policy[bytes]]] = lambda _: (),
        paper_window: bool = False,
    ) -> None:
        self.windows = Windows(dram=dram_bytes, disk=disk_bytes)
        self.jobs = ExpectedJobs(policies, (lambda: self.windows.eviction) if paper_window else None)
        self._slot_bytes = slot_bytes
        self._dram_bytes = dram_bytes
        self._blocks_max = blocks_max
        self._hints: dict[str, _Hint] = {}
        self._upcoming: list[ExpectedUse] | None = []  # None: to be merged anew
        self._window: Window | None = None

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
            self.jobs.replace(router, [])
            return 0
        kept: list[ExpectedUse] = []
        blocks, blocks_max = 0, self._blocks_max // (len(self._hints) + 1)
        for use in uses:
            blocks += len(use.block_ids)
            if blocks > blocks_max:
                break
            kept.append(use)
        self.jobs.replace(router, kept)
        if kept:
            self._hints[router] = _Hint(uses=kept, until_s=now_s + min(ttl_s, TTL_S_MAX))
        return len(kept)

    def expire(self, now_s: float) -> None:
        """Forgets what was not repeated in time: its router is gone, or has other things to do."""
        old = [router for router, hint in self._hints.items() if hint.until_s <= now_s]
        for router in old:
            del self._hints[router]
            self.jobs.replace(router, [])
        if old:
            self._changed()

    def upcoming(self) -> Sequence[ExpectedUse]:
        """The uses of all routers, soonest first."""
        if self._upcoming is None:
            merged = [use for hint in self._hints.values() for use in hint.uses]
            self._upcoming = sorted(merged, key=lambda use: use.at_s)
        return self._upcoming

    def served(self, size_bytes: int) -> None:
        """A job wanted so much of the store."""
        self.windows.served(size_bytes)
        self._window = None

    def window(self) -> Window:
        """The blocks of the fetch window. A block that several jobs use takes its room once, and has the
        place of its first use."""
        if self._window is None:
            self._window = self._fill(self._dram_bytes)
        return self._window

    def _fill(self, left_bytes: int) -> Window:
        window: dict[bytes, dict[bytes, int]] = {}
        place = 0
        for use in self.upcoming()[: self.windows.fetch]:
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
        self._window = None
