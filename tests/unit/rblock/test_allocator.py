"""The allocator against a model that is too simple to be wrong."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcommons.errors import CapacityExhausted
from kvcommons.rblock.allocator import BlockAllocator

TOTAL = 8
IDS = [bytes([n]) * 32 for n in range(6)]


class AllocatorMachine(RuleBasedStateMachine):
    """References by block, identity by block, cached blocks in the order in which they go."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(TOTAL)
        self.references: dict[int, int] = {}
        self.identity: dict[int, bytes] = {}
        self.cached: list[int] = []

    @rule(count=st.integers(0, TOTAL + 1))
    def allocate(self, count: int) -> None:
        never_used = TOTAL - len(self.references) - len(self.cached)
        if count > never_used + len(self.cached):
            with pytest.raises(CapacityExhausted):
                self.allocator.allocate(count)
            return
        evicted = self.cached[: max(0, count - never_used)]
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.references)
        assert {block for block in blocks if block in self.cached} == set(evicted)
        self.cached = self.cached[len(evicted) :]
        for block in blocks:
            self.identity.pop(block, None)
            self.references[block] = 1

    @rule(data=st.data(), identity=st.sampled_from(IDS))
    def publish(self, data: st.DataObject, identity: bytes) -> None:
        block = data.draw(st.integers(0, TOTAL - 1))
        other = self.identity.get(block)
        if block not in self.references or (other is not None and other != identity):
            with pytest.raises(ValueError, match="block"):
                self.allocator.publish(block, identity)
            return
        owner = next((b for b, known in self.identity.items() if known == identity), None)
        assert self.allocator.publish(block, identity) == (owner in (None, block))
        if owner is None:
            self.identity[block] = identity

    @rule(ids=st.lists(st.sampled_from(IDS), max_size=4))
    def match(self, ids: list[bytes]) -> None:
        by_identity = {identity: block for block, identity in self.identity.items()}
        expected: list[int] = []
        for identity in ids:
            if identity not in by_identity:
                break
            expected.append(by_identity[identity])
        assert self.allocator.match(ids) == expected
        for block in expected:
            self.references[block] = self.references.get(block, 0) + 1
            if block in self.cached:
                self.cached.remove(block)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(0, TOTAL - 1), max_size=3))
        if any(block not in self.references for block in blocks):
            with pytest.raises(ValueError, match="not in use"):
                self.allocator.retain(blocks)
            return
        self.allocator.retain(blocks)
        for block in blocks:
            self.references[block] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(0, TOTAL - 1), max_size=4))
        if any(self.references.get(block, 0) < blocks.count(block) for block in blocks):
            with pytest.raises(ValueError, match="block"):
                self.allocator.release(blocks)
            return
        self.allocator.release(blocks)
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                if block in self.identity:
                    self.cached.append(block)

    @rule()
    def forget(self) -> None:
        assert self.allocator.forget_cached() == len(self.cached)
        for block in self.cached:
            del self.identity[block]
        self.cached.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.in_use == len(self.references)
        assert self.allocator.cached == len(self.cached)
        assert self.allocator.free == TOTAL - len(self.references)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_stays_of_a_released_sequence_is_a_prefix() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(4)
    for block, identity in zip(blocks, IDS, strict=False):
        allocator.publish(block, identity)
    allocator.release(blocks)
    allocator.allocate(2)
    assert allocator.match(IDS[:4]) == blocks[:2]


def test_threads_neither_lose_nor_share_a_block() -> None:
    allocator = BlockAllocator(64)
    owners = [0] * 64
    clashes: list[int] = []

    def work(seed: int) -> None:
        for step in range(300):
            try:
                blocks = allocator.allocate((seed + step) % 7)
            except CapacityExhausted:
                continue
            for block in blocks:
                owners[block] += 1
                if owners[block] != 1:
                    clashes.append(block)
            for block in blocks:
                owners[block] -= 1
            allocator.release(blocks)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not clashes
    assert allocator.free == 64
    assert allocator.in_use == 0
