from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcommons.errors import Conflict
from services.kvstore.folder import DataFolder, UnknownFormat


def test_a_folder_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from services.kvstore.folder import DataFolder\n"
        f"DataFolder(Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Conflict, match="in use by another process"):
            DataFolder(tmp_path)
        holder.kill()
        holder.wait(10)
    DataFolder(tmp_path).close()  # the kernel gave the lock back


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    DataFolder(tmp_path).close()
    (tmp_path / "format").write_text("kvcommons-kvstore 99\n")
    for _ in range(2):  # the refusal leaves no lock behind
        with pytest.raises(UnknownFormat, match="kvcommons-kvstore 99"):
            DataFolder(tmp_path)
