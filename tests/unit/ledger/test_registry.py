"""The registry, event by event, and under random schedules of two replicas around a model of etcd."""

from __future__ import annotations

import random

import pytest

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.registry import Change, KeepAlive, Put, Registry, Remove

LEASE_S = 5.0


def registry() -> Registry:
    return Registry(lease_s=LEASE_S, heartbeat_s=1.0)


def instance(name: str = "a", *, free: int = 0, ready: bool = True, started_ms: int = 1) -> pb.Instance:
    return pb.Instance(
        id=name,
        service="decode",
        control_address=f"unix:/{name}",
        load=pb.Load(free_blocks=free, ready=ready),
        started_ms=started_ms,
    )


def names(one: Registry, now: float) -> list[str]:
    one.refresh(now)
    return sorted(instance.id for instance in one.view())


def test_what_changed_is_told_apart() -> None:
    one = registry()
    assert one.refresh(0.0) is Change.NOTHING
    one.heartbeat(instance(free=1), 0.0)
    assert one.refresh(0.0) is Change.MEMBERS
    one.heartbeat(instance(free=1), 1.0)
    assert one.refresh(1.0) is Change.NOTHING
    one.heartbeat(instance(free=2), 2.0)
    assert one.refresh(2.0) is Change.LOAD
    one.heartbeat(instance(free=2, ready=False), 3.0)
    assert one.refresh(3.0) is Change.MEMBERS


def test_a_value_is_written_when_it_changed_and_else_the_lease_renewed() -> None:
    one = registry()
    one.listed(1, {}, 0.0)
    one.heartbeat(instance(free=1), 0.0)
    assert one.writes(0.0) == [Put(instance=instance(free=1))]
    assert one.writes(0.0) == [Put(instance=instance(free=1))]  # until it is done
    one.put(2, instance(free=1))
    assert one.writes(0.1) == [KeepAlive(instance_id="a")]
    one.renewed("a", 0.1)
    assert one.writes(0.2) == []
    one.heartbeat(instance(free=1), 1.0)
    assert one.writes(1.0) == []
    one.heartbeat(instance(free=2), 2.0)
    assert one.writes(2.0) == [Put(instance=instance(free=2)), KeepAlive(instance_id="a")]
    one.put(3, instance(free=2))
    one.put(2, instance(free=1))  # etcd's own word of the first put comes late
    one.renewed("a", 2.0)
    assert one.writes(2.1) == []


def test_a_silent_instance_is_neither_written_nor_renewed() -> None:
    one = registry()
    one.listed(1, {"a": (1, instance(free=1))}, 0.0)
    one.heartbeat(instance(free=1), 0.0)
    one.renewed("a", 0.0)
    assert one.writes(1.4) == []  # time to renew, and nothing has been heard since the last time
    assert one.writes(4.0) == []
    one.heartbeat(instance(free=1), 4.0)
    assert one.writes(4.0) == [KeepAlive(instance_id="a")]
    assert one.writes(5.6) == []
    for now in (6.0, 7.0, 8.0):
        assert names(one, now) == ["a"]  # etcd has it still
    one.deleted(7, "a", 9.0)
    assert names(one, 9.0) == []
    assert one.writes(9.0) == []


def test_news_of_another_replica_beat_what_was_heard_here_before() -> None:
    one = registry()
    one.listed(1, {}, 0.0)
    one.heartbeat(instance(free=1), 0.0)
    one.put(2, instance(free=9))
    one.refresh(1.0)
    assert one.view()[0].load.free_blocks == 1
    one.refresh(1.5)
    assert one.view()[0].load.free_blocks == 9


def test_leaving() -> None:
    one = registry()
    one.listed(1, {"a": (1, instance())}, 0.0)
    one.heartbeat(instance(), 0.0)
    one.left(instance(), 1.0)
    assert names(one, 1.0) == []
    assert one.writes(1.0) == [Remove(instance_id="a")]
    one.heartbeat(instance(), 1.1)  # a heartbeat that was under way
    one.put(2, instance())  # a put that was under way
    assert names(one, 1.2) == []
    one.removed("a")
    assert one.writes(1.3) == []
    one.put(2, instance())  # etcd's word of it, before that of the removal
    assert names(one, 1.4) == []
    one.heartbeat(instance(started_ms=2), 1.5)
    assert names(one, 1.5) == ["a"]
    assert one.writes(1.5)[0] == Put(instance=instance(started_ms=2))


def test_leaving_through_another_replica() -> None:
    one = registry()
    one.listed(1, {"a": (1, instance())}, 0.0)
    one.heartbeat(instance(), 0.0)
    one.deleted(2, "a", 0.5)
    assert names(one, 0.6) == []
    assert one.writes(0.6) == []
    one.heartbeat(instance(), 1.0)  # it lives after all: its lease ran out while etcd was paused
    assert names(one, 1.0) == ["a"]
    assert one.writes(1.0) == [Put(instance=instance())]


def test_a_pause_of_the_replica_costs_nobody_who_lives() -> None:
    one = registry()
    one.listed(1, {name: (1, instance(name)) for name in ("alive", "dead")}, 0.0)
    for name in ("alive", "dead"):
        one.heartbeat(instance(name), 0.0)
    assert names(one, 0.5) == ["alive", "dead"]
    # It is paused for longer than a lease, and wakes to deletions before it hears anybody.
    one.deleted(2, "alive", 7.0)
    one.deleted(3, "dead", 7.0)
    assert names(one, 7.0) == ["alive", "dead"]
    one.heartbeat(instance("alive"), 7.5)
    assert names(one, 8.0) == ["alive", "dead"]
    assert one.writes(8.0) == [Put(instance=instance("alive"))]
    one.heartbeat(instance("alive"), 11.0)
    assert names(one, 11.9) == ["alive", "dead"]
    assert names(one, 12.0) == ["alive"]


