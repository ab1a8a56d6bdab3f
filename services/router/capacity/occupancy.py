"""How many blocks decode instances have free, as far as this router can tell. Pure.

A heartbeat may be seconds old. The router therefore subtracts what it has dispatched to an instance since
then, and adds what it knows to have ended since. Decode numbers its reservations and ends (`change`) and
returns the number to the router that asked; a heartbeat carries the number of the last one that it counts
(`Load.changes`). So nothing is counted twice, however late heartbeats are. What other routers do becomes
known with the next heartbeat.

The numbers are of one *epoch*, which is one life of the process: an instance that restarts under its old id
begins at 0 again, and holds nothing of what was dispatched to it before.

The blocks of a prefix that several running sequences have in common lie in memory once. They count with the
sequence that came first and, when that one ends, with another one that has them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcommons.pb.ledger_pb2 import Instance, Load

_FORMER_EPOCHS_MAX = 8  # a ledger that lags behind may still report them
# Ended reservations of one instance that no heartbeat has counted yet: more come while no ledger answers.
_ENDED_MAX = 1000


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """The blocks of one sequence: `local` ones at its instance, and `remote` ones at those who lend to it."""

    instance_id: str
    local: int  # without those that count with sequences that came earlier
    remote: int = 0
    prefix: Sequence[bytes] = ()  # identities of its prompt's full blocks; each stands for all before it
    shared_blocks: int = 0  # leading blocks of the prefix that count with others
    computed: bool = False  # the KV of its prefix is there, for others to share
    epoch: int = 0  # of the instance, when it reserved
    change: int | None = None  # number of the reservation; None: decode has not confirmed it yet
    end: int | None = None  # number of its end
    reported_end: int = 0  # the same, as decode reported it
    counted_local: int = 0  # of `local`, what the instance's last heartbeat counts
    counted_remote: int = 0
    counted: bool = False
    freed_before: int = 0  # blocks that had come free in all when it was made


@dataclass(slots=True, kw_only=True)
class _InstanceState:
    """One decode instance."""

    load: Load
    reservations: list[Reservation] = field(default_factory=list)
    latest_change: int = 0  # the highest number that was seen
    former_epochs: deque[int] = field(default_factory=lambda: deque(maxlen=_FORMER_EPOCHS_MAX))
    # After a refusal: the largest sequence that fits, less the blocks that had come free in all until then.
    limit: int | None = None


class Occupancy:
    """Free blocks, from heartbeats and from what this router dispatches. Belongs to the event loop."""

    def __init__(self) -> None:
        self._states: dict[str, _InstanceState] = {}
        self._lendable: dict[str, int] = {}  # of pools, by their last heartbeats
        self._freed = 0  # blocks that have come free anywhere, in all

    def update(self, decodes: Sequence[Instance], pools: Iterable[Instance] = ()) -> None:
        """Takes in all decode instances and attention pools as their last heartbeats describe them."""
        for instance in decodes:
            state = self._states.get(instance.id)
            if state is None:
                self._states[instance.id] = _InstanceState(
                    load=instance.load, latest_change=instance.load.changes
                )
                self._freed += instance.load.free_blocks
            elif instance.load.epoch != state.load.epoch:
                if instance.load.epoch not in state.former_epochs:
                    self._restarted(state, instance.load)
            elif state.load.changes <= instance.load.changes and state.load != instance.load:
                # Else the heartbeat comes from a ledger that lags behind another one.
                self._update(state, instance.load)
        ids = {instance.id for instance in decodes}
        for instance_id in self._states.keys() - ids:
            if all(one.end is not None for one in self._states[instance_id].reservations):
                del self._states[instance_id]
        lendable = {one.id: one.load.lendable_blocks for one in pools}
        self._freed += sum(max(blocks - self._lendable.get(name, 0), 0) for name, blocks in lendable.items())
        self._lendable = lendable

    def reserve(self, instance_id: str, blocks: int, prefix: Sequence[bytes] = ()) -> Reservation:
        """Reserves `blocks` for a sequence that is about to ask the instance for them; `prefix` has the
        identities of its prompt's blocks."""
        shared_blocks = self.shared_blocks(instance_id, prefix)
        reservation = Reservation(
            instance_id=instance_id,
            local=max(blocks - shared_blocks, 0),
            prefix=prefix,
            shared_blocks=shared_blocks,
            freed_before=self._freed,
        )
        state = self._states.get(instance_id)
        if state is not None:
            state.reservations.append(reservation)
        return reservation

    def shared_blocks(self, instance_id: str, prefix: Sequence[bytes]) -> int:
        """How many leading blocks of `prefix` running sequences of the instance have already."""
        state = self._states.get(instance_id)
        if state is None or not prefix:
            return 0
        there = (one for one in state.reservations if one.computed and one.end is None)
        return max((_common_blocks(one.prefix, prefix) for one in there), default=0)

    def confirm(
        self, reservation: Reservation, *, change: int, local: int, remote: int, epoch: int = 0
    ) -> None:
        """Decode granted the reservation, as number `change` of its `epoch`."""
        reservation.change, reservation.local, reservation.remote = (
            change,
            max(local - reservation.shared_blocks, 0),
            remote,
        )
        state = self._states.get(reservation.instance_id)
        if state is not None:
            reservation.epoch = epoch if state.load.epoch else 0
            if reservation.epoch == state.load.epoch:
                state.latest_change = max(state.latest_change, change)
                if change <= state.load.changes:
                    _count(reservation)

    def grow(self, reservation: Reservation, blocks: int) -> None:
        """The sequence generates, and has `blocks` in all by now."""
        reservation.local, reservation.computed = (
            max(blocks - reservation.remote - reservation.shared_blocks, 0),
            True,
        )

    def refuse(self, reservation: Reservation, blocks: int) -> None:
        """Decode had no room for `blocks`. Until the instance's next heartbeat it counts as having fewer
        free, apart from what has come free since the reservation was made."""
        state = self._forget(reservation)
        if state is not None:
            state.limit = blocks - 1 - reservation.freed_before

    def end(self, reservation: Reservation) -> None:
        """The sequence holds nothing any more."""
        state = self._states.get(reservation.instance_id)
        if not reservation.change:  # never granted, or decode does not number what it does
            self._forget(reservation)
        elif (
            state is not None and reservation in state.reservations and reservation.epoch != state.load.epoch
        ):
            reservation.end = (
                reservation.reported_end or reservation.change + 1
            )  # its epoch has sent no heartbeat yet
        elif state is not None and reservation in state.reservations:
            self._pass_on_shared(state, reservation)
            # A cancelled call has no answer: its end has one of the numbers that are still to come.
            reservation.end = reservation.reported_end or state.latest_change + 1
            state.latest_change = max(state.latest_change, reservation.end)
            self._freed += reservation.local + reservation.remote
            if reservation.end <= state.load.changes:
                self._forget(reservation)
            end = [one for one in state.reservations if one.end is not None]
            for one in end[: max(len(end) - _ENDED_MAX, 0)]:
                state.reservations.remove(one)

    def projected(self, instance: Instance) -> Instance:
        """A decode instance with `free_blocks` and `running` as they likely are by now."""
        state = self._states.get(instance.id)
        if state is None:
            return instance
        if not state.reservations and state.limit is None and state.load.changes == instance.load.changes:
            return instance
        found = Instance()
        found.CopyFrom(instance)
        found.load.free_blocks = self._free(state)
        found.load.running, found.load.queued = _sequences(state), 0
        return found

    def largest_free(self, decodes: Sequence[Instance], pools: Iterable[Instance]) -> int | None:
        """Blocks of the largest sequence that likely fits now, borrowed blocks included; None where there is
        no instance. All instances are of one model."""
        return max(self.free_blocks(decodes, pools).values(), default=None)

    def free_blocks(self, decodes: Sequence[Instance], pools: Iterable[Instance]) -> dict[str, int]:
        """The same for each decode instance of which a heartbeat has come, by its id."""
        occupancy: dict[str, int] = {}
        ids = [instance.id for instance in decodes if instance.id in self._states]
        known = [self._states[instance_id] for instance_id in ids]
        lendable = [self._lendable_now(state) for state in known]
        # Blocks at lenders that the lenders' heartbeats do not count yet, or count still.
        remote = sum(one.counted_remote - _remote_now(one) for state in known for one in state.reservations)
        # The parts of a head group have the same blocks, a share of the heads each.
        pooled = sum(one.load.lendable_blocks for one in pools if not one.heads.number)
        promised = sum(state.load.promised_blocks for state in known)
        others = sum(lendable) + pooled + remote - promised
        for instance_id, state, own in zip(ids, known, lendable, strict=True):
            blocks = self._unclaimed(state)
            if not state.load.only_here:
                blocks += max(others - own, 0)  # a lender's heartbeat may be newer than its debtor's
            occupancy[instance_id] = blocks if state.limit is None else min(blocks, state.limit + self._freed)
        return occupancy

    def _update(self, state: _InstanceState, load: Load) -> None:
        before = self._free(state), self._lendable_now(state)
        state.load, state.limit = load, None
        state.latest_change = max(state.latest_change, load.changes)
        state.reservations = [one for one in state.reservations if one.end is None or one.end > load.changes]
        for one in state.reservations:
            if one.change is not None and one.change <= load.changes:
                _count(one)
        after = self._free(state), self._lendable_now(state)
        self._freed += max(0, after[0] - before[0], after[1] - before[1])

    def _restarted(self, state: _InstanceState, load: Load) -> None:
        """Another process has the instance's id by now."""
        state.former_epochs.append(state.load.epoch)
        # What is not confirmed yet will be reserved at the new process.
        state.reservations = [
            one for one in state.reservations if one.change is None or one.epoch == load.epoch
        ]
        state.latest_change = 0
        self._update(state, load)

    def _pass_on_shared(self, state: _InstanceState, end: Reservation) -> None:
        """Blocks of an ended sequence's prefix that others share do not come free: they count with one of
        those from now on."""
        passed, heir = 0, None
        for one in state.reservations:
            if one is not end and one.end is None:
                common = min(_common_blocks(one.prefix, end.prefix), one.shared_blocks) - end.shared_blocks
                if common > passed:
                    passed, heir = common, one
        if heir is not None:
            heir.shared_blocks -= passed
            heir.local += passed
            end.local -= passed
            if end.counted:
                heir.counted_local += passed
                end.counted_local -= passed

    def _free(self, state: _InstanceState) -> int:
        """Blocks that are free at the instance itself."""
        free = state.load.free_blocks + sum(one.counted_local - _local_now(one) for one in state.reservations)
        if state.limit is not None:
            free = min(free, state.limit + self._freed)
        return max(0, min(free, state.load.total_blocks or free))

    def _unclaimed(self, state: _InstanceState) -> int:
        """Free blocks, less one for each running sequence to grow: without it a sequence would soon borrow or
        be preempted."""
        return max(self._free(state) - _sequences(state), 0)

    def _lendable_now(self, state: _InstanceState) -> int:
        since = self._free(state) - state.load.free_blocks
        return max(0, min(state.load.lendable_blocks + since, self._unclaimed(state)))

    def _forget(self, reservation: Reservation) -> _InstanceState | None:
        state = self._states.get(reservation.instance_id)
        if state is not None and reservation in state.reservations:
            state.reservations.remove(reservation)
        return state


def _sequences(state: _InstanceState) -> int:
    counted = state.load.running + state.load.queued
    return max(counted + sum((one.end is None) - one.counted for one in state.reservations), 0)


def _common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading identities are equal. Each depends on all before it: from the first that differs, all
    do."""
    shortest = min(len(one), len(other))
    return bisect_left(range(shortest), True, key=lambda at: one[at] != other[at])


def _local_now(reservation: Reservation) -> int:
    return reservation.local if reservation.end is None else 0


def _remote_now(reservation: Reservation) -> int:
    return reservation.remote if reservation.end is None else 0


def _count(reservation: Reservation) -> None:
    """Marks that the last heartbeat counts the reservation as it is now, but for a block that the sequence
    may have grown since."""
    reservation.counted, reservation.counted_local, reservation.counted_remote = (
        True,
        reservation.local,
        reservation.remote,
    )
