"""`kvcommons up --kvstore 2` where PostgreSQL is installed and no database is named."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack.place import Claim
from devstack.postgres import find, make
from kvcommons.errors import Unavailable
from tests.contract.postgres_server import account, programs
from tests.contract.shard_folders import write_stack
from tests.machine import scaled
from tests.system.stack import Stack

START_S = 60.0
# The interpreter may lie where another user may not look: all is imported before it becomes one.
AS_ANOTHER_USER = """
import asyncio, os, sys
from pathlib import Path
from devstack.child import Child
from devstack.logfile import LogFile
from devstack.place import Claim
from devstack.postgres import find, make

async def run():
    claim = Claim(Path(sys.argv[1]))
    server = find(claim.place, os.environ, 2)
    await make(server, print, 1 << 20)
    log = LogFile(claim.place.logs / "postgres.jsonl", 1 << 20)
    up = asyncio.Event()
    ready = lambda name, record: up.set() if "ready to accept" in record.human() else None
    child = Child(server.plan(claim.place.postgres), log, ready)
    await child.start()
    await asyncio.wait_for(up.wait(), float(sys.argv[2]))
    assert await child.stop(float(sys.argv[2]))
    claim.release()

asyncio.run(run())
"""
# An interpreter in root's home is to be read by the user whom a test becomes.
READS = "-all,+dac_read_search"
BECOME = (
    "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
    f"--bounding-set={READS}", f"--inh-caps={READS}", f"--ambient-caps={READS}",
)  # fmt: skip
TELLS = ("My cat is called Zuzu.", "My brother is called Benno.", "What is my cat called?")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that PostgreSQL's account may enter, where the tests run as root."""
    programs()
    account()
    path = Path(tempfile.mkdtemp(prefix="kvc-test-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


async def test_where_a_former_stack_s_folder_is_lost_the_error_has_the_way_out(folder: Path) -> None:
    former = write_stack("three", folder / "data")
    shutil.rmtree(former.folders[1])
    said: list[str] = []

    async def made(data: Path) -> None:
        claim = Claim(data)
        try:
            await make(find(claim.place, os.environ, 2), said.append, 1 << 20)
        finally:
            claim.release()

    with pytest.raises(Unavailable, match=r"could not be moved: .* lack ") as error:
        await made(folder / "data")
    lost = re.search(r"--without (\S+) where it is lost", error.value.message)
    command = re.search(r"run `kvcommons (.*?)`.* with --data (\S+)$", error.value.message)
    assert lost is not None
    assert command is not None
    words = [lost[1] if word == "NAME" else word for word in shlex.split(command[1])]
    subprocess.run([sys.executable, "-m", "devstack", *words], check=True, timeout=scaled(START_S))
    await made(Path(command[2]))
    assert any("Moved now: " in line and "Moved now: 0;" not in line for line in said)


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to become another user",
)
def test_another_user_than_root_runs_it_as_himself(folder: Path) -> None:
    home = folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    command = [*BECOME, sys.executable, "-c", AS_ANOTHER_USER, home / "data", str(scaled(START_S))]
    subprocess.run(command, check=True, timeout=2 * scaled(START_S))
    assert (home / "data" / "postgres").stat().st_uid == 65534
    assert not working_in(home)


def working_in(folder: Path) -> list[int]:
    """Processes, by what is their working directory: PostgreSQL's are in no process session of the stack."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder):
                found.append(pid)
        except OSError:
            continue
    return found


def serving(stack: Stack) -> int:
    """How many kvstores are ready."""
    instances = stack.client.get("/v1/status")["instances"]
    return sum(one["service"] == "kvstore" and one["ready"] for one in instances)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stack_that_grows_keeps_its_sessions_whichever_kvstore_dies(folder: Path) -> None:
    stack = Stack(folder, kvstore=1, colocated=True, attention_pool=0)
    with stack:
        reported = stack.client.say(TELLS[0], "grown", temperature=0).text
    assert not (stack.data / "postgres").exists()

    stack = Stack(folder, kvstore=2, colocated=True, attention_pool=0)
    with stack:
        assert "Moved now: 1;" in stack.said()
        assert working_in(stack.data / "postgres")
        sessions = ["grown", *(f"talk-{number}" for number in range(3))]
        for session in sessions[1:]:
            assert stack.client.say(TELLS[0], session, temperature=0).text == reported
        for name, text in (("kvstore-1", TELLS[1]), ("kvstore-2", TELLS[2])):
            stack.until(lambda: serving(stack) == 2, START_S, "two kvstores are never ready")
            stack.kill(name)
            answers = {stack.client.say(text, session, temperature=0).text for session in sessions}
            assert len(answers) == 1
        assert "Zuzu" in answers.pop()
        tokens = stack.client.session("grown")["token_ids"]
        stack.kill_all()

    # It comes back from that, and one alone stays with the database.
    stack = Stack(folder, kvstore=1, colocated=True, attention_pool=0)
    with stack:
        assert stack.client.session("grown")["token_ids"] == tokens
    stack.assert_gone()
    assert not working_in(stack.data)
    assert not stack.runtime.with_name(f"{stack.runtime.name}-pg").exists()
