"""What one replica knows of the instances: heartbeats that it heard itself, and what etcd holds. No I/O.

Events come in (a heartbeat, a leave, a listing or a change of etcd); out come a view of who is there and the
writes that etcd needs. A heartbeat heard here counts at once, so neither a view nor a heartbeat waits for
etcd; what etcd holds brings the other replicas' instances. All times are seconds of one monotonic clock,
passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvcommons.pb import ledger_pb2 as pb


class Change(Enum):
    NOTHING = 0
    LOAD = 1  # free blocks and the like
    MEMBERS = 2  # who is there, where, and whether ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write the record under the instance's lease, granting the lease where it is not."""

    instance: pb.Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Revoke the lease: the record goes with it."""

    instance_id: str


Write = Put | KeepAlive | Remove


@dataclass(slots=True)
class _Heartbeat:
    instance: pb.Instance
    at: float
    renewed_at: float | None = None  # when the lease was last kept alive
    gone_at: float | None = None  # when etcd lost it: it left elsewhere, or its lease ran out

    @property
    def counts(self) -> bool:
        """Only what is heard after a loss is a sign of life: it may have left through another replica."""
        return self.gone_at is None or self.at > self.gone_at


@dataclass(slots=True)
class _Stored:
    revision: int
    instance: pb.Instance


@dataclass(slots=True)
class _Left:
    started_ms: int
    at: float
    removed: bool = False


class Registry:
    def __init__(self, *, lease_s: float, heartbeat_s: float) -> None:
        self._lease_s = lease_s
        # An instance that has missed a heartbeat here may have moved to another replica.
        self._fresh_s = 1.5 * heartbeat_s
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._stored: dict[str, _Stored] = {}
        self._left: dict[str, _Left] = {}
        self._lost_at: float | None = None  # since when etcd has been out of reach
        # Instances that may live though an outage or a pause has cost them their lease: record, kept until.
        # They have the time of a lease again to be heard.
        self._doubtful: dict[str, tuple[pb.Instance, float]] = {}
        self._view: dict[str, pb.Instance] = {}
        self._now: float | None = None  # when anything last happened
        # This replica was paused itself and heard nobody meanwhile, or etcd was: who is gone now may live.
        self._doubts_until = -math.inf

    # What happened

    def heartbeat(self, instance: pb.Instance, now: float) -> None:
        """A heartbeat came in here. One that was under way while its instance left is late, and ignored."""
        self._tick(now)
        left = self._left.get(instance.id)
        if left is not None:
            if instance.started_ms <= left.started_ms:
                return
            del self._left[instance.id]
        known = self._heartbeats.get(instance.id)
        if known is None:
            self._heartbeats[instance.id] = _Heartbeat(instance, now)
        else:
            known.instance, known.at = instance, now

    def left(self, instance: pb.Instance, now: float) -> None:
        self._heartbeats.pop(instance.id, None)
        self._left[instance.id] = _Left(instance.started_ms, now)

    def listed(self, revision: int, instances: Mapping[str, tuple[int, pb.Instance]], now: float) -> None:
        """All that etcd held at `revision`: by id, the revision of the record and the record.

        An etcd that was paused wakes up to leases that have run out, or are about to: it ends some of them
        after this. Who lives is written again within a heartbeat by the replica that it talks to; until then
        its last record stays.
        """
        if self._lost_at is not None:
            self._doubts_until = now + self._lease_s
            self._doubtful = {
                name: (stored.instance, self._doubts_until)
                for name, stored in self._stored.items()
                if name not in instances
            }
        newer = {name: stored for name, stored in self._stored.items() if stored.revision > revision}
        self._stored = {name: _Stored(at, instance) for name, (at, instance) in instances.items()} | newer
        self._lost_at = None

    def put(self, revision: int, instance: pb.Instance) -> None:
        """etcd holds this record: a watch reported it, or this replica wrote it."""
        known = self._stored.get(instance.id)
        if known is None or known.revision < revision:
            self._stored[instance.id] = _Stored(revision, instance)

    def deleted(self, revision: int, instance_id: str, now: float) -> None:
        """etcd deleted the record: its instance left, or was not heard for the time of its lease."""
        known = self._stored.get(instance_id)
        if known is not None and known.revision < revision:
            self.lapsed(instance_id, now)

    def lost(self, now: float) -> None:
        """etcd is out of reach: what it held last stays, as far as nothing else is known."""
        if self._lost_at is None:
            self._lost_at = now

    def renewed(self, instance_id: str, now: float) -> None:
        """The lease was granted or kept alive."""
        if (known := self._heartbeats.get(instance_id)) is not None:
            known.renewed_at = now

    def lapsed(self, instance_id: str, now: float) -> None:
        """etcd does not know the lease any more: the record is gone, too.

        A replica that was paused has let the leases run out of those that talk to it. They are heard again
        within a heartbeat; until then their last records stay.
        """
        self._tick(now)
        stored = self._stored.pop(instance_id, None)
        if stored is not None and now < self._doubts_until:
            self._doubtful[instance_id] = (stored.instance, self._doubts_until)
        if (known := self._heartbeats.get(instance_id)) is not None:
            known.renewed_at, known.gone_at = None, now

    def removed(self, instance_id: str) -> None:
        self._stored.pop(instance_id, None)
        self._doubtful.pop(instance_id, None)
        if (left := self._left.get(instance_id)) is not None:
            left.removed = True

    # What follows

    def writes(self, now: float) -> list[Write]:
        """The writes that etcd still needs. Each is returned again until it is reported as done."""
        due: list[Write] = [Remove(instance_id=name) for name, left in self._left.items() if not left.removed]
        for name, heartbeat in self._heartbeats.items():
            if now - heartbeat.at >= self._fresh_s or not heartbeat.counts:
                continue  # silent: it may be dead, or another replica may know something newer
            stored = self._stored.get(name)
            if stored is None or stored.instance != heartbeat.instance:
                due.append(Put(instance=heartbeat.instance))
            if stored is not None and self._is_due(heartbeat, now):  # a put does not renew a lease
                due.append(KeepAlive(instance_id=name))
        return due

    def is_stored(self, instance_id: str) -> bool:
        """Whether etcd holds a record of it, as far as is known here."""
        return instance_id in self._stored

    def refresh(self, now: float) -> Change:
        """Makes the view anew; what is different in it. Called at least each second."""
        self._tick(now)
        self._forget(now)
        view = {name: instance for name, (instance, _) in self._doubtful.items()}
        view.update((name, stored.instance) for name, stored in self._stored.items())
        for name, heartbeat in self._heartbeats.items():
            silent_s = now - heartbeat.at
            if not heartbeat.counts:
                continue
            if silent_s < self._fresh_s or (name not in view and silent_s < self._lease_s):
                view[name] = heartbeat.instance
            elif self._lost_at is not None and silent_s >= self._lease_s and heartbeat.at > self._lost_at:
                # It came here while etcd was away, and then no more; etcd cannot tell that its lease ran out.
                view.pop(name, None)
        for name, left in self._left.items():
            if name in view and view[name].started_ms <= left.started_ms:
                del view[name]
        before, self._view = self._view, view
        return _change(before, view)

    def view(self) -> list[pb.Instance]:
        """As of the last refresh."""
        return list(self._view.values())

    def silent_s(self, now: float) -> dict[str, float]:
        """Since the last heartbeat of each instance that is heard here."""
        return {
            name: now - heartbeat.at
            for name, heartbeat in self._heartbeats.items()
            if name in self._view and heartbeat.counts
        }

    @property
    def instances(self) -> Mapping[str, pb.Instance]:
        """By id, as of the last refresh; a new mapping after each."""
        return self._view

    def find(self, instance_id: str) -> pb.Instance | None:
        """As of the last refresh."""
        return self._view.get(instance_id)

    def _tick(self, now: float) -> None:
        if self._now is not None and now - self._now >= self._lease_s / 2:
            self._doubts_until = now + self._lease_s
        self._now = now

    def _is_due(self, heartbeat: _Heartbeat, now: float) -> bool:
        """Whether to renew: early enough, and for a heartbeat that has come since the last time."""
        if heartbeat.renewed_at is None:
            return True
        return now - heartbeat.renewed_at >= self._lease_s / 4 and heartbeat.at > heartbeat.renewed_at

    def _forget(self, now: float) -> None:
        if self._lost_at is None:
            gone = [
                name for name, heartbeat in self._heartbeats.items() if now - heartbeat.at >= self._lease_s
            ]
            for name in gone:
                del self._heartbeats[name]
        self._doubtful = {
            name: (instance, until)
            for name, (instance, until) in self._doubtful.items()
            if now < until and name not in self._stored
        }
        # As long as a late heartbeat or a late word from etcd could bring it back.
        self._left = {
            name: left
            for name, left in self._left.items()
            if not left.removed or now - left.at < 2 * self._lease_s
        }


def _change(before: Mapping[str, pb.Instance], after: Mapping[str, pb.Instance]) -> Change:
    """Looks into those records only that are others than before: with a thousand instances this is most of
    what a refresh costs."""
    if before.keys() != after.keys():
        return Change.MEMBERS
    change = Change.NOTHING
    for name, one in after.items():
        other = before[name]
        if other is one or other == one:
            continue
        if _member(other) != _member(one):
            return Change.MEMBERS
        change = Change.LOAD
    return change


def _member(one: pb.Instance) -> tuple[str, str, str, int, bool]:
    return one.control_address, one.data_address, one.host, one.started_ms, one.load.ready
