"""Unix sockets, on one host: "unix:/path"."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcommons.errors import AlreadyExists, DeadlineExceeded, InvalidInput, PermissionDenied, Unavailable
from kvcommons.transport.base import Connection, Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection, Stream
from kvcommons.transport.sockets import SocketListener, SocketStream, finish_connect

_BACKLOG = 128
# The kernel's own size (208 KiB) makes large payloads slower. It may cap this (net.core.wmem_max).
_BUFFER_BYTES = 4 << 20
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_ROOT = 0
_PATH_BYTES_MAX = 107  # sun_path


class UnixTransport:
    def connect(self, rest: str, limits: Limits, deadline: Deadline) -> Connection:
        address = f"unix:{rest}"
        return FramedConnection(connect_stream(rest, address, deadline), address, limits)

    def listen(self, rest: str, limits: Limits) -> SocketListener:
        return listen_on(rest, f"unix:{rest}", open_stream, limits)


def connect_stream(rest: str, address: str, deadline: Deadline) -> SocketStream:
    """A connection to the socket file `rest`; `address` is how people wrote it."""
    _check(rest, address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream = open_stream(sock, address)
        finish_connect(sock, rest, address, deadline)
        check_account(sock, address)
    except BaseException:
        sock.close()
        raise
    return stream


def listen_on(
    rest: str, address: str, open_stream: Callable[[socket.socket, str], Stream], limits: Limits
) -> SocketListener:
    """Listens on the socket file `rest`, which it makes, and removes in the end."""
    _check(rest, address)
    path = Path(rest)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _folder_locked(path.parent):
            _remove_stale(path, address)
            sock.bind(rest)
            sock.listen(_BACKLOG)
            inode = path.stat().st_ino
    except OSError as error:
        sock.close()
        raise InvalidInput(f"cannot listen on {address}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise

    def open_checked(accepted: socket.socket, peer: str) -> Stream:
        check_account(accepted, peer)
        return open_stream(accepted, peer)

    def release() -> None:
        # Only our own file: another process may have taken the path since.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()

    return SocketListener(sock, address, open_checked, limits, release)


def check_account(sock: socket.socket, peer: str) -> None:
    """What is at the other end of a Unix socket, as the kernel knows it. Raises PermissionDenied unless it
    runs as we do, or as root."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, account, _ = _CREDENTIALS.unpack(found)
    own = os.geteuid()
    if account not in (own, _ROOT):
        raise PermissionDenied(
            f"{peer} is process {pid} of another account ({account}, and this is {own}): services that share "
            "sockets of one host run as one account; between accounts use tcp:"
        )


def open_stream(sock: socket.socket, peer: str) -> SocketStream:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return SocketStream(sock, peer)


def _check(rest: str, address: str) -> None:
    if not rest.startswith("/"):
        scheme = address.partition(":")[0]
        raise InvalidInput(f"{address} is no address: write {scheme}: and an absolute path")
    size = len(os.fsencode(rest))
    if size > _PATH_BYTES_MAX:
        raise InvalidInput(
            f"{address} has {size} bytes, a socket path at most {_PATH_BYTES_MAX}: choose a shorter folder"
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


def _remove_stale(path: Path, address: str) -> None:
    """Removes a socket file that nobody listens on (its process was killed). Raises AlreadyExists for a
    living one."""
    if not path.exists():
        return
    if not path.is_socket():
        raise AlreadyExists(f"{path} is in the way and no socket: remove it, or choose another path")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        finish_connect(probe, str(path), address, Deadline.after(0.2))
    except DeadlineExceeded:
        pass  # its backlog is full: somebody listens
    except Unavailable:
        path.unlink()
        return
    finally:
        probe.close()
    raise AlreadyExists(f"{address} is in use: stop the process that listens there, or choose another path")
