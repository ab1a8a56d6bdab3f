"""Addresses for suites that run on every transport."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short enough for socket paths, wherever pytest keeps its own folders."""
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, socket_folder: Path) -> str:
    """One of each transport, to listen on."""
    return "tcp:127.0.0.1:0" if request.param == "tcp" else f"unix:{socket_folder}/data"
