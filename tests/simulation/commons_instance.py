"""An instance of the simulated commons: the block table that serves (kvcommons.holder.segments), memory that
says what was written to it, sequences whose KV lies here and with creditors, and leases."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvcommons.errors import CapacityExhausted, InvalidInput
from kvcommons.holder.segment import Pin
from kvcommons.holder.segments import SegmentRef, SegmentTable
from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from tests.simulation.commons_world import Call, Proc, Sleep, Work, World
from tests.simulation.machine import require

BLOCK_TOKENS = 2
LEASE_S = 10.0
SWEEP_S = 2.0
MODEL = b"m"

Content = tuple[int, int, int]  # sequence, index of the block in it, tokens


@dataclass(slots=True, eq=False)
class Run:
    """Blocks `first` … of a sequence: here (`blocks`), or from block `offset` of a creditor's segment on."""

    first: int
    count: int
    blocks: list[int] | None = None
    creditor: str = ""
    ref: SegmentRef = SegmentRef(handle=0, epoch=0)  # noqa: RUF009
    offset: int = 0
    moving: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    number: int
    runs: list[Run] = field(default_factory=list)
    tokens: int = 0  # that have KV, or get it in the iteration under way
    written: int = 0  # that have it for certain
    busy: bool = False  # an iteration is under way
    ending: bool = False
    over: bool = False
    border: list[Any] = field(default_factory=list)  # called when the iteration has ended

    @property
    def blocks(self) -> int:
        return self.runs[-1].first + self.runs[-1].count if self.runs else 0

    def local(self) -> list[int]:
        return [block for run in self.runs for block in run.blocks or ()]

    def content(self, index: int) -> Content:
        return self.number, index, min(BLOCK_TOKENS, self.tokens - index * BLOCK_TOKENS)


