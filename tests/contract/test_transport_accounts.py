"""Who is at the other end of a Unix socket, whatever the socket's file lets in: only root can start a process
of another account, so these tests are root's."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.errors import PermissionDenied
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from tests.contract import transport_peer as peer
from tests.machine import scaled

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other accounts")

# Each becomes the other account once the interpreter is there, which that one may not be able to read.
KNOCK = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
with socket.socket(socket.AF_UNIX) as knocking:
    knocking.settimeout(float(sys.argv[2]))
    knocking.connect(sys.argv[1])
    print(len(knocking.recv(100)))
"""
LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listening", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def open_folder(socket_folder: Path) -> Iterator[Path]:
    """One that every account may use, as if nobody had thought of it."""
    socket_folder.chmod(0o777)
    before = os.umask(0)
    yield socket_folder
    os.umask(before)


def other() -> int:
    return pwd.getpwnam("nobody").pw_uid


@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_a_process_of_another_account_is_not_let_in(
    open_folder: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = open_folder / "data"
    server = DataServer(f"{scheme}:{path}", peer.answer, name="peer")
    server.start()
    try:
        for _ in range(3):
            found = subprocess.run(
                [sys.executable, "-I", "-S", "-c", KNOCK, str(path), str(scaled(10)), str(other())],
                capture_output=True,
                text=True,
                check=False,
                timeout=scaled(30),
            )
            assert found.stdout == "0\n", found
        refused = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
        assert len(refused) == 3
        assert f"another account ({other()}" in refused[0]
        client = DataClient(server.address)  # and whoever may come is served on
        client.call(peer.request(peer.ECHO), [b"x"], into=[bytearray(1)], deadline=Deadline.after(scaled(10)))
        client.close()
    finally:
        server.stop(scaled(5))


@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_who_listens_in_a_services_place_learns_nothing(open_folder: Path, scheme: str) -> None:
    path = open_folder / "data"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LISTEN, str(path), str(other())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as listening:
        assert listening.stdin is not None
        assert listening.stdout is not None
        assert listening.stdout.readline() == "listening\n"
        assert path.is_socket()
        client = DataClient(f"{scheme}:{path}")
        with pytest.raises(PermissionDenied, match="another account"):
            client.call(
                peer.request(peer.ECHO), [b"secret"], into=[bytearray(6)], deadline=Deadline.after(scaled(10))
            )
        client.close()
        listening.stdin.close()
