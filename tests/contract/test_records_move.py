"""`kvcommons records move`: from folders as shards wrote them, to a real PostgreSQL and to a real RocksDB."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest

from kvcommons.errors import SessionNotFound
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.database import Database, Put
from services.kvstore.families import HEADS, META, RECORDS, STAMPS
from services.kvstore.folder import FORMAT, DataFolder
from services.kvstore.integrity import IntegrityTable, open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.records import destination_database
from services.kvstore.records.__main__ import PROGRESS_SESSIONS, main
from services.kvstore.records.embedded import EmbeddedRecords
from services.kvstore.records.interface import Records
from services.kvstore.records.source import STAMP_FORMAT, ChangeStamp, decode_stamp
from services.kvstore.session import head_of, new_record
from services.kvstore.sessions import Sessions, open_sessions
from tests.contract.postgres_server import PostgresServer
from tests.contract.records_fixtures import MODEL, Clock, commit, sql
from tests.contract.shard_folders import STACKS, WrittenStack, write_stack
from tests.machine import scaled

T = TypeVar("T")


@contextmanager
def opened(root: Path) -> Iterator[IntegrityTable]:
    """A kvstore's folder, as the kvstore opens it: not unless it is whole."""
    folder = DataFolder(root)
    table = open_integrity_table(open_sessions(folder.sessions), folder.sessions)
    mark = Mark(folder.mark)
    try:
        table.begin(mark)
        yield table
    finally:
        table.close()
        mark.close()
        folder.close()


