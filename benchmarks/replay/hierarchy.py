"""Two tiers under one pair of policies: AttentionStore's hierarchical placement (§3.3). Bookkeeping, no I/O.

A block is in DRAM, on disk, or nowhere. What is made or used comes into DRAM; what DRAM's policy gives up
goes to disk; what the disk's policy gives up is gone. Jobs at the head of the queue have their blocks
fetched from disk before their turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from services.kvstore.policies.base import K, Policy, nothing_pinned
from services.kvstore.policies.window import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacities in blocks; `buffer_blocks` of DRAM are kept free, so that a fetch need not wait (§3.3.1)."""

    dram_blocks: int
    disk_blocks: int = 0
    buffer_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Of one job's run: the leading blocks that were there, by tier."""

    dram: int
    disk: int


@dataclass(slots=True)
class Moves:
    """Blocks that changed their place."""

    fetched: int = 0  # disk to DRAM ahead of the job's turn
    loaded: int = 0  # disk to DRAM at its turn
    demoted: int = 0  # DRAM to disk
    dropped: int = 0  # out, for want of room
    expired: int = 0  # out, unused for the time to live


class _Tier(Generic[K]):
    def __init__(self, policy: Policy[K], capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.blocks: set[K] = set()

    def admit(self, block: K) -> None:
        self.blocks.add(block)
        self.policy.admit(block)

    def remove(self, block: K) -> None:
        self.blocks.discard(block)
        self.policy.remove(block)

    def overflow(self, pinned: Callable[[K], bool]) -> list[K]:
        """Takes out what is too much. A block that has just come may be among it: it is never stored then."""
        out: list[K] = []
        while len(self.blocks) > self.capacity:
            block = self.policy.victim(pinned)
            if block is None:
                break
            self.remove(block)
            out.append(block)
        return out


class Hierarchy(Generic[K]):
    """`policy` makes one for each tier. With `fetches`, the queue's head is fetched ahead.

    `paper_window` bounds what the policies see of the queue to AttentionStore's eviction window.
    `ttl_s`: None is for ever.

    What is pinned must be in a tier already; it stays where it is.
    """

    def __init__(
        self,
        capacity: Capacity,
        policy: Callable[[], Policy[K]],
        *,
        fetches: bool,
        paper_window: bool = False,
        ttl_s: float | None = None,
        pinned: Callable[[K], bool] = nothing_pinned,
    ) -> None:
        self.capacity = capacity
        self.moves = Moves()
        self._dram = _Tier(policy(), capacity.dram_blocks - capacity.buffer_blocks)
        self._disk = _Tier(policy(), capacity.disk_blocks)
        self._tiers = (self._dram, self._disk) if capacity.disk_blocks else (self._dram,)
        self._fetches = fetches and capacity.disk_blocks > 0
        self._paper_window = paper_window
        self._ttl_s = ttl_s
        self._pinned = pinned
        self._used: OrderedDict[K, float] = OrderedDict()  # when, least recent first; kept where a ttl is
        self._waiting: dict[int, Sequence[K]] = {}
        self._unannounced: deque[int] = deque()  # too far back for the policies' window
        self._unfetched: deque[int] = deque()
        self._announced: set[int] = set()
        self._fetched: dict[int, int] = {}  # jobs in the fetch window -> blocks that they want
        self._fetched_blocks = 0
        self.windows = Windows(dram=self._dram.capacity, disk=self._disk.capacity)

    @property
    def dram_used(self) -> int:
        return len(self._dram.blocks)

    @property
    def disk_used(self) -> int:
        return len(self._disk.blocks)

    def expect(self, job: int, run: Sequence[K]) -> None:
        """A job joined the queue's tail."""
        self._waiting[job] = run
        self._unannounced.append(job)
        if self._fetches:
            self._unfetched.append(job)
        self._announce()

    def forget(self, job: int) -> None:
        """A job left the queue unserved."""
        run = self._waiting.pop(job, None)
        if run is not None and job in self._announced:
            self._announced.discard(job)
            for tier in self._tiers:
                tier.policy.forget(job, run)
        self._fetched_blocks -= self._fetched.pop(job, 0)

    def serve(self, job: int, run: Sequence[K], now_s: float) -> Served:
        """The job's turn: finds what is there, makes the rest, and keeps what there is room for."""
        self.expire(now_s)
        self._fetch()
        served = self._find(run)
        hits = served.dram + served.disk
        for depth in range(len(run) - 1, -1, -1):
            self._bring(run[depth])
        for tier in self._tiers:
            tier.policy.use(job, run, hits)
        self.moves.loaded += served.disk
        self.windows.served(len(run))
        self._waiting.pop(job, None)
        self._announced.discard(job)
        self._fetched_blocks -= self._fetched.pop(job, 0)
        self._settle()
        if self._ttl_s is not None:
            self._touch(run, now_s)
        self._announce()
        return served

    def expire(self, now_s: float) -> None:
        """Drops what nobody has used for the time to live."""
        while self._ttl_s is not None and self._used:
            block, used_s = next(iter(self._used.items()))
            if used_s + self._ttl_s > now_s:
                break
            del self._used[block]
            if self._pinned(block):
                self._used[block] = now_s
                continue
            self._dram.remove(block)
            self._disk.remove(block)
            self.moves.expired += 1

    def _find(self, run: Sequence[K]) -> Served:
        dram = disk = 0
        for block in run:
            if block in self._dram.blocks:
                dram += 1
            elif block in self._disk.blocks:
                disk += 1
            else:
                break
        return Served(dram=dram, disk=disk)

    def _bring(self, block: K) -> None:
        if block in self._dram.blocks:
            return
        if block in self._disk.blocks:
            if self._pinned(block):
                return
            self._disk.remove(block)
        self._dram.admit(block)

    def _settle(self) -> None:
        """Demotes and drops until both tiers are within their capacities."""
        down = self._dram.overflow(self._pinned)
        if not self._disk.capacity:
            self._drop(down)
            return
        for block in down:
            self._disk.admit(block)
        self.moves.demoted += len(down)
        self._drop(self._disk.overflow(self._pinned))

    def _drop(self, blocks: Sequence[K]) -> None:
        self.moves.dropped += len(blocks)
        for block in blocks:
            self._used.pop(block, None)

    def _touch(self, run: Sequence[K], now_s: float) -> None:
        for block in reversed(run):
            self._used.pop(block, None)
            if block in self._dram.blocks or block in self._disk.blocks:
                self._used[block] = now_s

    def _announce(self) -> None:
        while self._unannounced and not (
            self._paper_window and len(self._announced) >= self.windows.eviction
        ):
            job = self._unannounced.popleft()
            if job in self._waiting:
                self._announced.add(job)
                for tier in self._tiers:
                    tier.policy.expect(job, self._waiting[job])

    def _fetch(self) -> None:
        """Brings what the next jobs want from disk into DRAM, each job once, as it comes into the window.

        The window is the paper's, and ends sooner where its jobs are larger than most: what they want
        has to fit all at once, or the next would push out the ones before.
        """
        fetched = 0
        while self._unfetched and len(self._fetched) < self.windows.fetch:
            job = self._unfetched[0]
            run = self._waiting.get(job)
            if run and self._fetched and self._fetched_blocks + len(run) > self._dram.capacity:
                break
            self._unfetched.popleft()
            if run is None:
                continue
            self._fetched[job] = len(run)
            self._fetched_blocks += len(run)
            found = self._find(run)
            for block in reversed(run[: found.dram + found.disk]):
                self._bring(block)
            fetched += found.disk
        if fetched:
            self.moves.fetched += fetched
            self._settle()
