"""`--with` and `--peer`: the servers that benchmarks compare with, started for them or running already."""

from __future__ import annotations

import argparse

from benchmarks.peers.servers import PEERS
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


def named_client(given: str) -> tuple[str, RestClient]:
    """Of one `--peer`. Raises InvalidInput."""
    name, equals, url = given.partition("=")
    if not (name and equals and url):
        raise InvalidInput(f"--peer {given}: write NAME=URL, as vllm=http://127.0.0.1:8001", param="peer")
    return name, RestClient(url)
