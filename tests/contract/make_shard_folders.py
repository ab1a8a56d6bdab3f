"""Makes `tests/golden/shard-folders.json`: `python -m tests.contract.make_shard_folders`.

The folders of three stacks as shards write them, by the classes that serve, on real RocksDBs: views are put
in by hand, messages go from one shard to the other by a plain call, and a shard that does not hear does not
answer. The file is for whoever reads such folders once these classes are gone, and this script with them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rocksdict import Options, Rdict

from kvcommons.errors import SessionNotFound
from kvcommons.pb import kvstore_pb2
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView, session_key
from services.kvstore.families import META
from services.kvstore.folder import DataFolder
from services.kvstore.integrity import CHECKED_FAMILIES, open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.replica import Call, Replica, SessionWork, Sleep
from services.kvstore.session import TurnCommit
from services.kvstore.sessions import open_sessions
from services.kvstore.shard_sessions import ShardSessions

GOLDEN = Path(__file__).parents[1] / "golden" / "shard-folders.json"
LEASE_MS = 60_000


class Clock:
    """Goes on by a second with each change."""

    def __init__(self) -> None:
        self.time_ms = 1_750_000_000_000

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic_s(self) -> float:
        return self.time_ms / 1000


class Unheard(Exception):
    """Another shard did not acknowledge a change: nobody is told that it is done."""


class Stack:
    """Shards by their folders' names, and the last state of each session: a record, or None."""

    def __init__(self, root: Path, *folders: str) -> None:
        self.root = root
        self.clock = Clock()
        self.epoch = 0
        self.view = ShardView(epoch=0, serving=())
        self.names = {folder: f"{folder}.{number:08x}" for number, folder in enumerate(folders, 1)}
        self.sessions: dict[str, ShardSessions] = {}
        self.replicas: dict[str, Replica] = {}
        self._closing: list[Callable[[], None]] = []
        for folder, name in self.names.items():
            self.sessions[name] = self._open(root / folder, folder, name)
            self.replicas[name] = Replica(self.sessions[name])
        self.deaf: set[str] = set()  # names of shards that do not answer
        self.last: dict[tuple[str, str], kvstore_pb2.SessionRecord | None] = {}

    def _open(self, root: Path, folder: str, name: str) -> ShardSessions:
        """As the kvstore's `__main__` does."""
        data = DataFolder(root)
        mark = Mark(data.mark)
        table = open_integrity_table(
            open_sessions(data.sessions), CHECKED_FAMILIES, meta=META, path=data.sessions
        )
        table.begin(mark)
        sessions = ShardSessions(
            table, folder=folder, default_ttl_s=0, clock=self.clock, draw=lambda: name.rpartition(".")[2]
        )
        self._closing += [sessions.close, mark.close, data.close]
        return sessions

    def close(self) -> None:
        for close in self._closing:
            close()

    # ---- views

    def serve(self, *folders: str, joining: tuple[str, ...] = (), copied: bool = True) -> None:
        """The next view. Where others join, or second copies have to be made anew, these are made, and one
        more view comes after that; not if they are not `copied` yet."""
        old = tuple(self.names[folder] for folder in folders)
        new = tuple(self.names[folder] for folder in joining)
        settled = bool(new) or len(old) == 1
        self._adopt(old, new, settled=settled)
        if not copied:
            return
        for name in old:
            self._run(self.replicas[name].synchronise())
        if new or not settled:
            self._adopt((*old, *new), (), settled=True)

    def _adopt(self, serving: tuple[str, ...], joining: tuple[str, ...], *, settled: bool) -> None:
        self.epoch += 1
        self.view = ShardView(
            epoch=self.epoch, serving=serving, joining=joining, settled=settled, stack="golden"
        )
        for name in self.view.members:
            self._run(self.replicas[name].adopt(self.view))

    # ---- what a router asks

    def named(self, prefix: str, home: str, second: str = "", tenant: str = "alice") -> str:
        """The first session id of this prefix whose home is in a folder, and whose second copy in another."""
        wanted = [self.names[folder] for folder in (home, second) if folder]
        for number in range(10_000):
            session_id = f"{prefix}-{number}"
            holders = self.view.holders(session_key(tenant, session_id))
            if list(holders[: len(wanted)]) == wanted:
                return session_id
        raise AssertionError(prefix)

    def create(self, session_id: str, ttl_s: int = 0, tenant: str = "alice") -> None:
        self._do(tenant, session_id, lambda sessions: sessions.create(tenant, session_id, ttl_s))

    def begin(self, session_id: str, turn_id: str, tenant: str = "alice") -> tuple[Any, Any]:
        return self._do(
            tenant,
            session_id,
            lambda sessions: sessions.begin(
                tenant, session_id, turn_id=turn_id, owner="router", lease_ms=LEASE_MS
            ),
        )

    def turn(
        self,
        session_id: str,
        tokens: list[int],
        blocks: str = "",
        dropped: int = 0,
        tenant: str = "alice",
    ) -> None:
        """`blocks`: a letter for each full block of the context after the turn."""
        begun = self.begin(session_id, f"turn-{self.clock.time_ms}", tenant)
        self.commit(session_id, begun, tokens, blocks, dropped, tenant)

    def commit(
        self,
        session_id: str,
        begun: tuple[Any, Any],
        tokens: list[int],
        blocks: str = "",
        dropped: int = 0,
        tenant: str = "alice",
    ) -> None:
        record, lease = begun
        turn = TurnCommit(
            turn_id=lease.turn_id,
            fencing=lease.fencing,
            expected_version=record.version,
            model=b"m" * 32,
            model_name="demo",
            new_tokens=tokens,
            new_messages=[
                kvstore_pb2.Message(role="user", content=f"{len(tokens)} from {tokens[0]}"),
                kvstore_pb2.Message(role="assistant", content="Ja, gérn."),
            ],
            block_ids=[letter.encode() * 32 for letter in blocks],
            new_truncations=[
                kvstore_pb2.TruncationRecord(at_token=8, kept_head_tokens=2, dropped_tokens=dropped)
            ]
            if dropped
            else [],
        )
        self._do(tenant, session_id, lambda sessions: sessions.commit(tenant, session_id, turn))

    def fork(self, session_id: str, new_id: str) -> None:
        """As a router does where the fork's home is elsewhere."""
        source = self.last["alice", session_id]
        assert source is not None
        self._do("alice", new_id, lambda sessions: sessions.fork_of(source, new_id))

    def delete(self, session_id: str) -> None:
        self._do("alice", session_id, lambda sessions: sessions.delete("alice", session_id))

    def _do(self, tenant: str, session_id: str, work: Callable[[ShardSessions], Any]) -> Any:
        self.clock.time_ms += 1000
        key = session_key(tenant, session_id)
        home = self.view.home(key)
        sessions, replica = self.sessions[home], self.replicas[home]
        try:
            return self._run(replica.operate(key, lambda: work(sessions)))
        finally:
            try:
                self.last[tenant, session_id] = sessions.get(tenant, session_id)
            except SessionNotFound:
                self.last[tenant, session_id] = None

    def _run(self, steps: Generator[Any, Any, Any]) -> Any:
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
                    if pauses > 3:
                        steps.close()
                        raise Unheard

    def _ask(self, name: str, request: Any) -> Any:
        if name in self.deaf:
            return None
        request = type(request).FromString(request.SerializeToString())  # it is the receiver's
        replica = self.replicas[name]
        if isinstance(request, pb.CompareRequest):
            return self._run(replica.compared(request))
        return self._run(replica.receive(request))

    # ---- the file

    def dump(self) -> dict[str, Any]:
        """After `close`."""
        return {
            "folders": {folder: _dumped(self.root / folder) for folder in self.names},
            "sessions": [
                {
                    "tenant": tenant,
                    "session_id": session_id,
                    "version": record.version,
                    "tokens": len(record.tokens),
                    "record": record.SerializeToString(deterministic=True).hex(),
                }
                for (tenant, session_id), record in sorted(self.last.items())
                if record is not None
            ],
            "gone": [list(key) for key, record in sorted(self.last.items()) if record is None],
        }


