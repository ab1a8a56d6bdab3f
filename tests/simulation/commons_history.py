"""What happened to the blocks of a commons, held to what must never happen. Pure.

Events come from the block tables and allocators of holders and from debtors, in the order in which they
happened: told directly by the simulator, or read from the files that real processes wrote (`event_log`). The
checker keeps books of its own and believes no table.

- No block with two owners: what is taken is free, and is nobody's; what is lent is in use, and nobody else's.
- No owner without a block: nothing comes free that a segment has.
- Freed memory is never read or written: nothing comes free that an access under way may reach, and none
  begins on a segment, or with a generation, that is over.
- A sequence's KV is given back only after the sequence has left it: a switch comes after the copy of what was
  frozen, a trim after the switch, a release after its debtor's word.
- At rest debts equal loans; where no sequence is left, no block is in use.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.machine import Violation, require

Key = tuple[int, int]  # epoch of a holder's life, handle


@dataclass(slots=True)
class _Segment:
    owner: str
    blocks: list[int]
    lent: bool
    generation: int = 0
    oldest: int = 0
    frozen: int = 0


@dataclass(slots=True)
class _Holder:
    """One life of one process."""

    in_use: set[int] = field(default_factory=set)
    segments: dict[Key, _Segment] = field(default_factory=dict)
    owners: dict[int, set[Key]] = field(default_factory=dict)  # of each block that segments have
    pins: dict[int, set[int]] = field(default_factory=dict)  # blocks that an access under way may reach


@dataclass(slots=True)
class _Loan:
    debtor: str
    blocks: int


def replayed(folder: Path) -> History:
    """The history that processes of one machine wrote to `folder`, their files merged by time. Raises
    Violation, with the number of the event."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    history = History()
    for line in sorted(lines, key=lambda one: int(one["at_ns"])):
        facts = {name: value for name, value in line.items() if name != "at_ns"}
        try:
            history.take(**facts)
        except Violation as violation:
            raise Violation(f"{violation} (at {line['at_ns']}: {facts})") from None
    return history


