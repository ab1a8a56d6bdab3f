"""Which physical blocks of a holder's memory are free, in use, or kept because they may be wanted again.

A block is free, in use (references > 0), or cached (published under an identity, no reference): the device
tier. Cached blocks count as free: they are given away, least recently released first, when the free list is
empty.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvcommons.errors import CapacityExhausted
from kvcommons.telemetry.events import Observe, unobserved


class BlockAllocator:
    """Block numbers 0 … total-1. Thread-safe; no I/O; every method is atomic.

    It succeeds whole or changes nothing.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("an allocator needs at least one block")
        # Told which blocks are taken into use and which are free again; whoever keeps a table over this tells
        # it what becomes of them.
        self.observe: Observe = unobserved
        self._total = total
        self._lock = threading.Lock()
        self._free = list(range(total - 1, -1, -1))  # a stack: the last freed block is the warmest
        self._references = [0] * total
        self._id_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # first: next to be given away

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones included."""
        with self._lock:
            return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        with self._lock:
            return len(self._cached)

    @property
    def in_use(self) -> int:
        with self._lock:
            return self._total - len(self._free) - len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, contents undefined. Raises CapacityExhausted."""
        if count < 0:
            raise ValueError("cannot allocate a negative number of blocks")
        with self._lock:
            available = len(self._free) + len(self._cached)
            if count > available:
                raise CapacityExhausted(
                    f"{count} blocks are needed, {available} of {self._total} are free: "
                    "wait for sequences to end, or raise capacity_tokens"
                )
            blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
            for block in blocks:
                self._references[block] = 1
            self.observe("taken", blocks=blocks)
            return blocks

    def match(self, ids: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of `ids` that is published here, one reference taken on each."""
        with self._lock:
            blocks = []
            for identity in ids:
                block = self._block_of.get(identity)
                if block is None:
                    break
                blocks.append(block)
            self.observe("taken", blocks=[block for block in blocks if not self._references[block]])
            for block in blocks:
                self._take(block)
            return blocks

    def publish(self, block: int, identity: bytes) -> bool:
        """Makes a block in use, its contents final, findable. False if the identity is published already.

        The first one stays then, and `block` remains private to its holders. Raises ValueError for a block
        that is not in use or that has another identity.
        """
        with self._lock:
            self._require_in_use(block)
            known = self._id_of.get(block)
            if known is not None and known != identity:
                raise ValueError(f"block {block} is published under another identity")
            if identity in self._block_of:
                return self._block_of[identity] == block
            self._id_of[block] = identity
            self._block_of[identity] = block
            return True

    def retain(self, blocks: Sequence[int]) -> None:
        """One more reference on each; they must be in use."""
        with self._lock:
            for block in blocks:
                self._require_in_use(block)
            for block in blocks:
                self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each; a block repeated loses several.

        Give a sequence's blocks in its order: they are cached deepest first to go, so that what stays is a
        prefix.
        """
        with self._lock:
            needed: dict[int, int] = {}
            for block in blocks:
                needed[block] = needed.get(block, 0) + 1
            for block, count in needed.items():
                self._require_in_use(block)
                if self._references[block] < count:
                    raise ValueError(f"block {block} is released {count} times and has fewer references")
            self.observe("freed", blocks=[b for b, count in needed.items() if self._references[b] == count])
            for block in reversed(blocks):
                self._references[block] -= 1
                if self._references[block]:
                    continue
                if block in self._id_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def claim(self, blocks: Sequence[int]) -> list[int]:
        """As `release`, but blocks that would come free stay in use, the caller's alone and unpublished;
        which."""
        with self._lock:
            for block in blocks:
                self._require_in_use(block)
            claimed = []
            for block in blocks:
                if self._references[block] > 1:
                    self._references[block] -= 1
                    continue
                if block in self._id_of:
                    del self._block_of[self._id_of.pop(block)]
                claimed.append(block)
            return claimed

    def held_once(self, blocks: Sequence[int]) -> bool:
        """Whether each of these has one reference and no more."""
        with self._lock:
            return all(self._references[block] == 1 for block in blocks)

    def forget(self) -> None:
        """No block is to be found any more: the content of all of them is void. Blocks in use stay so."""
        with self._lock:
            self._drop_cached()
            self._id_of.clear()
            self._block_of.clear()

    def forget_cached(self) -> int:
        """Drops the device tier; how many blocks it had. Blocks in use stay published."""
        with self._lock:
            return self._drop_cached()

    def _drop_cached(self) -> int:
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._id_of.pop(block)]
        return block

    def _take(self, block: int) -> None:
        self._references[block] += 1
        self._cached.pop(block, None)

    def _require_in_use(self, block: int) -> None:
        if not 0 <= block < self._total or not self._references[block]:
            raise ValueError(f"block {block} is not in use")
