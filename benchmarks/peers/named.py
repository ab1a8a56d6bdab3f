"""`--peer NAME=URL`: servers that run already, of benchmarks that compare with them."""

from __future__ import annotations

import argparse

from devstack.rest import RestClient
from kvcommons.errors import InvalidInput


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs, with the same model",
    )


def named_client(given: str) -> tuple[str, RestClient]:
    """Of one such option. Raises InvalidInput."""
    name, equals, url = given.partition("=")
    if not (name and equals and url):
        raise InvalidInput(f"--peer {given}: write NAME=URL, as vllm=http://127.0.0.1:8001", param="peer")
    return name, RestClient(url)
