"""Unix sockets, on one host: "unix:/path"."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvcommons.errors import AlreadyExists, DeadlineExceeded, InvalidInput, Unavailable
from kvcommons.transport.base import Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.sockets import SocketConnection, SocketListener, finish_connect

_BACKLOG = 128
# measured.md of the design: 4 MiB buffers give 6–10 GB/s. The kernel may cap them (net.core.wmem_max).
_BUFFER_BYTES = 4 << 20
_PATH_BYTES_MAX = 107  # sun_path


class UnixTransport:
    def connect(self, rest: str, limits: Limits, deadline: Deadline) -> SocketConnection:
        _check(rest)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _prepare(sock)
            sock.setblocking(False)
            finish_connect(sock, rest, f"unix:{rest}", deadline)
        except BaseException:
            sock.close()
            raise
        return SocketConnection(sock, f"unix:{rest}", limits)

    def listen(self, rest: str, limits: Limits) -> SocketListener:
        _check(rest)
        path = Path(rest)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _folder_locked(path.parent):
                _remove_stale(path)
                sock.bind(rest)
                sock.listen(_BACKLOG)
                inode = path.stat().st_ino
        except OSError as error:
            sock.close()
            raise InvalidInput(f"cannot listen on unix:{rest}: {error.strerror}") from error
        except BaseException:
            sock.close()
            raise

        def release() -> None:
            # Only our own file: another process may have taken the path since.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()

        return SocketListener(sock, f"unix:{rest}", _prepare, limits, release)


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def _check(rest: str) -> None:
    if not rest.startswith("/"):
        raise InvalidInput(f"unix:{rest} is no address: write unix: and an absolute path")
    size = len(os.fsencode(rest))
    if size > _PATH_BYTES_MAX:
        raise InvalidInput(
            f"unix:{rest} has {size} bytes, a socket path at most {_PATH_BYTES_MAX}: choose a shorter folder"
        )


@contextlib.contextmanager
def _folder_locked(folder: Path) -> Iterator[None]:
    """Between two processes that start at once, the second must not remove the first one's new socket as
    stale."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = Deadline.after(5)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                deadline.check(f"locking {folder}")
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Removes a socket file that nobody listens on (its process was killed). Raises AlreadyExists for a
    living one."""
    if not path.exists():
        return
    if not path.is_socket():
        raise AlreadyExists(f"{path} is in the way and no socket: remove it, or choose another path")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        finish_connect(probe, str(path), f"unix:{path}", Deadline.after(0.2))
    except DeadlineExceeded:
        pass  # its backlog is full: somebody listens
    except Unavailable:
        path.unlink()
        return
    finally:
        probe.close()
    raise AlreadyExists(f"unix:{path} is in use: stop the process that listens there, or choose another path")