def _dumped(folder: Path) -> dict[str, Any]:
    """The rows of each family, keys and values in hexadecimal, and the small files beside the database."""
    path = str(folder / "sessions")
    options = Options(raw_mode=True)
    families = [family for family in Rdict.list_cf(path, options) if family != "default"]
    table = Rdict(path, options, {family: Options(raw_mode=True) for family in families})
    rows = {
        family: {key.hex(): value.hex() for key, value in table.get_column_family(family).items()}
        for family in sorted(families)
    }
    table.close()
    files = {name: (folder / name).read_text() for name in ("format", "sessions.mark")}
    return {"files": files, "families": rows}


def alone(root: Path) -> Stack:
    """One kvstore that never had company: no stamps."""
    stack = Stack(root, "kvstore")
    stack.serve("kvstore")
    stack.turn("letters", [1, 2, 300, 70_000], "ab")
    stack.turn("letters", [5, 6], "abc")
    stack.fork("letters", "letters-again")
    stack.turn("letters-again", [7], "abc")
    stack.turn("deleted", [8], "d")
    stack.delete("deleted")
    stack.create("nothing yet", ttl_s=60)
    stack.begin("begun only", "a turn that never ended")
    stack.turn("letters", [9], tenant="bürgerin")
    return stack


def two(root: Path) -> Stack:
    """One kvstore, then two, then the first one alone while the second is away."""
    stack = Stack(root, "kvstore", "kvstore-2")
    stack.serve("kvstore")
    for session_id in ("before", "before, changed later", "before, deleted later"):
        stack.turn(session_id, [1, 2, 3], "x")
    stack.serve("kvstore", joining=("kvstore-2",))
    mine, other = stack.named("first", "kvstore"), stack.named("second", "kvstore-2")
    for session_id in (mine, other, "before, changed later"):
        stack.turn(session_id, list(range(40)), "abcd")
        stack.turn(session_id, [40, 41, 42, 43], "xbc", dropped=4)
    stack.delete("before, deleted later")
    stack.fork(mine, stack.named("fork", "kvstore-2"))
    stack.create(stack.named("created", "kvstore-2"), ttl_s=1)  # expires
    stack.begin(stack.named("begun", "kvstore-2"), "a turn that never ended")  # its lease runs out
    deleted = stack.named("deleted", "kvstore-2")
    stack.turn(deleted, [1], "d")
    stack.delete(deleted)
    stack.turn(deleted, [2, 2], "e")  # another session of the same name, with the same version
    behind = [stack.named(f"deleted behind the back of {whose}", whose) for whose in stack.names]
    unheard = [stack.named(f"unheard of by {whose}", whose) for whose in stack.names]
    replaced = stack.named("replaced", "kvstore-2")
    for session_id in (*behind, *unheard, replaced):
        stack.turn(session_id, [1, 2], "f")
    begun = {session_id: stack.begin(session_id, "unheard") for session_id in (*unheard, replaced)}
    # From here on the two do not hear each other. What a shard alone has is newer all the same, until its
    # successor changes the session.
    stack.deaf = set(stack.names.values())
    for session_id in (*unheard, replaced):
        with suppress(Unheard):
            stack.commit(session_id, begun[session_id], [7, 8], "fh")
            raise AssertionError("it was heard")
    stack.clock.time_ms += 10 * LEASE_MS
    stack.serve("kvstore")
    for session_id in (*behind, replaced):
        stack.turn(session_id, [3, 4], "fg")
    for session_id in behind:
        stack.delete(session_id)
    stack.turn(mine, [50], "xbcz")
    stack.turn("only at the survivor", [1, 2, 3])
    return stack


