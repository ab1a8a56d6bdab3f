"""Addresses for suites that run on every transport."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.transport import ucx


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short enough for socket paths, wherever pytest keeps its own folders."""
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["tcp", "unix", "shm", "ucx"])
def address(request: pytest.FixtureRequest, socket_folder: Path) -> str:
    """One of each transport, to listen on."""
    if request.param == "ucx":
        pytest.importorskip("ucxx", reason="needs the extra ucx")
        ucx.library()  # what it keeps open is no test's
    return (
        f"{request.param}:127.0.0.1:0"
        if request.param in ("tcp", "ucx")
        else f"{request.param}:{socket_folder}/data"
    )
