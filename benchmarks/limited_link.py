"""A TCP relay that lets only so many bytes a second through, each way: a network to hide, on one host.

`python -m benchmarks.limited_link HOST:PORT BYTES_PER_S` prints the port that it listens at. As on a network
card, what comes first goes first, whatever connection it is of.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from dataclasses import dataclass, field

_TAKEN_BYTES = 1 << 20  # at once, of what a connection has sent


@dataclass(slots=True)
class Way:
    """One direction of the link, for all connections."""

    bytes_per_s: float
    free_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def through_s(self, size: int) -> float:
        """When so many bytes that are there now are through."""
        with self.lock:
            self.free_s = max(self.free_s, time.monotonic()) + size / self.bytes_per_s
            return self.free_s


def pump(source: socket.socket, sink: socket.socket, way: Way) -> None:
    buffer = memoryview(bytearray(_TAKEN_BYTES))
    try:
        while count := source.recv_into(buffer):
            time.sleep(max(way.through_s(count) - time.monotonic(), 0.0))
            sink.sendall(buffer[:count])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        sink.close()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    there, back = Way(float(sys.argv[2])), Way(float(sys.argv[2]))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=pump, args=(near, far, there), daemon=True).start()
        threading.Thread(target=pump, args=(far, near, back), daemon=True).start()


if __name__ == "__main__":
    main()
