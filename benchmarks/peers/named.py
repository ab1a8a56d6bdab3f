"""`--with` and `--peer`: the servers that benchmarks compare with, started for them or running already."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.servers import PEERS, Progress, Sizes, start
from devstack.rest import RestClient
from kvcommons.errors import InvalidInput


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with", dest="peers", nargs="+", choices=sorted(PEERS), default=[], metavar="PEER",
        help=f"installed at the first use: {', '.join(sorted(PEERS))}",
    )  # fmt: skip
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs, with the same model",
    )


def peer_clients(
    options: argparse.Namespace,
    model: Path,
    sizes: Sizes,
    folder: Path,
    *,
    running: ExitStack,
    progress: Progress,
) -> dict[str, RestClient]:
    """By name: servers that are started here, which end with `running`, and those that run already. Raises
    InvalidInput, and what `start` raises."""
    clients: dict[str, RestClient] = {}
    for name in options.peers:
        started = start(name, model, sizes, folder, progress)
        progress(f"starting {name}")
        clients[name] = running.enter_context(started).client
    return clients | dict(map(named_client, options.peer))


def named_client(given: str) -> tuple[str, RestClient]:
    """Of one `--peer`. Raises InvalidInput."""
    name, equals, url = given.partition("=")
    if not (name and equals and url):
        raise InvalidInput(f"--peer {given}: write NAME=URL, as vllm=http://127.0.0.1:8001", param="peer")
    return name, RestClient(url)