class MovedTo:
    """Where records are moved to; `to` names it on the command line."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.unnamed: list[bytes] = []

    def use(self, work: Callable[[Records], Awaitable[T]]) -> T:
        """What comes of the records that are there, as a kvstore has them."""

        async def used() -> T:
            with ThreadPoolExecutor(1) as executor:
                if "://" in self.to:
                    database = sql(self.to, Clock(), unnamed=self._forget)
                    try:
                        return await work(database)
                    finally:
                        await database.close()
                with opened(Path(self.to)) as table:
                    sessions = Sessions(table, default_ttl_s=0, clock=Clock(), unnamed=self._forget)
                    return await work(EmbeddedRecords(sessions, executor))

        return asyncio.run(used())

    def get(self, tenant: str, session_id: str) -> pb.SessionRecord | None:
        async def got(records: Records) -> pb.SessionRecord | None:
            try:
                return await records.get(tenant, session_id)
            except SessionNotFound:
                return None

        return self.use(got)

    def _forget(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        assert model == MODEL
        self.unnamed += block_ids


@pytest.fixture(params=["folder", "database"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> MovedTo:
    if request.param == "folder":
        return MovedTo(str(tmp_path / "moved" / "kvstore"))
    server: PostgresServer = request.getfixturevalue("postgres")
    return MovedTo(server.new_url())


def moved(root: Path, destination: MovedTo, *options: str) -> int:
    return main(["move", "--data", str(root), "--to", destination.to, *options])


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): blake2b(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", STACKS)
def test_of_each_session_the_newest_state_is_moved(
    tmp_path: Path, destination: MovedTo, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "stack"
    stack = write_stack(name, root)
    before = contents(root)
    assert moved(root, destination) == 0
    assert contents(root) == before
    tokens = sum(len(record.tokens) for record in stack.records.values())
    said = capsys.readouterr().out
    counted = f"{len(stack.records)} sessions with {tokens} tokens\n"
    assert f"In the folders: {counted}Of these in " in said
    assert said.count(counted) == 2
    assert f"Moved now: {len(stack.records)}; there before: 0\n" in said

    async def check(records: Records) -> None:
        assert await records.count() == len(stack.records)
        for key, record in stack.records.items():
            there = await records.get(*key)
            there.ClearField("incarnation")  # a database gives it one
            assert there == record
        for key in stack.gone:
            with pytest.raises(SessionNotFound):
                await records.get(*key)

    destination.use(check)
    assert moved(root, destination) == 0
    assert f"Moved now: 0; there before: {len(stack.records)}\n" in capsys.readouterr().out
    destination.use(check)


def test_a_conversation_goes_on_where_it_was_moved_to(tmp_path: Path, destination: MovedTo) -> None:
    write_stack("two", tmp_path / "stack")
    assert moved(tmp_path / "stack", destination) == 0
    before = destination.get("alice", "before, changed later")
    assert before is not None
    assert before.truncations

    async def go_on(records: Records) -> None:
        ids = [*before.block_ids, b"n" * 32]
        committed = await commit(records, "next", [1, 2], "before, changed later", ids)
        assert (committed.version, committed.new) == (before.version + 1, True)
        again = await commit(records, "one more", [3], "before, changed later", ids[1:])
        assert again.version == before.version + 2

    destination.use(go_on)
    after = destination.get("alice", "before, changed later")
    assert after is not None
    assert list(after.tokens) == [*before.tokens, 1, 2, 3]
    assert list(after.block_ids) == [*before.block_ids[1:], b"n" * 32]
    assert len(after.messages) == len(before.messages) + 2
    assert after.truncations == before.truncations
    assert moved(tmp_path / "stack", destination) == 0  # nothing that came later is undone
    assert destination.get("alice", "before, changed later") == after
    fork = after.session_id + " forked"
    destination.use(lambda records: records.fork("alice", "before, changed later", fork))
    destination.use(lambda records: records.delete("alice", "before, changed later"))
    assert not destination.unnamed
    destination.use(lambda records: records.delete("alice", fork))
    assert b"n" * 32 in destination.unnamed
    assert b"b" * 32 not in destination.unnamed  # others name it, too


def test_what_another_session_of_the_same_name_has_is_left(
    tmp_path: Path, destination: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = write_stack("alone", tmp_path / "stack")
    assert stack.records["alice", "letters"].version == 2
    for session_id, tokens in (("letters", [[1, 2, 300]]), ("letters-again", [[9]])):
        for number, one in enumerate(tokens):
            destination.use(
                lambda records, session_id=session_id, number=number, one=one: commit(
                    records, f"t{number}", one, session_id
                )
            )
    assert moved(tmp_path / "stack", destination) == 1
    said = capsys.readouterr().out
    assert "left as it is" in said
    assert "letters-again of alice" in said
    assert "letters of alice" not in said
    there = destination.get("alice", "letters")
    assert there is not None
    there.ClearField("incarnation")
    assert there == stack.records["alice", "letters"]  # it went on from there
    kept = destination.get("alice", "letters-again")
    assert kept is not None
    assert list(kept.tokens) == [9]


# ---- killed


def test_a_move_that_is_killed_again_and_again_comes_to_its_end(tmp_path: Path, destination: MovedTo) -> None:
    dice = random.Random(13)
    sessions = 4 * PROGRESS_SESSIONS + 50
    for folder, epoch in (("kvstore", 1), ("kvstore-2", 2)):
        rows: list[Put] = []
        for number in range(sessions):
            record = new_record("alice", f"{number:06}", 0, 1_750_000_000_000)
            record.version = epoch
            record.tokens.extend([number] * epoch)
            record.last_turn_id = f"turn-{epoch}"
            rows += state(record, ChangeStamp(epoch, number + 1))
        written(tmp_path / "stack" / folder, rows)
    command = [sys.executable, "-m", "devstack", "records", "move"]
    command += ["--data", str(tmp_path / "stack"), "--to", destination.to]
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(dice.randrange(1, 4)):  # where it reads from, and then how far it has come
                assert process.stdout.readline()
            time.sleep(dice.random() * 0.05)
            process.kill()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"{sessions:,} sessions with {2 * sessions:,} tokens\n") == 2
    assert "there before: 0\n" not in ended.stdout

    async def check(records: Records) -> None:
        assert await records.count() == sessions
        for number in dice.sample(range(sessions), 50):
            record = await records.get("alice", f"{number:06}")
            assert (record.version, list(record.tokens)) == (2, [number] * 2)

    destination.use(check)


def state(record: pb.SessionRecord, stamp: ChangeStamp) -> list[Put]:
    key = session_key(record.tenant, record.session_id)
    row = STAMP_FORMAT.to_bytes(1, "little") + b"".join(
        number.to_bytes(8, "little") for number in (*stamp, 1_750_000_000_000)
    )
    return [
        (RECORDS, key, record.SerializeToString(deterministic=True)),
        (HEADS, key, head_of(record).SerializeToString(deterministic=True)),
        (STAMPS, key, row),
    ]


def written(folder: Path, rows: Sequence[Put]) -> None:
    folder.mkdir(parents=True)
    (folder / "format").write_text(FORMAT + "\n")
    table = Database(folder / "sessions", [RECORDS, HEADS, META, STAMPS])
    table.write(rows)
    table.close()


# ---- refused


@pytest.fixture
def two(tmp_path: Path) -> WrittenStack:
    return write_stack("two", tmp_path / "stack")


@pytest.fixture
def new_folder(tmp_path: Path) -> MovedTo:
    return MovedTo(str(tmp_path / "moved"))


def test_a_folder_that_is_in_use_is_refused(
    tmp_path: Path, two: WrittenStack, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    held = DataFolder(two.folders[1])
    assert moved(tmp_path / "stack", new_folder) == 1
    assert f"{two.folders[1]} is in use by another process" in capsys.readouterr().err
    held.close()
    assert moved(tmp_path / "stack", new_folder) == 0


def test_a_folder_that_is_none_of_ours_is_refused(
    tmp_path: Path, two: WrittenStack, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moved(tmp_path, new_folder) == 2
    assert f"{tmp_path} is no kvstore's folder" in capsys.readouterr().err
    assert moved(tmp_path / "nowhere", new_folder) == 2
    (two.folders[0] / "format").write_text("kvcommons-kvstore 7")
    assert moved(tmp_path / "stack", new_folder) == 1
    assert "'kvcommons-kvstore 7'" in capsys.readouterr().err


def test_a_shard_whose_folder_is_missing_is_noticed(
    tmp_path: Path, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = write_stack("three", tmp_path / "stack")
    only = stack.folders[1]
    assert moved(only, new_folder) == 2
    said = capsys.readouterr().err
    assert "lack kvstore-3.00000003" in said
    assert "--without kvstore-3.00000003" in said
    assert moved(only, new_folder, "--without", "kvstore-3.00000003") == 0


def test_a_source_that_lacks_what_was_committed_is_refused(
    tmp_path: Path, two: WrittenStack, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    (two.folders[0] / "sessions.mark").write_text(f"step {10**6:020}\n")
    assert moved(tmp_path / "stack", new_folder) == 1
    assert "turns that were committed are missing" in capsys.readouterr().err


def test_a_source_that_is_damaged_is_refused(
    tmp_path: Path, two: WrittenStack, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    (two.folders[0] / "sessions" / "CURRENT").unlink()
    assert moved(tmp_path / "stack", new_folder) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_destination_with_something_else_in_it_is_refused(
    tmp_path: Path, two: WrittenStack, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = tmp_path / "stack"
    assert moved(stack, MovedTo(str(two.folders[0]))) == 2
    assert "one of the folders that are read" in capsys.readouterr().err
    other = write_stack("two", tmp_path / "other")
    assert moved(stack, MovedTo(str(other.folders[0]))) == 2
    assert "was a shard's folder itself" in capsys.readouterr().err
    assert moved(stack, MovedTo(str(tmp_path))) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_database_that_does_not_answer_is_named(
    tmp_path: Path,
    two: WrittenStack,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(destination_database, "CALL_S", 0.3)
    to = MovedTo(f"postgresql://somebody@/records?host={tmp_path}")
    assert moved(tmp_path / "stack", to) == 1
    said = capsys.readouterr().err
    assert "did not answer" in said
    assert str(tmp_path) in said


def test_a_newer_schema_is_refused(
    tmp_path: Path, two: WrittenStack, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    to = MovedTo(postgres.new_url())
    assert moved(tmp_path / "stack", to) == 0
    with psycopg.connect(to.to, autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert moved(tmp_path / "stack", to) == 1
    assert "schema 9999" in capsys.readouterr().err


def test_without_psycopg_it_is_said_what_to_install(tmp_path: Path, two: WrittenStack) -> None:
    blocked = "import sys; sys.modules['psycopg'] = None; from devstack.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", blocked, "records", "move", "--data", str(tmp_path / "stack")]
    ended = subprocess.run(
        [*command, "--to", "postgresql:///records"],
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=False,
    )
    assert ended.returncode == 2
    assert "pip install 'kvcommons[postgres]'" in ended.stderr
    ended = subprocess.run([*command, "--to", str(tmp_path / "moved")], timeout=scaled(30), check=False)
    assert ended.returncode == 0  # a folder needs none of it


# ---- what should not be


def test_of_two_states_with_the_same_stamp_the_longer_one_is_taken_and_named(
    tmp_path: Path, new_folder: MovedTo, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, tokens in (("kvstore", [1, 2]), ("kvstore-2", [1, 2, 3])):
        record = new_record("alice", "s", 0, 0)
        record.version = 1
        record.tokens.extend(tokens)
        same = new_record("alice", "same", 0, 0)
        written(
            tmp_path / "stack" / folder, [*state(record, ChangeStamp(1, 1)), *state(same, ChangeStamp(1, 2))]
        )
    assert moved(tmp_path / "stack", new_folder) == 0
    assert "the longer one was taken: s of alice\n" in capsys.readouterr().out
    record = new_folder.get("alice", "s")
    assert record is not None
    assert list(record.tokens) == [1, 2, 3]


def test_golden_stamp() -> None:
    golden = (Path(__file__).parents[1] / "golden" / "session-stamp.bin").read_bytes()
    assert decode_stamp(golden) == ChangeStamp(7, 1_234_567_890_123)