class Instance(Proc):
    def __init__(self, world: World, machine: str, life: int, *, blocks: int, lend: int) -> None:
        super().__init__(world, f"{machine}.{life}")
        self.machine = machine
        self.life = life
        self.allocator = BlockAllocator(blocks)
        self.tell = functools.partial(world.history.take, self.name)
        self.allocator.observe = self.tell
        epoch = life * 1000 + ord(machine)  # no two lives of any two have the same
        self.table = SegmentTable(self.allocator, epoch=epoch, lend_blocks_max=lend)
        self.contents: list[Content | None] = [None] * blocks
        self.sequences: dict[int, Sequence] = {}
        self.leases: dict[tuple[str, SegmentRef], float] = {}  # borrowed: to when they run out
        self.pins: dict[int, Pin] = {}
        self.recomputed = 0
        self.waiting = 0  # sequences that found no room since the last heartbeat
        self.ledgers: list[str] = []
        self.spare = 0  # blocks that are left free by sequences, its own and others'
        world.after(self, SWEEP_S, self._sweep)

    # ---- as a holder

    def reserve(self, owner: str, sequence: str, blocks: int, position: int) -> SegmentRef:
        now_s = self.clock()
        if blocks > self.allocator.free - self.spare:
            raise CapacityExhausted("what is left is for its own")
        return self.table.lend(owner, sequence, blocks, first_position=position, lease_s=LEASE_S, now_s=now_s)

    def grow_segment(self, owner: str, ref: SegmentRef, blocks: int) -> bool:
        segment = self.table.find(ref)
        missing = blocks - segment.trimmed - len(segment.blocks)
        if missing > max(0, self.allocator.free - self.spare):
            raise CapacityExhausted("what is left is for its own")
        self.table.grow(ref, blocks, owner=owner, lease_s=LEASE_S, now_s=self.clock())
        return True

    def release(self, refs: list[SegmentRef]) -> bool:
        self.table.release(refs)
        return True

    def renew(self, owner: str, refs: list[SegmentRef]) -> list[int]:
        return self.table.renew(owner, refs, lease_s=LEASE_S, now_s=self.clock())

    def freeze(self, owner: str, ref: SegmentRef, generation: int, until_block: int) -> bool:
        self.table.freeze(ref, generation, until_block, owner=owner)
        return True

    def thaw(self, owner: str, ref: SegmentRef) -> bool:
        self.table.thaw(ref, owner=owner)
        return True

    def trim(self, owner: str, ref: SegmentRef, settlement: str) -> Work:
        """Answers when no access under way can reach the blocks any more."""
        trimmed = self.table.trim(ref, owner=owner, settlement=settlement)
        while self.table.parting(ref):
            yield Sleep(0.05)
        return trimmed

    def read(self, ref: SegmentRef, first: int, count: int, append: tuple[int, Content] | None) -> Work:
        """Attention over blocks of a segment, or copying them out. Appends first."""
        pin = self.table.pin(ref)
        self.pins[pin.number] = pin
        try:
            segment = pin.segment
            require(ref.generation >= segment.oldest, "an access of before a trim gets in after it")
            if append is not None:
                index, content = append
                require(index >= segment.writable_from, "a block is written that was frozen or given back")
                self.contents[segment.blocks[index - segment.trimmed]] = content
            if first < segment.trimmed:
                raise InvalidInput("these blocks were given back")
            start = first - segment.trimmed
            blocks = segment.blocks[start : start + count]
            if (draw := self.world.dice.random()) < 0.5:
                yield Sleep(0.3 if draw < 0.05 else 0.01)
            require(set(blocks) <= set(segment.held_blocks), "freed memory is read")
            return [self.contents[block] for block in blocks]
        finally:
            del self.pins[pin.number]
            self.table.unpin(pin)

    # ---- as a debtor

    def begin(self, number: int, tokens: int) -> Work:
        """A sequence with a prompt of so many tokens; it is prefilled here."""
        sequence = Sequence(number)
        self.sequences[number] = sequence
        sequence.busy = True
        while sequence.blocks * BLOCK_TOKENS < tokens:
            missing = -(-tokens // BLOCK_TOKENS) - sequence.blocks
            if not (yield from self.make_room(sequence, missing)):
                self.waiting += 1
                sequence.ending = True
                break
        else:
            sequence.tokens = tokens
            writes = []
            for run in sequence.runs:
                for at in range(run.count):
                    content = sequence.content(run.first + at)
                    if run.blocks is not None:
                        self.contents[run.blocks[at]] = content
                    else:
                        writes.append((run.creditor, "read", (run.ref, 0, 0, (at, content))))
            replies = yield Call(writes)
            if any(not isinstance(reply, list) for reply in replies):
                self._lose(sequence)
        sequence.written = sequence.tokens
        self.reach_border(sequence)

    def make_room(self, sequence: Sequence, blocks: int) -> Work:
        """Some more blocks, here or elsewhere; whether there are."""
        dice = self.world.dice
        count = min(blocks, self.allocator.free - self.spare)
        if count > 0 and dice.random() < 0.6:
            taken = self.allocator.allocate(count)
            sequence.runs.append(Run(sequence.blocks, count, taken))
            return True
        tail = sequence.runs[-1] if sequence.runs else None
        if tail is not None and tail.blocks is None and dice.random() < 0.5:
            target = tail.offset + tail.count + 1
            grow = Call([(tail.creditor, "grow_segment", (self.name, tail.ref, target))])
            (grown,) = yield grow
            unheard = grown is None
            while grown is None and (tail.creditor, tail.ref) in self.leases:  # it may have: asked again
                (grown,) = yield grow
            if grown is True:
                tail.count += 1
                self.tell("borrow_more", handle=tail.ref.handle, epoch=tail.ref.epoch, count=1)
                return True
            if unheard:  # refused, but what was asked first may come last
                self._lose(sequence)
                return False
        request = pb.CandidatesRequest(debtor=self.name, host=self.machine, model=MODEL, blocks=blocks)
        ledger = dice.choice(self.ledgers)
        (names,) = yield Call([(ledger, "candidates", (request,))])
        for name in names if isinstance(names, list) else ():
            asked = self.clock()
            count = dice.randint(1, blocks)
            position = sequence.blocks * BLOCK_TOKENS
            (ref,) = yield Call([(name, "reserve", (self.name, str(sequence.number), count, position))])
            if isinstance(ref, SegmentRef):
                self.borrowed(name, ref, count, asked)
                sequence.runs.append(Run(sequence.blocks, count, None, name, ref))
                return True
            if ref is not None:
                yield Call([(ledger, "refusal", (name,))], 0.1)
        return False

    def borrowed(self, creditor: str, ref: SegmentRef, blocks: int, asked: float) -> None:
        self.leases[creditor, ref] = asked + LEASE_S
        self.tell("borrow", handle=ref.handle, epoch=ref.epoch, count=blocks)

    def iterate(self, sequence: Sequence) -> Work:
        """One token: its KV is appended, and all KV before it is met."""
        sequence.busy = True
        if sequence.tokens == sequence.blocks * BLOCK_TOKENS and not (yield from self.make_room(sequence, 1)):
            self.reach_border(sequence)
            return
        sequence.tokens += 1
        last = (sequence.tokens - 1) // BLOCK_TOKENS
        calls: list[tuple[str, str, tuple[Any, ...]]] = []
        seen: list[Content | None] = []
        local = [(run, tuple(run.blocks)) for run in sequence.runs if run.blocks is not None]
        for run in sequence.runs:
            inside = run.first <= last < run.first + run.count
            content = sequence.content(last)
            if run.blocks is None:
                append = (run.offset + last - run.first, content) if inside else None
                used = min(run.count, last + 1 - run.first)
                if used > 0:
                    calls.append((run.creditor, "read", (run.ref, run.offset, used, append)))
            elif inside:
                self.contents[run.blocks[last - run.first]] = content
        replies = yield Call(calls, 5.0)
        for run, blocks in local:
            seen += [self.contents[block] for block in blocks[: max(0, last + 1 - run.first)]]
        if all(isinstance(reply, list) for reply in replies):
            for reply in replies:
                seen += reply
            expected = [sequence.content(index) for index in range(last + 1)]
            require(
                sorted(seen, key=repr) == sorted(expected, key=repr),
                f"{self.name} reads {seen} where {expected} was written",
            )
            sequence.written = sequence.tokens
        else:
            self._lose(sequence)
        self.reach_border(sequence)

    def reach_border(self, sequence: Sequence) -> None:
        sequence.busy = False
        if sequence.ending and not sequence.over:
            self._drop(sequence)
        waiting, sequence.border = sequence.border, []
        for waiter in waiting:
            waiter()

    def end(self, sequence: Sequence) -> None:
        """It has its answer, or its client goes away: at the iteration's border."""
        sequence.ending = True
        if not sequence.busy:
            self.reach_border(sequence)

    def give_back(self, owed: list[tuple[str, SegmentRef]]) -> None:
        """Once and without waiting: what a creditor does not hear of comes free with its lease."""
        for creditor, ref in owed:
            self.leases.pop((creditor, ref), None)
            self.tell("give_back", handle=ref.handle, epoch=ref.epoch)
            self.spawn(_only(Call([(creditor, "release", ([ref],))])))

    def _lose(self, sequence: Sequence) -> None:
        """Some of its KV is gone: it is computed again, as another sequence."""
        if not sequence.ending:
            self.recomputed += 1
        sequence.ending = True

    def _drop(self, sequence: Sequence) -> None:
        sequence.over = True
        self.sequences.pop(sequence.number, None)
        for run in sequence.runs:
            if run.blocks is not None:
                self.allocator.release(run.blocks)
        self.give_back([(run.creditor, run.ref) for run in sequence.runs if run.blocks is None])

    def _sweep(self) -> None:
        self.world.after(self, SWEEP_S, self._sweep)
        self.table.expire(self.clock())
        owed: dict[str, list[SegmentRef]] = {}
        for creditor, ref in self.leases:
            owed.setdefault(creditor, []).append(ref)
        for creditor, refs in owed.items():
            self.spawn(self._renew(creditor, refs))

    def _renew(self, creditor: str, refs: list[SegmentRef]) -> Work:
        asked = self.clock()
        (unknown,) = yield Call([(creditor, "renew", (self.name, refs))])
        gone = set()
        for ref in refs:
            if (creditor, ref) not in self.leases:
                continue
            if isinstance(unknown, list) and ref.handle not in unknown:
                self.leases[creditor, ref] = max(self.leases[creditor, ref], asked + LEASE_S)
            elif isinstance(unknown, list) or self.leases[creditor, ref] <= self.clock():
                del self.leases[creditor, ref]
                gone.add((creditor, ref))
                self.tell("lose", handle=ref.handle, epoch=ref.epoch)
        if gone:
            for sequence in list(self.sequences.values()):
                if any(run.blocks is None and (run.creditor, run.ref) in gone for run in sequence.runs):
                    self._lose(sequence)
                    if not sequence.busy:
                        self.reach_border(sequence)

    # ---- what it says, and what must hold

    def debts(self) -> dict[str, int]:
        owed: Counter[str] = Counter()
        for sequence in self.sequences.values():
            for run in sequence.runs:
                if run.blocks is None:
                    owed[run.creditor] += run.count
        return dict(owed)

    def loans(self) -> dict[str, int]:
        lent: Counter[str] = Counter()
        for segment in self.table.segments:
            lent[segment.owner] += len(segment.blocks)
        return {owner: blocks for owner, blocks in lent.items() if blocks}

    def describe(self) -> pb.Instance:
        waiting, self.waiting = self.waiting, 0
        return pb.Instance(
            id=self.name,
            service="decode",
            host=self.machine,
            model=common_pb2.ModelInfo(fingerprint=MODEL),
            load=pb.Load(
                total_blocks=self.allocator.total,
                free_blocks=self.allocator.free,
                lendable_blocks=max(0, min(self.table.lendable_blocks, self.allocator.free - self.spare)),
                queued=waiting,
                debts=self.debts(),
                loans=self.loans(),
                ready=True,
            ),
        )

    def owned(self) -> list[int]:
        """Every block that something here has, once for each."""
        found: list[int] = []
        for segment in self.table.segments:
            found += segment.held_blocks
        for segment in {pin.segment for pin in self.pins.values() if pin.segment.released}:
            found += segment.held_blocks
        for pledge in self.table.pledges._pledges.values():
            found += pledge.blocks
        for sequence in self.sequences.values():
            for run in sequence.runs:
                found += run.blocks or ()
        return found

    def check(self) -> None:
        """No block with two owners, no owner without a block; and what is free is forgotten."""
        owned = self.owned()
        mine = set(owned)
        require(len(mine) == len(owned), f"a block of {self.name} has two owners")
        require(
            len(mine) == self.allocator.in_use,
            f"{self.name}: {len(mine)} blocks have owners, {self.allocator.in_use} are in use",
        )
        for block in range(self.allocator.total):
            if block not in mine:
                self.contents[block] = None


def _only(call: Call) -> Work:
    yield call