def three(root: Path) -> Stack:
    """Two kvstores, then three: one has copies that it does not keep up any more. Then one is away, and the
    others did not come to make second copies of what it had."""
    stack = Stack(root, "kvstore", "kvstore-2", "kvstore-3")
    stack.serve("kvstore", joining=("kvstore-2",))
    ids = [f"s-{number}" for number in range(12)]
    for number, session_id in enumerate(ids):
        stack.turn(session_id, [number] * 4, "p")
    stack.serve("kvstore", "kvstore-2", joining=("kvstore-3",))
    strays = [
        session_id
        for session_id in ids
        if stack.names["kvstore-3"] in stack.view.holders(session_key("alice", session_id))
    ]
    assert 3 < len(strays) < 12
    for number, session_id in enumerate(strays[1:]):
        stack.turn(session_id, [100 + number] * 3, "pq")
    stack.delete(strays[-1])
    stack.deaf = {stack.names["kvstore"]}
    stack.serve("kvstore-2", "kvstore-3", copied=False)
    stack.turn(strays[1], [200], "pqr")
    stack.turn("at the end", [1, 2, 3])
    return stack


def main() -> None:
    stacks = {}
    for make in (alone, two, three):
        with tempfile.TemporaryDirectory() as folder:
            stack = make(Path(folder))
            stack.close()
            stacks[make.__name__] = {"about": " ".join((make.__doc__ or "").split()), **stack.dump()}
    GOLDEN.write_text(json.dumps(stacks, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
