"""How much room decode instances have, as far as this router can tell. Pure.

A heartbeat may be seconds old. What the router has dispatched to an instance since then is taken, and what it
knows to have ended since is free again. Decode numbers its reservations and ends and tells them to those who
asked, and a heartbeat has the number of the last one that it counts (`Load.changes`): so nothing is counted
twice, however late heartbeats are. What other routers do is known a heartbeat later.

These numbers are of one *epoch*, a life of the process: an instance that restarts under its old id begins at
0 again, and holds nothing of what was dispatched to it before.

The blocks of a prefix that several running sequences have in common are there once. They count with the
sequence that came first and, when that one ends, with another that has them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcommons.pb.ledger_pb2 import Instance, Load

_GONE_MAX = 8  # epochs of which a ledger that lags behind may still tell
_ENDED_MAX = 1000  # that no heartbeat has counted yet, of one instance: no ledger answers, or it hangs


@dataclass(slots=True, kw_only=True, eq=False)
class Taken:
    """What one sequence holds, in blocks: `here`, at its instance, and `away`, with those who lend to it."""

    instance_id: str
    here: int  # without what others that came earlier have as well
    away: int = 0
    prefix: Sequence[bytes] = ()  # identities of its prompt's full blocks; each stands for all before it
    shared: int = 0  # of the prefix, leading blocks that count with others
    computed: bool = False  # its prefix is there, for others to share
    epoch: int = 0  # of the instance, when it reserved
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
    gone: deque[int] = field(default_factory=lambda: deque(maxlen=_GONE_MAX))  # earlier epochs
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
            elif instance.load.epoch != seen.load.epoch:
                if instance.load.epoch not in seen.gone:
                    self._restarted(seen, instance.load)
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

    def take(self, instance_id: str, blocks: int, prefix: Sequence[bytes] = ()) -> Taken:
        """A sequence of `blocks`, of which `prefix` are its prompt's, is about to ask for room there."""
        shared = self.shared(instance_id, prefix)
        taken = Taken(
            instance_id=instance_id,
            here=max(blocks - shared, 0),
            prefix=prefix,
            shared=shared,
            came_before=self._came,
        )
        seen = self._seen.get(instance_id)
        if seen is not None:
            seen.taken.append(taken)
        return taken

    def shared(self, instance_id: str, prefix: Sequence[bytes]) -> int:
        """How many leading blocks of `prefix` running sequences of the instance have already."""
        seen = self._seen.get(instance_id)
        if seen is None or not prefix:
            return 0
        there = (one for one in seen.taken if one.computed and one.end is None)
        return max((_common(one.prefix, prefix) for one in there), default=0)

    def reserved(self, taken: Taken, *, change: int, here: int, away: int, epoch: int = 0) -> None:
        """It has got room; `change` is that reservation's number, in the instance's `epoch`."""
        taken.change, taken.here, taken.away = change, max(here - taken.shared, 0), away
        seen = self._seen.get(taken.instance_id)
        if seen is not None:
            taken.epoch = epoch if seen.load.epoch else 0
            if taken.epoch == seen.load.epoch:
                seen.latest = max(seen.latest, change)
                if change <= seen.load.changes:
                    _tell(taken)

    def grown(self, taken: Taken, blocks: int) -> None:
        """It generates, and has so many in all, more than before."""
        taken.here, taken.computed = max(blocks - taken.away - taken.shared, 0), True

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
        elif seen is not None and taken in seen.taken and taken.epoch != seen.load.epoch:
            taken.end = taken.finished or taken.change + 1  # of an epoch that no heartbeat has told of yet
        elif seen is not None and taken in seen.taken:
            self._pass_on(seen, taken)
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

    def _restarted(self, seen: _Seen, load: Load) -> None:
        """Another process has the instance's id now."""
        seen.gone.append(seen.load.epoch)
        # What has not reserved yet will do so there.
        seen.taken = [one for one in seen.taken if one.change is None or one.epoch == load.epoch]
        seen.latest = 0
        self._heard(seen, load)

    def _pass_on(self, seen: _Seen, ended: Taken) -> None:
        """What others have of an ended one's prefix does not come free: it counts with one of them now."""
        passed, heir = 0, None
        for one in seen.taken:
            if one is not ended and one.end is None:
                common = min(_common(one.prefix, ended.prefix), one.shared) - ended.shared
                if common > passed:
                    passed, heir = common, one
        if heir is not None:
            heir.shared -= passed
            heir.here += passed
            ended.here -= passed
            if ended.told:
                heir.told_here += passed
                ended.told_here -= passed

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


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading identities are equal. Each depends on all before it: from the first that differs, all
    do."""
    shortest = min(len(one), len(other))
    return bisect_left(range(shortest), True, key=lambda at: one[at] != other[at])


def _here(taken: Taken) -> int:
    return taken.here if taken.end is None else 0


def _away(taken: Taken) -> int:
    return taken.away if taken.end is None else 0


def _tell(taken: Taken) -> None:
    """The last heartbeat counts it as it is now, but for a block that it has grown since, maybe."""
    taken.told, taken.told_here, taken.told_away = True, taken.here, taken.away