class History:
    """`take` events in order; it raises Violation."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()  # events by their names
        self._holders: dict[str, _Holder] = {}
        self._lent: dict[Key, tuple[str, str]] = {}  # ever: creditor, debtor
        self._loans: dict[Key, _Loan] = {}  # as debtors know them
        self._frozen: set[tuple[Key, int]] = set()  # generations of segments, ever
        self._copied: set[tuple[Key, int]] = set()
        self._switched: set[tuple[Key, int]] = set()
        self._handlers: dict[str, Callable[..., None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    def take(self, instance: str, event: str, **facts: Any) -> None:
        """Raises KeyError for an event that is not known."""
        self.seen[event] += 1
        self._handlers[event](instance, **facts)

    def rest(self, alive: Collection[str], *, idle: bool = False) -> None:
        """No debt changes among these instances: what each owes is what the others have lent it. `idle`: no
        sequence is left either."""
        for name in alive:
            holder = self._holders.get(name, _Holder())
            for key, segment in holder.segments.items():
                if segment.lent and segment.blocks:
                    loan = self._loans.get(key)
                    require(
                        loan is not None
                        and loan.debtor == segment.owner
                        and loan.blocks == len(segment.blocks),
                        f"{name} has lent {len(segment.blocks)} blocks to {segment.owner}, who owes {loan}",
                    )
            if idle:
                require(not any(holder.pins.values()), f"an access at {name} never ends")
                require(not holder.in_use, f"blocks {sorted(holder.in_use)} of {name} never came back")
        for key, loan in self._loans.items():
            if loan.debtor in alive and loan.blocks:
                creditor = self._lent[key][0]
                lent = self._holders[creditor].segments.get(key) if creditor in alive else None
                require(
                    lent is not None and len(lent.blocks) == loan.blocks,
                    f"{loan.debtor} owes {creditor} {loan.blocks} blocks of {lent}",
                )

    # ---- allocators

    def _on_taken(self, instance: str, blocks: Sequence[int]) -> None:
        holder = self._holder(instance)
        for block in blocks:
            require(block not in holder.in_use, f"block {block} of {instance} is taken twice")
            require(not holder.owners.get(block), f"block {block} of {instance} is a segment's and is taken")
        holder.in_use.update(blocks)

    def _on_freed(self, instance: str, blocks: Sequence[int]) -> None:
        holder = self._holder(instance)
        for block in blocks:
            require(block in holder.in_use, f"block {block} of {instance} is freed twice")
            require(not holder.owners.get(block), f"block {block} of {instance} is freed under a segment")
            require(
                not any(block in reached for reached in holder.pins.values()),
                f"block {block} of {instance} is freed while it is accessed",
            )
        holder.in_use.difference_update(blocks)

    # ---- block tables

    def _on_reserve(
        self, instance: str, handle: int, epoch: int, owner: str, blocks: list[int], former: int
    ) -> None:
        holder, key = self._holder(instance), (epoch, handle)
        beside = {(epoch, former)} if former else set()
        for block in blocks:
            require(block in holder.in_use, f"{instance} lends block {block}, which is free")
            require(
                holder.owners.get(block, set()) <= beside,
                f"{instance} lends block {block} to {owner}, and it is somebody else's",
            )
            require(
                former or not any(block in reached for reached in holder.pins.values()),
                f"{instance} lends block {block}, which others still access",
            )
        self._lent[key] = instance, owner
        self._add(holder, key, _Segment(owner, [], True), blocks)

    def _on_own(
        self, instance: str, handle: int, epoch: int, owner: str, blocks: list[int], former: int
    ) -> None:
        holder = self._holder(instance)
        self._own(holder, instance, blocks)
        self._add(holder, (epoch, handle), _Segment(owner, [], False), blocks)

    def _on_grow(self, instance: str, handle: int, epoch: int, blocks: list[int]) -> None:
        holder, key = self._holder(instance), (epoch, handle)
        segment = holder.segments[key]
        if segment.lent:
            for block in blocks:
                require(block in holder.in_use, f"{instance} lends block {block}, which is free")
                require(not holder.owners.get(block), f"{instance} lends block {block} twice")
        else:
            self._own(holder, instance, blocks)
        self._add(holder, key, segment, blocks)

    def _on_freeze(self, instance: str, handle: int, epoch: int, generation: int, count: int) -> None:
        segment = self._live(instance, (epoch, handle))
        require(generation > segment.generation, f"generation {generation} begins twice")
        require(0 < count <= len(segment.blocks), f"{count} blocks are frozen of {len(segment.blocks)}")
        segment.generation, segment.frozen = generation, count
        self._frozen.add(((epoch, handle), generation))

    def _on_thaw(self, instance: str, handle: int, epoch: int, generation: int) -> None:
        segment = self._live(instance, (epoch, handle))
        require(
            ((epoch, handle), generation) not in self._switched or not segment.frozen,
            f"what was switched at {instance} is thawed",
        )
        segment.frozen = 0

    def _on_trim(self, instance: str, handle: int, epoch: int, generation: int, count: int) -> None:
        holder, key = self._holder(instance), (epoch, handle)
        segment = self._live(instance, key)
        require(count == segment.frozen, f"{count} blocks are trimmed of {segment.frozen} frozen ones")
        require(
            (key, generation) in self._switched,
            f"{instance} takes blocks back that {segment.owner} has not switched from",
        )
        self._forget(holder, key, segment.blocks[:count])
        segment.blocks = segment.blocks[count:]
        segment.oldest, segment.frozen = generation, 0

    def _on_release(self, instance: str, handle: int, epoch: int) -> None:
        key = epoch, handle
        segment = self._live(instance, key)
        require(
            not segment.lent or key not in self._loans,
            f"{instance} releases blocks that {segment.owner} has not given back",
        )
        self._drop(instance, key)

    def _on_expire(self, instance: str, handle: int, epoch: int) -> None:
        self._live(instance, (epoch, handle))
        self._drop(instance, (epoch, handle))

    def _on_adopted(self, instance: str, handle: int, epoch: int) -> None:
        self._loans.pop((epoch, handle), None)  # the former owner's
        self._drop(instance, (epoch, handle))

    def _on_pin(self, instance: str, handle: int, epoch: int, generation: int, pin: int) -> None:
        segment = self._live(instance, (epoch, handle))
        require(
            segment.oldest <= generation <= segment.generation,
            f"an access of generation {generation} gets in at {instance}, after a trim or before a freeze",
        )
        self._holder(instance).pins[pin] = set(segment.blocks)

    def _on_unpin(self, instance: str, handle: int, epoch: int, pin: int) -> None:
        del self._holder(instance).pins[pin]

    # ---- debtors

    def _on_borrow(self, instance: str, handle: int, epoch: int, count: int) -> None:
        key = epoch, handle
        lent = self._lent.get(key)
        require(lent is not None and lent[1] == instance, f"{instance} borrows what nobody lent it: {lent}")
        self._loans[key] = _Loan(instance, count)

    def _on_borrow_more(self, instance: str, handle: int, epoch: int, count: int) -> None:
        loan = self._loans.get((epoch, handle))
        if loan is not None:  # else its sequence has ended meanwhile
            loan.blocks += count

    def _on_copy(self, instance: str, handle: int, epoch: int, generation: int, home: list[int]) -> None:
        """To these blocks, or, where there are none, to another holder's."""
        require(
            ((epoch, handle), generation) in self._frozen, f"{instance} copies what may still be written to"
        )
        holder = self._holder(instance)
        for block in home:
            require(block in holder.in_use, f"{instance} copies to block {block}, which is free")
            require(not holder.owners.get(block), f"{instance} copies to block {block}, which is a segment's")
        self._copied.add(((epoch, handle), generation))

    def _on_switch(self, instance: str, handle: int, epoch: int, generation: int, count: int) -> None:
        key = epoch, handle
        require((key, generation) in self._copied, f"{instance} switches to what it has not copied")
        require((key, generation) not in self._switched, f"{instance} switches twice")
        self._switched.add((key, generation))
        loan = self._loans.get(key)
        if loan is not None:
            require(count <= loan.blocks, f"{instance} switches {count} blocks of {loan.blocks}")
            loan.blocks -= count

    def _on_give_back(self, instance: str, handle: int, epoch: int) -> None:
        self._loans.pop((epoch, handle), None)

    def _on_lose(self, instance: str, handle: int, epoch: int) -> None:
        self._loans.pop((epoch, handle), None)

    # ---- the books

    def _holder(self, instance: str) -> _Holder:
        return self._holders.setdefault(instance, _Holder())

    def _live(self, instance: str, key: Key) -> _Segment:
        segment = self._holder(instance).segments.get(key)
        require(segment is not None, f"segment {key} of {instance} is over, and still used")
        assert segment is not None
        return segment

    def _own(self, holder: _Holder, instance: str, blocks: Iterable[int]) -> None:
        """Its own sequences may share blocks, with each other only."""
        for block in blocks:
            require(block in holder.in_use, f"a sequence of {instance} lies in block {block}, which is free")
            require(
                not any(holder.segments[key].lent for key in holder.owners.get(block, ())),
                f"block {block} of {instance} is its own, and lent",
            )

    def _add(self, holder: _Holder, key: Key, segment: _Segment, blocks: Iterable[int]) -> None:
        holder.segments[key] = segment
        for block in blocks:
            segment.blocks.append(block)
            holder.owners.setdefault(block, set()).add(key)

    def _forget(self, holder: _Holder, key: Key, blocks: Iterable[int]) -> None:
        for block in blocks:
            holder.owners[block].discard(key)
            if not holder.owners[block]:
                del holder.owners[block]

    def _drop(self, instance: str, key: Key) -> None:
        holder = self._holder(instance)
        self._forget(holder, key, holder.segments.pop(key).blocks)
