"""`--with` and `--peer`: the servers that benchmarks compare with, started for them or running already.
`--narrow`: the instructions that all of them may use."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.peers.instruction_sets import INSTRUCTION_SETS
from benchmarks.peers.servers import PEERS, Progress, Sizes, start
from devstack.rest import RestClient
from kvcommons.errors import InvalidInput


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with", dest="peers", nargs="+", choices=sorted(PEERS), default=[], metavar="PEER",
        help=f"installed at the first use, for a CPU: {', '.join(sorted(PEERS))}",
    )  # fmt: skip
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs, with the same model",
    )
    parser.add_argument(
        "--narrow",
        choices=sorted(INSTRUCTION_SETS),
        help="a lesser processor: no server that is started uses wider instructions",
    )


class RunningServer(Protocol):
    """One that answers while it is measured."""

    @property
    def client(self) -> RestClient: ...

    def restart(self) -> None:
        """kill -9, and what a start has of before. Raises InvalidInput where that is not ours to do."""


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """One that ran before the benchmark, and runs on after it."""

    name: str
    url: str

    @property
    def client(self) -> RestClient:
        return RestClient(self.url)

    def restart(self) -> None:
        raise InvalidInput(
            f"--peer {self.name} was started by somebody else, and is not killed", param="peer"
        )


def peer_servers(
    options: argparse.Namespace,
    model: Path,
    sizes: Sizes,
    folder: Path,
    *,
    running: ExitStack,
    progress: Progress,
) -> dict[str, RunningServer]:
    """By name: servers that are started here, which end with `running`, and those that run already. Raises
    InvalidInput, and what `start` raises."""
    servers: dict[str, RunningServer] = {}
    for name in options.peers:
        started = start(name, model, sizes, folder, progress)
        progress(f"starting {name}")
        servers[name] = running.enter_context(started)
    return servers | {server.name: server for server in map(_foreign, options.peer)}


def _foreign(given: str) -> ForeignServer:
    """Of one `--peer`. Raises InvalidInput."""
    name, equals, url = given.partition("=")
    if not (name and equals and url):
        raise InvalidInput(f"--peer {given}: write NAME=URL, as vllm=http://127.0.0.1:8001", param="peer")
    return ForeignServer(name, url)
