"""The steps by which a shard keeps second copies, one by one."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import SessionNotFound, StoreUnavailable, WrongShard
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView, encode_view, session_key
from services.kvstore.replica import Call, Replica, SessionWork, Sleep
from services.kvstore.session import TurnCommit
from services.kvstore.sessions import open_sessions
from services.kvstore.shard_sessions import ShardSessions
from tests.unit.kvstore.test_stamps import StandingClock

NAMES = [f"s{number}" for number in range(60)]


class Bench:
    """Shards by their folders' names; what is called is heard by those that `hear`."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.sessions = {
            f"{name}.1": ShardSessions(
                open_sessions(folder / name),
                folder=name,
                default_ttl_s=0,
                clock=StandingClock(),
                draw=lambda: "1",
            )
            for name in names
        }
        self.replicas = {name: Replica(sessions) for name, sessions in self.sessions.items()}
        self.hear = set(self.replicas)
        self.sent: list[Any] = []
        self.pauses_max = 3

    def adopt(self, view: ShardView) -> None:
        for replica in self.replicas.values():
            self.run(replica.adopt(view))

    def run(self, steps: Generator[Any, Any, Any]) -> Any:
        """To its end. Raises TimeoutError where it pauses again and again."""
        value, error, pauses = None, None, 0
        while True:
            try:
                step = steps.throw(error) if error is not None else steps.send(value)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            match step:
                case SessionWork(work=work):
                    try:
                        value = work()
                    except Exception as raised:
                        error = raised
                case Call(requests=requests):
                    value = [self._ask(name, request) for name, request in requests]
                case Sleep():
                    pauses += 1
                    if pauses > self.pauses_max:
                        steps.close()
                        raise TimeoutError

    def _ask(self, name: str, request: Any) -> Any:
        if name not in self.hear:
            return None
        self.sent.append(request)
        request = type(request).FromString(request.SerializeToString())  # it is the receiver's
        replica = self.replicas[name]
        if isinstance(request, pb.CompareRequest):
            return self.run(replica.compared(request))
        return self.run(replica.receive(request))

    def turn(self, shard: str, name: str, number: int) -> None:
        sessions, replica = self.sessions[shard], self.replicas[shard]
        key = session_key("t", name)
        record, lease = self.run(
            replica.operate(
                key, lambda: sessions.begin("t", name, turn_id=f"{number}", owner="o", lease_ms=1000)
            )
        )
        turn = TurnCommit(
            turn_id=f"{number}",
            fencing=lease.fencing,
            expected_version=record.version,
            model=b"m",
            model_name="m",
            new_tokens=[number] * 100,
            new_messages=[],
            block_ids=[],
        )
        self.run(replica.operate(key, lambda: sessions.commit("t", name, turn)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    it = Bench(tmp_path, "a", "b")
    yield it
    for sessions in it.sessions.values():
        sessions.close()


ALONE = ShardView(epoch=1, serving=("a.1",))
JOINING = ShardView(epoch=2, serving=("a.1",), joining=("b.1",))
BOTH = ShardView(epoch=3, serving=("a.1", "b.1"))


def mine(view: ShardView, shard: str) -> str:
    return next(name for name in NAMES if view.home(session_key("t", name)) == shard)


def test_a_change_travels_as_what_was_added(bench: Bench) -> None:
    bench.adopt(BOTH)
    name = mine(BOTH, "a.1")
    bench.turn("a.1", name, 1)
    bench.sent.clear()
    bench.turn("a.1", name, 2)
    assert [len(request.states[0].record.tokens) for request in bench.sent] == [0, 100]
    assert all(request.states[0].kept_tokens == 100 for request in bench.sent)
    bench.run(bench.replicas["b.1"].adopt(ShardView(epoch=4, serving=("b.1",))))
    assert list(bench.sessions["b.1"].get("t", name).tokens) == [1] * 100 + [2] * 100


def test_nothing_is_said_before_the_other_has_it(bench: Bench) -> None:
    bench.adopt(BOTH)
    name = mine(BOTH, "a.1")
    bench.hear.remove("b.1")
    with pytest.raises(TimeoutError):
        bench.turn("a.1", name, 1)
    with pytest.raises(TimeoutError):  # what was not told is not shown either
        bench.run(
            bench.replicas["a.1"].operate(
                session_key("t", name), lambda: bench.sessions["a.1"].get("t", name)
            )
        )


def test_a_shard_that_was_left_out_learns_it_from_the_other(bench: Bench) -> None:
    bench.adopt(BOTH)
    name = mine(BOTH, "a.1")
    bench.turn("a.1", name, 1)
    bench.run(bench.replicas["b.1"].adopt(ShardView(epoch=4, serving=("b.1",))))
    key = session_key("t", name)
    read = bench.replicas["a.1"].operate(key, lambda: bench.sessions["a.1"].get("t", name))
    with pytest.raises(StoreUnavailable):
        bench.run(read)
    assert bench.replicas["a.1"].view == ShardView(epoch=4, serving=("b.1",))
    with pytest.raises(WrongShard):
        bench.run(bench.replicas["a.1"].operate(key, lambda: bench.sessions["a.1"].get("t", name)))


def test_a_joiner_holds_up_nobody_until_it_may_be_let_in(bench: Bench) -> None:
    bench.adopt(ALONE)
    bench.turn("a.1", "s", 1)
    bench.adopt(JOINING)
    bench.hear.remove("b.1")
    bench.turn("a.1", "s", 2)
    with pytest.raises(TimeoutError):
        bench.run(bench.replicas["a.1"].synchronise())
    assert bench.sessions["a.1"].synced_epoch != JOINING.epoch
    bench.hear.add("b.1")
    bench.run(bench.replicas["a.1"].synchronise())
    assert bench.sessions["a.1"].synced_epoch == JOINING.epoch
    bench.hear.remove("b.1")
    with pytest.raises(TimeoutError):  # the ledger may have let it in already
        bench.turn("a.1", "s", 3)
    again = Replica(bench.sessions["a.1"])  # nor does a restart forget that
    with pytest.raises(TimeoutError):
        bench.run(again.operate(session_key("t", "s"), lambda: bench.sessions["a.1"].get("t", "s")))


def test_a_change_that_was_replaced_meanwhile_is_not_called_done(bench: Bench) -> None:
    """It was made here and reached nobody; the shard was left out, came back, and is home again."""
    bench.adopt(BOTH)
    name = mine(BOTH, "a.1")
    sessions, replica = bench.sessions["a.1"], bench.replicas["a.1"]
    steps = replica.operate(session_key("t", name), lambda: sessions.create("t", name, 0))
    step = next(steps)
    while not isinstance(step, Call):
        assert isinstance(step, SessionWork)
        step = steps.send(step.work())
    bench.adopt(ShardView(epoch=4, serving=("b.1",)))
    bench.adopt(ShardView(epoch=5, serving=("b.1",), joining=("a.1",)))
    bench.run(bench.replicas["b.1"].synchronise())
    bench.adopt(ShardView(epoch=6, serving=("a.1", "b.1")))
    assert sessions.count == 0

    def go_on() -> Generator[Any, Any, Any]:
        value = [None]  # the call's answer never came
        try:
            while True:
                value = yield steps.send(value)
        except StopIteration as stop:
            return stop.value

    with pytest.raises(StoreUnavailable):
        bench.run(go_on())


def test_what_a_joiner_has_and_nobody_else_goes(bench: Bench) -> None:
    """Among it a session that was deleted so long ago that there is no tombstone."""
    bench.adopt(BOTH)
    name = mine(BOTH, "a.1")
    bench.turn("a.1", name, 1)
    bench.run(bench.replicas["a.1"].adopt(ShardView(epoch=4, serving=("a.1",))))
    key = session_key("t", name)
    bench.run(bench.replicas["a.1"].operate(key, lambda: bench.sessions["a.1"].delete("t", name)))
    bench.sessions["a.1"]._drop(key)
    bench.adopt(ShardView(epoch=5, serving=("a.1",), joining=("b.1",)))
    bench.run(bench.replicas["a.1"].synchronise())
    bench.run(bench.replicas["b.1"].adopt(ShardView(epoch=6, serving=("b.1",))))
    with pytest.raises(SessionNotFound):
        bench.sessions["b.1"].get("t", name)
    assert bench.sessions["b.1"].count == 0


def test_a_late_message_brings_nothing_back(bench: Bench) -> None:
    bench.adopt(BOTH)
    name = mine(BOTH, "a.1")
    bench.turn("a.1", name, 1)
    late = bench.sent[-1]
    key = session_key("t", name)
    bench.run(bench.replicas["a.1"].operate(key, lambda: bench.sessions["a.1"].delete("t", name)))
    assert not bench.run(bench.replicas["b.1"].receive(late)).HasField("view")
    assert bench.sessions["b.1"].count == 0
    bench.run(bench.replicas["b.1"].adopt(ShardView(epoch=4, serving=("b.1",))))
    assert bench.run(bench.replicas["b.1"].receive(late)).view == encode_view(
        ShardView(epoch=4, serving=("b.1",))
    )
    with pytest.raises(SessionNotFound):
        bench.sessions["b.1"].get("t", name)


def test_sessions_of_another_stack_follow_no_view_of_this_one(bench: Bench) -> None:
    bench.sessions["b.1"].create("t", "own", 0)
    bench.run(bench.replicas["b.1"].adopt(ALONE))
    assert bench.replicas["b.1"].view is None
    bench.run(bench.replicas["b.1"].adopt(ShardView(epoch=7, serving=("b.1",), stack="there")))
    bench.run(
        bench.replicas["b.1"].adopt(ShardView(epoch=9, serving=("a.1",), joining=("b.1",), stack="here"))
    )
    assert bench.replicas["b.1"].view == ShardView(epoch=7, serving=("b.1",), stack="there")
