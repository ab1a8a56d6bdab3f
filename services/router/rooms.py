"""How much room decode instances have, as far as this router can tell. Pure.

A heartbeat may be seconds old. What the router has dispatched to an instance since then is taken, and what it
knows to have ended since is free again. Decode numbers its reservations and ends and tells them to those who
asked, and a heartbeat has the number of the last one that it counts (`Load.changes`): so nothing is counted
twice, however late heartbeats are. What other routers do is known a heartbeat later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcommons.pb.ledger_pb2 import Instance, Load

_ENDED_MAX = 1000  # that no heartbeat has counted yet, of one instance: no ledger answers, or it hangs


@dataclass(slots=True, kw_only=True, eq=False)
class Taken:
    """What one sequence holds, in blocks: `here`, at its instance, and `away`, with those who lend to it."""

    instance_id: str
    here: int
    away: int = 0
    change: int | None = None  # of its reservation; None: decode has not said yet that there is one
    end: int | None = None  # the change by which it ended
    finished: int = 0  # that change, as decode told it
    told_here: int = 0  # of that, what the instance's last heartbeat counts
    told_away: int = 0
    told: bool = False
    came_before: int = 0  # blocks that had come free in all when it began to ask


@dataclass(slots=True, kw_only=True)
class _Seen:
    """One decode instance."""

    load: Load
    taken: list[Taken] = field(default_factory=list)
    latest: int = 0  # the last change that was heard of
    limit: int | None = None  # the largest sequence that has room, with `came` blocks less; a refusal said so


class Rooms:
    """Told of heartbeats, and of what this router dispatches. Belongs to the event loop."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._lendable: dict[str, int] = {}  # of pools, when they were heard last
        self._came = 0  # blocks that came free anywhere until now

    def hear(self, decodes: Sequence[Instance], pools: Iterable[Instance] = ()) -> None:
        """All decode instances and attention pools as their last heartbeats describe them."""
        for instance in decodes:
            seen = self._seen.get(instance.id)
            if seen is None:
                self._seen[instance.id] = _Seen(load=instance.load, latest=instance.load.changes)
                self._came += instance.load.free_blocks
            elif seen.load.changes <= instance.load.changes and seen.load != instance.load:
                # Not what a ledger that lags behind another one still tells.
                self._heard(seen, instance.load)
        ids = {instance.id for instance in decodes}
        for instance_id in self._seen.keys() - ids:
            if all(one.end is not None for one in self._seen[instance_id].taken):
                del self._seen[instance_id]
        lendable = {one.id: one.load.lendable_blocks for one in pools}
        self._came += sum(max(blocks - self._lendable.get(name, 0), 0) for name, blocks in lendable.items())
        self._lendable = lendable

    def take(self, instance_id: str, blocks: int) -> Taken:
        """A sequence of `blocks` is about to ask for room there."""
        taken = Taken(instance_id=instance_id, here=blocks, came_before=self._came)
        seen = self._seen.get(instance_id)
        if seen is not None:
            seen.taken.append(taken)
        return taken

    def reserved(self, taken: Taken, *, change: int, here: int, away: int) -> None:
        """It has got room; `change` is that reservation's number."""
        taken.change, taken.here, taken.away = change, here, away
        seen = self._seen.get(taken.instance_id)
        if seen is not None:
            seen.latest = max(seen.latest, change)
            if change <= seen.load.changes:
                _tell(taken)

    def grown(self, taken: Taken, blocks: int) -> None:
        """It has so many in all, more than before."""
        taken.here = blocks - taken.away

    def refused(self, taken: Taken, blocks: int) -> None:
        """There was no room for `blocks`. Until the instance's next heartbeat it is believed to have less,
        but for what has come free since it was asked."""
        seen = self._forget(taken)
        if seen is not None:
            seen.limit = blocks - 1 - taken.came_before

    def ended(self, taken: Taken) -> None:
        """It holds nothing any more."""
        seen = self._seen.get(taken.instance_id)
        if not taken.change:  # it never got room, or decode does not number what it does
            self._forget(taken)
        elif seen is not None and taken in seen.taken:
            # A call that was cancelled is not answered: its end is one of those still to be heard of.
            taken.end = taken.finished or seen.latest + 1
            seen.latest = max(seen.latest, taken.end)
            self._came += taken.here + taken.away
            if taken.end <= seen.load.changes:
                self._forget(taken)
            ended = [one for one in seen.taken if one.end is not None]
            for one in ended[: max(len(ended) - _ENDED_MAX, 0)]:
                seen.taken.remove(one)

    def now(self, instance: Instance) -> Instance:
        """A decode instance as it will be by now: `free_blocks`, `running`."""
        seen = self._seen.get(instance.id)
        if seen is None:
            return instance
        if not seen.taken and seen.limit is None and seen.load.changes == instance.load.changes:
            return instance
        found = Instance()
        found.CopyFrom(instance)
        found.load.free_blocks = self._free(seen)
        found.load.running, found.load.queued = _sequences(seen), 0
        return found

    def largest(self, decodes: Sequence[Instance], pools: Iterable[Instance]) -> int | None:
        """Blocks of the largest sequence for which there is likely room now, borrowed ones included; None
        where there is no instance. All of one model, and heard of."""
        return max(self.each(decodes, pools).values(), default=None)

    def each(self, decodes: Sequence[Instance], pools: Iterable[Instance]) -> dict[str, int]:
        """The same of each decode instance that has been heard of, by its id."""
        rooms: dict[str, int] = {}
        ids = [instance.id for instance in decodes if instance.id in self._seen]
        known = [self._seen[instance_id] for instance_id in ids]
        lendable = [self._lends(seen) for seen in known]
        # Blocks with lenders that their heartbeats do not count yet, or still do.
        away = sum(one.told_away - _away(one) for seen in known for one in seen.taken)
        # The parts of a head group have the same blocks, a share of the heads each.
        pooled = sum(one.load.lendable_blocks for one in pools if not one.heads.number)
        others = sum(lendable) + pooled + away
        for instance_id, seen, own in zip(ids, known, lendable, strict=True):
            room = self._spare(seen)
            if not seen.load.only_here:
                room += max(others - own, 0)  # a lender's heartbeat may be newer than its debtor's
            rooms[instance_id] = room if seen.limit is None else min(room, seen.limit + self._came)
        return rooms

    def _heard(self, seen: _Seen, load: Load) -> None:
        before = self._free(seen), self._lends(seen)
        seen.load, seen.limit = load, None
        seen.latest = max(seen.latest, load.changes)
        seen.taken = [one for one in seen.taken if one.end is None or one.end > load.changes]
        for one in seen.taken:
            if one.change is not None and one.change <= load.changes:
                _tell(one)
        after = self._free(seen), self._lends(seen)
        self._came += max(0, after[0] - before[0], after[1] - before[1])

    def _free(self, seen: _Seen) -> int:
        """What it has itself."""
        free = seen.load.free_blocks + sum(one.told_here - _here(one) for one in seen.taken)
        if seen.limit is not None:
            free = min(free, seen.limit + self._came)
        return max(0, min(free, seen.load.total_blocks or free))

    def _spare(self, seen: _Seen) -> int:
        """Each sequence that is there is left a block to grow: else it soon borrows, or gives way."""
        return max(self._free(seen) - _sequences(seen), 0)

    def _lends(self, seen: _Seen) -> int:
        since = self._free(seen) - seen.load.free_blocks
        return max(0, min(seen.load.lendable_blocks + since, self._spare(seen)))

    def _forget(self, taken: Taken) -> _Seen | None:
        seen = self._seen.get(taken.instance_id)
        if seen is not None and taken in seen.taken:
            seen.taken.remove(taken)
        return seen


def _sequences(seen: _Seen) -> int:
    told = seen.load.running + seen.load.queued
    return max(told + sum((one.end is None) - one.told for one in seen.taken), 0)


def _here(taken: Taken) -> int:
    return taken.here if taken.end is None else 0


def _away(taken: Taken) -> int:
    return taken.away if taken.end is None else 0


def _tell(taken: Taken) -> None:
    """The last heartbeat counts it as it is now, but for a block that it has grown since, maybe."""
    taken.told, taken.told_here, taken.told_away = True, taken.here, taken.away
