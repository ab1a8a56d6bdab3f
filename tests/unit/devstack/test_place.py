"""A data directory is held by one stack at a time, and only its own files lie in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from devstack.place import Claim
from kvcommons.errors import Conflict, InvalidInput
from kvcommons.files import PRIVATE_UMASK


def hold(data: Path) -> subprocess.Popen[str]:
    """Another process that claims `data` and keeps it until it is killed."""
    code = f"""
        from pathlib import Path
        from devstack.place import Claim
        claim = Claim(Path({str(data)!r}))
        print(claim.place.runtime, flush=True)
        input()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_directory_in_use_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with hold(tmp_path / "data") as other:
        try:
            assert other.stdout is not None
            runtime = Path(other.stdout.readline().strip())
            assert runtime.is_dir()
            with pytest.raises(Conflict, match=str(other.pid)):
                Claim(tmp_path / "data")
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait(timeout=10)
    # Killed: the lock is gone with it, and what it left behind is cleared away.
    claim = Claim(tmp_path / "data")
    try:
        assert not runtime.exists()
    finally:
        claim.release()


def test_release_leaves_the_data_and_nothing_else(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "data")
    secret = claim.place.secret_file.read_text()
    claim.record({"url": "http://127.0.0.1:1"})
    record = json.loads((tmp_path / "data" / "stack.json").read_text())
    assert record["pid"] == os.getpid()
    assert record["url"] == "http://127.0.0.1:1"
    claim.release()
    assert not claim.place.runtime.exists()
    assert not (tmp_path / "data" / "stack.json").exists()
    again = Claim(tmp_path / "data")
    try:
        assert again.place.secret_file.read_text() == secret
        assert again.place.secret_file.stat().st_mode & 0o77 == 0
    finally:
        again.release()


def test_a_folder_that_was_open_is_closed_and_all_that_is_made_in_it(tmp_path: Path) -> None:
    """Under the umask that `kvcommons up` takes."""
    data = tmp_path / "data"
    (data / "logs").mkdir(parents=True)
    for folder in (data, data / "logs"):
        folder.chmod(0o755)
    before = os.umask(PRIVATE_UMASK)
    try:
        claim = Claim(data)
        claim.record({"url": "http://127.0.0.1:1"})
        made = [data, claim.place.runtime, *data.glob("*")]
        assert [path.name for path in made if path.stat().st_mode & 0o77] == []
        assert {path.name for path in made} >= {"lock", "logs", "stack.json", claim.place.secret_file.name}
        claim.release()
    finally:
        os.umask(before)


def test_socket_paths_stay_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    claim = Claim(tmp_path / "data")
    try:
        assert len(claim.place.transport("attention_pool-64")) < 107
    finally:
        claim.release()


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="data directory"):
        Claim(tmp_path / "file" / "data")