def test_an_outage_of_etcd_costs_nothing_that_is_known() -> None:
    one = registry()
    one.listed(1, {name: (1, instance(name)) for name in ("here", "late", "there", "quiet")}, 0.0)
    one.heartbeat(instance("here"), 0.0)
    one.lost(1.0)
    one.heartbeat(instance("quiet"), 2.0)
    for now in (2.0, 4.0, 6.0):
        one.heartbeat(instance("here"), now)
    assert names(one, 6.9) == ["here", "late", "quiet", "there"]
    # It beat here, and then no more: etcd is not needed to know.
    assert names(one, 7.0) == ["here", "late", "there"]
    # etcd wakes to leases that have run out. The one that beats elsewhere gets time to be written again.
    one.heartbeat(instance("here"), 8.0)
    one.listed(9, {"late": (1, instance("late"))}, 8.0)
    assert names(one, 8.0) == ["here", "late", "quiet", "there"]
    assert one.writes(8.0) == [Put(instance=instance("here"))]
    one.put(10, instance("here"))
    one.put(11, instance("there"))
    one.deleted(12, "late", 8.5)  # it ends this lease only now
    assert names(one, 8.5) == ["here", "late", "quiet", "there"]
    one.put(13, instance("late"))
    assert names(one, 13.0) == ["here", "late", "there"]


@pytest.mark.parametrize("seed", range(40))
def test_replicas_agree_with_the_truth_at_rest(seed: int) -> None:
    """Two replicas; instances beat at either, leave through either and die; etcd is lost at times, writes
    fail and words of it come late. Once all is quiet, both views are those who live."""
    rng = random.Random(seed)
    world = _World(rng)
    for _ in range(300):
        world.step()
    world.settle()
    alive = sorted(world.alive)
    for index, replica in enumerate(world.replicas):
        assert names(replica, world.now) == alive, f"seed {seed}, replica {index}"


class _World:
    """etcd as a map with leases and a history, seen by each replica up to some revision."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.replicas = [registry(), registry()]
        self.seen = [0, 0]
        self.up = True
        self.history: list[tuple[int, str, pb.Instance | None]] = []
        self.held: dict[str, tuple[int, pb.Instance, float]] = {}  # revision, record, lease's end
        self.alive: dict[str, int] = {}  # name: the replica it beats at
        self.next_name = 0
        for replica in self.replicas:
            replica.listed(0, {}, 0.0)

    def step(self, *, quiet: bool = False) -> None:
        self.now += 0.25
        if not quiet:
            self._surprise()
        for name, at in self.alive.items():
            if self.rng.random() < 0.4:
                self.replicas[at].heartbeat(
                    instance(name, free=0 if quiet else self.rng.randrange(3)), self.now
                )
        if not self.up:
            return
        for name in [name for name, (_, _, ends) in self.held.items() if ends <= self.now]:
            self._delete(name)
        for index, replica in enumerate(self.replicas):
            self._write(replica)
            if quiet or self.rng.random() < 0.7:
                self._tell(index, replica)

    def settle(self) -> None:
        if not self.up:
            self._up()
        for _ in range(80):
            self.step(quiet=True)

    def _surprise(self) -> None:
        match self.rng.randrange(12):
            case 0 | 1:
                self.alive[f"i{self.next_name}"] = self.rng.randrange(2)
                self.next_name += 1
            case 2 if self.alive:
                del self.alive[self.rng.choice(sorted(self.alive))]  # dies
            case 3 if self.alive:
                name = self.rng.choice(sorted(self.alive))
                del self.alive[name]
                self.replicas[self.rng.randrange(2)].left(instance(name), self.now)
            case 4 if self.alive:
                self.alive[self.rng.choice(sorted(self.alive))] = self.rng.randrange(2)  # moves
            case 5 if self.up and self.rng.random() < 0.3:
                self.up = False
                for replica in self.replicas:
                    replica.lost(self.now)
            case 6 if not self.up:
                self._up()

    def _up(self) -> None:
        self.up = True
        for name in [name for name, (_, _, ends) in self.held.items() if ends <= self.now]:
            self._delete(name)
        for index, replica in enumerate(self.replicas):
            listing = {name: (revision, record) for name, (revision, record, _) in self.held.items()}
            replica.listed(len(self.history), listing, self.now)
            self.seen[index] = len(self.history)

    def _write(self, replica: Registry) -> None:
        for write in replica.writes(self.now):
            if self.rng.random() < 0.1:
                continue  # fails
            match write:
                case Put(instance=record):
                    revision = len(self.history) + 1
                    ends = self.held[record.id][2] if record.id in self.held else self.now + LEASE_S
                    self.history.append((revision, record.id, record))
                    self.held[record.id] = (revision, record, ends)
                    replica.put(revision, record)
                case KeepAlive(instance_id=name):
                    if name in self.held:
                        revision, record, _ = self.held[name]
                        self.held[name] = (revision, record, self.now + LEASE_S)
                        replica.renewed(name, self.now)
                    else:
                        replica.lapsed(name, self.now)
                case Remove(instance_id=name):
                    if name in self.held:
                        self._delete(name)
                    replica.removed(name)

    def _tell(self, index: int, replica: Registry) -> None:
        for revision, name, record in self.history[self.seen[index] :]:
            if record is None:
                replica.deleted(revision, name, self.now)
            else:
                replica.put(revision, record)
        self.seen[index] = len(self.history)

    def _delete(self, name: str) -> None:
        del self.held[name]
        self.history.append((len(self.history) + 1, name, None))
