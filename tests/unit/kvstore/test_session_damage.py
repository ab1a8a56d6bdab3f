"""Each file of the sessions' database damaged in each way: the store starts with every turn, or says that it
does not and what to do. Real RocksDB; the image that is damaged is what a kill -9 would leave."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from rocksdict import Rdict

from kvcommons.errors import DataLoss, SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.clock import SystemClock
from services.kvstore.families import HEADS, META, RECORDS, STAMPS
from services.kvstore.folder import UnknownFormat
from services.kvstore.integrity import open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.session import TurnBegin, TurnCommit
from services.kvstore.sessions import Sessions, open_sessions

# RocksDB makes families in an order of its own, another each time: what a cut manifest forgets depends on it.
ORDERS = {"records last": ("meta", "records"), "records first": ("records", "meta")}
Found = dict[str, tuple[int, list[int]]]  # version and tokens of each session


class Store:
    """The sessions of a data folder, as the service opens them."""

    def __init__(self, root: Path) -> None:
        self.mark = Mark(root / "sessions.mark")
        path = root / "sessions"
        self.table = open_integrity_table(open_sessions(path), path)
        try:
            self.table.begin(self.mark)
            self.sessions = Sessions(self.table, default_ttl_s=0, clock=SystemClock())
        except Exception:
            self.table.close()
            raise

    def commit(self, session: str, number: int) -> None:
        turn_id = f"{session} {number}"
        wanted = TurnBegin(turn_id=turn_id, owner="o", lease_ms=60_000)
        begun = self.sessions.begin("t", session, wanted)
        record, lease = begun.record, begun.lease
        turn = TurnCommit(
            turn_id=turn_id,
            fencing=lease.fencing,
            expected_version=record.version,
            model=b"m",
            model_name="m",
            new_tokens=[number] * 40,
            new_messages=[pb.Message(role="user", content="x" * 100)],
            block_ids=[bytes([number]) * 32],
        )
        self.sessions.commit("t", session, turn)

    def found(self, names: str) -> Found:
        found = {}
        for name in names:
            try:
                record = self.sessions.get("t", name)
            except SessionNotFound:
                continue
            found[name] = (record.version, list(record.tokens))
        return found

    def close(self) -> None:
        self.sessions.close()
        self.mark.close()


def fresh(folder: Path, order: tuple[str, str]) -> Store:
    """Opened for the first time, its families in this order in the manifest."""
    while True:
        folder.mkdir(parents=True)
        store = Store(folder)
        made = Rdict.list_cf(str(folder / "sessions"))
        if made.index(order[0]) < made.index(order[1]):
            return store
        store.close()
        shutil.rmtree(folder)


def image(root: Path, order: tuple[str, str], *, with_tables: bool) -> tuple[Path, Found]:
    """A folder as a kill leaves it, and what was committed in it."""
    store = fresh(root / "data", order)
    for number in range(3):
        store.commit("a", number)
        store.commit("b", number)
    if with_tables:  # closing writes the tables, and opening begins a new log
        store.close()
        store = Store(root / "data")
        store.commit("b", 3)
    store.sessions.fork("t", "a", "c")
    store.sessions.delete("t", "b")
    store.commit("d", 4)
    store.commit("a", 5)
    shutil.copytree(root / "data", root / "image")
    found = store.found("abcd")
    store.close()
    assert found["a"][0] == 4
    assert set(found) == {"a", "c", "d"}
    return root / "image", found


def _flip(at: float, mask: int = 0x81) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = bytearray(path.read_bytes())
        if content:
            content[min(int(at * len(content)), len(content) - 1)] ^= mask
        path.write_bytes(content)

    return apply


def _cut(part: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(part * path.stat().st_size))


def _garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[::64] = bytes(byte ^ 0x15 for byte in content[::64])
    path.write_bytes(content)


def _zero(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + bytes(size - size // 2))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "garbled": _garble,
    "its end zero": _zero,
    **{f"cut at {part:.2f}": _cut(part) for part in (0.0, 0.4, 0.8, 0.97)},
    **{f"flipped at {at:.2f}": _flip(at) for at in (0.0, 0.3, 0.6, 0.9)},
}
# What RocksDB only writes to: LOG and the like.
SIDE_FILES = ("LOG", "LOCK", "IDENTITY")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a file system: hundreds of databases are opened, each with several syncs
    that no test here is about."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="kvc-", dir=memory))
    yield folder
    shutil.rmtree(folder)


def damaged(whole: Path, name: str, damage: Callable[[Path], None]) -> Iterator[Path]:
    copy = whole.with_name("damaged")
    shutil.copytree(whole, copy)
    damage(copy / "sessions" / name)
    yield copy
    shutil.rmtree(copy)


def refused(root: Path, expected: Found, what: str) -> bool:
    """Whether the store refused, with a word on what to do; else asserts that all is there."""
    try:
        store = Store(root)
    except DataLoss as error:
        message = error.message
    else:
        assert store.found("abcd") == expected, what
        store.close()
        return False
    assert "backup" in message, what
    assert str(root / "sessions") in message, what
    return True


def kind_of(name: str) -> str:
    """Without the number."""
    return name.strip("0123456789")


@pytest.mark.parametrize("with_tables", [False, True], ids=["in the log", "in tables too"])
@pytest.mark.parametrize("order", ORDERS)
def test_whatever_is_damaged_no_turn_is_lost_without_a_word(
    root: Path, order: str, with_tables: bool
) -> None:
    whole, expected = image(root, ORDERS[order], with_tables=with_tables)
    names = sorted(path.name for path in (whole / "sessions").iterdir() if path.stat().st_size)
    kinds = {kind_of(name) for name in names}
    assert {"CURRENT", "MANIFEST-", ".log"} <= kinds
    refusals = dict.fromkeys(kinds, 0)
    for name in names:
        hows = ["gone", "garbled"] if name.startswith(SIDE_FILES) else DAMAGES
        for how in hows:
            damage = DAMAGES[how]
            for copy in damaged(whole, name, damage):
                refusals[kind_of(name)] += refused(copy, expected, f"{name} {how}")
    # The test can fail only where damage matters.
    needed = {"CURRENT", "MANIFEST-", ".log", *({".sst"} if with_tables else ())}
    assert all(refusals[kind] > len(DAMAGES) // 3 for kind in needed), refusals
    assert not refused(whole, expected, "nothing damaged")


@pytest.mark.parametrize("order", ORDERS)
def test_a_manifest_cut_anywhere(root: Path, order: str) -> None:
    """Found as a store that answered 404 for a committed session: families that the manifest had lost were
    made anew, empty, while the one that said how far the sessions had come was there."""
    whole, expected = image(root, ORDERS[order], with_tables=False)
    (name,) = (path.name for path in (whole / "sessions").glob("MANIFEST-*"))
    size = (whole / "sessions" / name).stat().st_size
    refusals = 0
    for length in range(0, size, max(1, size // 30)):
        for copy in damaged(whole, name, lambda path, length=length: os.truncate(path, length)):
            refusals += refused(copy, expected, f"{name} cut to {length} of {size} bytes")
    assert refusals > 10


def test_the_database_is_gone_and_the_mark_remembers(root: Path) -> None:
    whole, expected = image(root, ORDERS["records first"], with_tables=True)
    shutil.rmtree(whole / "sessions")
    assert refused(whole, expected, "all gone")
    (whole / "sessions.mark").unlink()  # as the refusal says, for whoever wants to go on
    store = Store(whole)
    assert store.found("abcd") == {}
    store.commit("e", 1)
    store.close()
    again = Store(whole)
    assert set(again.found("abcde")) == {"e"}
    again.close()


def test_what_is_left_can_be_gone_on_with(root: Path) -> None:
    """A record that is gone from the table: refused, and accepted once the mark is deleted."""
    whole, _ = image(root, ORDERS["records first"], with_tables=False)
    database = open_sessions(whole / "sessions")
    (key,) = (key for key, _ in database.items("records") if key.endswith(b"c"))
    database.write([("records", key, None)])
    database.close()
    with pytest.raises(DataLoss, match="is not whole"):
        Store(whole)
    (whole / "sessions.mark").unlink()
    for _ in range(2):  # the second time there is a mark again
        store = Store(whole)
        assert set(store.found("abcd")) == {"a", "d"}
        store.close()


def test_a_folder_of_before_there_was_a_witness(root: Path) -> None:
    sessions = Sessions(open_sessions(root / "sessions"), default_ttl_s=0, clock=SystemClock())
    sessions.create("t", "a", 0)
    sessions.close()
    (root / "sessions.mark").write_text("12\n")
    for _ in range(2):
        store = Store(root)
        assert set(store.found("a")) == {"a"}
        store.close()
    assert (root / "sessions.mark").read_text().startswith("step ")


def stamped(root: Path) -> Path:
    """A folder of a kvstore that kept records together with others, as former versions did."""
    store = Store(root / "data")
    store.commit("a", 1)
    (key,) = (key for key, _ in store.table.items(HEADS))
    stamp = b"\1" + bytes(24)
    store.table.write([(STAMPS, key, stamp), (STAMPS, b"of a deleted session", stamp)])
    shutil.copytree(root / "data", root / "image")
    store.close()
    return root / "image"


def test_a_folder_that_was_one_of_several_is_left_as_it_is(root: Path) -> None:
    whole = stamped(root)
    for _ in range(2):
        with pytest.raises(UnknownFormat, match="kvcommons records move"):
            Store(whole)


def test_a_lost_stamp_alone_is_noticed(root: Path) -> None:
    whole = stamped(root)
    for key in (b"of a deleted session", None):
        database = open_sessions(whole / "sessions")
        stamps = dict(database.items(STAMPS))
        database.write([(STAMPS, one, None) for one in stamps if key in (None, one)])
        database.close()
        with pytest.raises(DataLoss, match="is not whole"):
            Store(whole)
        database = open_sessions(whole / "sessions")
        database.write([(STAMPS, one, row) for one, row in stamps.items()])
        database.close()


def test_a_witness_that_left_the_stamps_out_is_written_anew(root: Path) -> None:
    whole, expected = image(root, ORDERS["records last"], with_tables=False)
    database = open_sessions(whole / "sessions")
    entries = [(f, key, value) for f in (RECORDS, HEADS, META) for key, value in database.items(f)]
    digest, step = 0, 0
    for family, key, value in entries:
        if (family, key) == (META, b"witness"):
            (step,) = struct.unpack_from("<Q", value, 1)
        else:
            seed = xxhash.xxh3_64_intdigest(family.encode() + b"\0" + key)
            digest ^= xxhash.xxh3_128_intdigest(value, seed=seed)
    old = struct.pack("<Q", step) + digest.to_bytes(16, "little")
    database.write([(META, b"witness", old)])
    database.close()
    for _ in range(2):
        store = Store(whole)
        assert store.table.step == step
        assert store.found("abcd") == expected
        store.close()
    database = open_sessions(whole / "sessions")
    assert (database.get(META, b"witness") or b"")[:1] == b"\2"
    database.write([(META, b"witness", b"\3" + old)])
    database.close()
    with pytest.raises(UnknownFormat):
        Store(whole)


def test_a_write_that_failed_leaves_the_witness_right(root: Path) -> None:
    """It may be in the log all the same: what the next write builds on is what the log says."""
    store = Store(root)
    store.commit("a", 0)
    real = store.table._table

    class Failing:
        def __init__(self, *, done: bool) -> None:
            self.done = done

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, puts: object, *, sync: bool = True) -> None:
            store.table._table = real
            if self.done:
                real.write(puts, sync=sync)  # type: ignore[arg-type]
            raise OSError("no answer")

    for number, done in enumerate((True, False), start=1):
        store.table._table = Failing(done=done)  # type: ignore[assignment]
        with pytest.raises(OSError, match="no answer"):
            store.sessions.create("t", f"n{number}", 0)
        store.commit("a", number)
    store.close()
    again = Store(root)  # refuses where the digest went wrong
    assert again.found("a")["a"][0] == 3
    again.close()
