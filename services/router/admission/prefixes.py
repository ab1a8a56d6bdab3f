"""Prefixes of waiting requests: how far their KV lies, as far as the router knows, and how many requests
share them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcommons.pb import kvstore_pb2 as pb
from services.router.admission.scheduling import ABSENT, DEVICE, DISK, DRAM

_OF_TIER: dict[int, float] = {pb.TIER_DRAM: DRAM, pb.TIER_DISK: DISK, pb.TIER_ABSENT: ABSENT}


def distance_of(blocks: int, on_device: int, tiers: Sequence[int]) -> float:
    """The mean over a prompt's blocks: the first `on_device` are there, `tiers` says where the leading ones
    lie in the store, and the rest is absent, as is all of a prompt without a block to reuse."""
    if not blocks:
        return ABSENT
    stored = sum((_OF_TIER[tier] for tier in tiers[on_device:blocks]), 0.0)
    absent = max(0, blocks - max(on_device, len(tiers)))
    return (DEVICE * on_device + stored + ABSENT * absent) / blocks


class DeviceBlocks:
    """Blocks that prefill likely still has in its own memory: those of the requests that this router started
    last, as many as fit there. A guess, for other routers' requests are not in it; it decides on order
    alone."""

    def __init__(self) -> None:
        self._first: OrderedDict[bytes, bytes] = OrderedDict()  # by block: the first one of its prompt

    def used(self, block_ids: Sequence[bytes], capacity: int) -> set[bytes]:
        """A request with these blocks started; `capacity` is what all prefills hold, in blocks. The first
        blocks of all prompts that lie nearer or farther for it."""
        changed = set(block_ids[:1])
        for block_id in reversed(block_ids):  # the deepest goes first
            self._first[block_id] = block_ids[0]
            self._first.move_to_end(block_id)
        while len(self._first) > capacity:
            changed.add(self._first.popitem(last=False)[1])
        return changed

    def leading(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first blocks are there."""
        for number, block_id in enumerate(block_ids):
            if block_id not in self._first:
                return number
        return len(block_ids)


def common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many blocks two prompts begin with alike: identities are chained, so where one differs, all after
    it do."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high) // 2
        if first[middle] == second[middle]:
            low = middle + 1
        else:
            high = middle
    return low


class PrefixSharers:
    """How many waiting requests would profit from one block.

    Identities are chained, so equal identities mean equal beginnings: the blocks of all waiting requests are
    a radix tree, and a count by identity is all of it that the queue needs."""

    def __init__(self) -> None:
        self._requests: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Blocks that some waiting request has."""
        return len(self._requests)

    def join(self, block_ids: Sequence[bytes]) -> None:
        """A request with these blocks waits from now on."""
        for block_id in block_ids:
            self._requests[block_id] = self._requests.get(block_id, 0) + 1

    def leave(self, block_ids: Sequence[bytes]) -> None:
        """It waits no longer."""
        for block_id in block_ids:
            left = self._requests[block_id] - 1
            if left:
                self._requests[block_id] = left
            else:
                del self._requests[block_id]

    def of(self, block_ids: Sequence[bytes], on_device: int) -> int:
        """How many waiting requests begin with the first `on_device` of these blocks and the next one, which
        is not on the device: whoever starts first brings it near for all of them. 1 where none is missing."""
        return self._requests.get(block_ids[on_device], 1) if on_device < len(block_ids) else 1
