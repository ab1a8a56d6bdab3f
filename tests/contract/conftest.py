"""Addresses for suites that run on every transport."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvcommons.security.authority import make_certificates
from kvcommons.transport import addresses, ucx
from tests.contract import transport_peer


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short enough for socket paths, wherever pytest keeps its own folders."""
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["tcp", "tcp with certificates", "tcp with a token", "unix", "shm", "ucx"])
def address(request: pytest.FixtureRequest, socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of each transport, to listen on; of TCP with each way to be known there, too."""
    if request.param.startswith("tcp with"):
        make_certificates(socket_folder / "pki", datetime.now(UTC))
        (socket_folder / "token").write_text("a token of this very stack")
        shown = "token" if "token" in request.param else "pki/decode"
        monkeypatch.setenv(transport_peer.NETWORK, str(socket_folder / shown))
        monkeypatch.setattr(addresses, "TcpTransport", transport_peer.secured_transport)
        return "tcp:127.0.0.1:0"
    if request.param == "ucx":
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            pytest.skip("UCX has no wheel for this platform")
        ucx.library()  # what it keeps open is no test's
    return (
        f"{request.param}:127.0.0.1:0"
        if request.param in ("tcp", "ucx")
        else f"{request.param}:{socket_folder}/data"
    )
