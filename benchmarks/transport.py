"""`kvcommons bench transport`: round trips and bandwidth between two processes, beside memcpy."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plot import panels
from benchmarks.report import Report, Row, p50, p99
from kvcommons.errors import KVCommonsError
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport.addresses import connect, listen
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer, Exchange

Progress = Callable[[str], None]

TRANSPORTS = ("tcp", "unix", "shm", "ucx")
SIZES = (4 << 10, 64 << 10, 1 << 20, 64 << 20)
ROUNDS = 3
TURNS = 1500
_CALL_S = 30.0
# What the peer does with a payload, as a frame's head: send it back, or answer with nothing.
ECHO, TAKE = b"echo", b"take"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds of each turn."""

    echo: list[float]  # a frame there, the same payload back
    take: list[float]  # a frame there, an empty one back
    call: list[float]  # DataClient and DataServer: a request with a payload, a reply with the same


def measure(
    transports: Sequence[str], sizes: Sequence[int], progress: Progress, *, turns: int = TURNS
) -> Report:
    """`turns` of each kind in a round, fewer of large payloads; in rounds, so that a slow minute of the
    machine meets each transport."""
    biggest = max(sizes)
    source, target = bytearray(b"\x5a" * biggest), bytearray(biggest)
    copies: dict[int, list[float]] = {size: [] for size in sizes}
    found = {(name, size): Samples(echo=[], take=[], call=[]) for name in transports for size in sizes}
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        peers = {name: Peer(name, folder) for name in transports}
        try:
            for number in range(ROUNDS):
                for size in sizes:
                    count = max(8, min(turns, (256 << 20) // size))
                    copies[size] += _copy(source, target, size, count)
                    for name, peer in peers.items():
                        progress(f"round {number + 1} of {ROUNDS}: {name}, {_bytes(size)}")
                        peer.take_samples(source, target, size, count, found[name, size])
        finally:
            for peer in peers.values():
                peer.close()
    memcpy = {size: size / p50(taken) for size, taken in copies.items()}
    rows = [_row(name, size, found[name, size], memcpy[size]) for size in sizes for name in transports]
    return Report(title="Between two processes on one host", ratios=_ratios(rows), rows=rows)


class Peer:
    """The other process of one transport, and connections to it."""

    def __init__(self, transport: str, folder: str) -> None:
        on_host = transport in ("unix", "shm")
        addresses = [
            f"{transport}:{folder}/{transport}.{kind}" if on_host else f"{transport}:127.0.0.1:0"
            for kind in ("frames", "calls")
        ]
        command = [sys.executable, "-m", "benchmarks.transport", *addresses]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        try:
            frames, calls = self._process.stdout.readline().split()
            self._connection = connect(frames, Deadline.after(_CALL_S))
            self._client = DataClient(calls)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def take_samples(
        self, source: bytearray, target: bytearray, size: int, turns: int, samples: Samples
    ) -> None:
        payload, into = memoryview(source)[:size], memoryview(target)[:size]
        kinds: list[tuple[list[float], Callable[[], None]]] = [
            (samples.echo, lambda: self._exchange(ECHO, payload, into)),
            (samples.take, lambda: self._exchange(TAKE, payload, into)),
            (samples.call, lambda: self._call(payload, into)),
        ]
        for taken, turn in kinds:
            for _ in range(max(3, turns // 10)):
                turn()  # warms up
            for _ in range(turns):
                started = time.perf_counter()
                turn()
                taken.append(time.perf_counter() - started)

    def close(self) -> None:
        self._connection.close()
        self._client.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, what: bytes, payload: memoryview, into: memoryview) -> None:
        deadline = Deadline.after(_CALL_S)
        self._connection.send(what, [payload], deadline)
        _, size = self._connection.receive_head(deadline)
        self._connection.receive_payload([into[:size]], deadline)

    def _call(self, payload: memoryview, into: memoryview) -> None:
        request = pb.DataRequest(write_blocks=pb.WriteBlocks(blocks=1))
        self._client.call(request, [payload], into=[into], deadline=Deadline.after(_CALL_S))


def _copy(source: bytearray, target: bytearray, size: int, turns: int) -> list[float]:
    payload, into = memoryview(source)[:size], memoryview(target)[:size]
    taken = []
    for _ in range(turns):
        started = time.perf_counter()
        into[:] = payload
        taken.append(time.perf_counter() - started)
    return taken


def _row(name: str, size: int, samples: Samples, memcpy: float) -> Row:
    bandwidth = size / p50(samples.take)
    return {
        "size": _bytes(size),
        "transport": name,
        "round trip µs p50": p50(samples.echo) * 1e6,
        "p99": p99(samples.echo) * 1e6,
        "call µs p50": p50(samples.call) * 1e6,
        "one way µs p50": p50(samples.take) * 1e6,
        "one way GB/s": bandwidth / 1e9,
        "memcpy GB/s": memcpy / 1e9,
        "of memcpy": bandwidth / memcpy,
    }


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    ratios = {}
    for row in rows:
        if row["size"] == _bytes(64 << 10):
            ratios[f"{row['transport']}: µs of a round trip with 64 KiB each way"] = float(
                row["round trip µs p50"]
            )
        if row["size"] == _bytes(64 << 20):
            ratios[f"{row['transport']}: bandwidth of 64 MiB over memcpy's"] = float(row["of memcpy"])
    return ratios


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("transport", help="round trips and bandwidth between two processes")
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=TRANSPORTS[:3],
        metavar="NAME",
        help="tcp, unix, shm, ucx",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="of a payload")
    add_outputs(parser)
    parser.set_defaults(
        run=lambda options, progress: measure(options.transports, options.sizes, progress), draw=_draw
    )


def _draw(path: Path, report: Report) -> None:
    groups = []
    for size in dict.fromkeys(row["size"] for row in report.rows):
        bars = [
            (str(row["transport"]), float(row["round trip µs p50"]))
            for row in report.rows
            if row["size"] == size
        ]
        groups.append((f"{size} there and back", bars))
    panels(path, report.title, groups, "microseconds (medians)")


def _serve_frames(listener_address: str, ready: Callable[[str], None]) -> None:
    listener = listen(listener_address)
    ready(listener.address)
    connection = listener.accept()
    assert connection is not None
    buffer = memoryview(bytearray(0))
    try:
        while connection.wait_readable(Deadline.after(600)):
            deadline = Deadline.after(_CALL_S)
            what, size = connection.receive_head(deadline)
            if len(buffer) < size:
                buffer = memoryview(bytearray(size))
            connection.receive_payload([buffer[:size]], deadline)
            connection.send(b"", [buffer[:size]] if what == ECHO else [], deadline)
    except KVCommonsError:
        pass  # how the benchmark leaves
    connection.close()
    listener.close()


def _peer(frames: str, calls: str) -> None:
    buffer = memoryview(bytearray(0))

    def answer(request: pb.DataRequest, exchange: Exchange) -> None:
        nonlocal buffer
        if len(buffer) < exchange.payload_bytes:
            buffer = memoryview(bytearray(exchange.payload_bytes))
        payload = [buffer[: exchange.payload_bytes]]
        exchange.receive_payload(payload)
        exchange.reply(pb.DataReply(done=pb.Done()), payload)

    server = DataServer(calls, answer, name="peer")
    server.start()
    bound: list[str] = []
    reported = threading.Event()

    def ready(address: str) -> None:
        bound.append(address)
        reported.set()

    threading.Thread(target=_serve_frames, args=(frames, ready), name="frames", daemon=True).start()
    reported.wait(10)
    print(bound[0], server.address, flush=True)
    sys.stdin.read()  # until the benchmark is through, or gone
    server.stop(2)


if __name__ == "__main__":
    _peer(*sys.argv[1:])
