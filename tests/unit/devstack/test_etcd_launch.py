"""Which etcd is launched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from devstack import etcd


def fake(folder: Path, version: str) -> Path:
    folder.mkdir()
    program = folder / "etcd"
    program.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    program.chmod(0o755)
    return program


def test_the_newest_on_path_that_is_safe(tmp_path: Path) -> None:
    unsafe, older, newest = (
        fake(tmp_path / name, version) for name, version in (("a", "3.5.2"), ("b", "3.5.9"), ("c", "3.5.16"))
    )
    silent = fake(tmp_path / "d", "none")

    def path(*programs: Path) -> dict[str, str]:
        return {"PATH": os.pathsep.join(str(program.parent) for program in programs)}

    assert etcd.binary(path(silent, unsafe, older, newest)) == newest
    packaged = etcd.binary(path(unsafe, silent))
    assert packaged not in (unsafe, silent)
    done = subprocess.run([packaged, "--version"], capture_output=True, text=True, check=True)
    assert "etcd Version: 3.5" in done.stdout


def test_it_listens_on_sockets_alone_and_its_endpoint_is_the_ledgers() -> None:
    folder = "/run/kv"
    environ = {"PATH": "", "ETCD_LISTEN_CLIENT_URLS": "http://0.0.0.0:2379", "HOME": "/"}
    plan = etcd.plan(Path("/data/etcd"), Path(folder), environ)
    urls = [part.split("=", 1)[1] for part in plan.command if "-urls=" in part]
    assert urls
    assert all(url.startswith("unix://") for url in urls)
    assert plan.folder == Path(folder)
    assert "ETCD_LISTEN_CLIENT_URLS" not in plan.environment
    assert etcd.endpoint(Path(folder)) == f"unix:{folder}/etcd"
