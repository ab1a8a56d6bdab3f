"""Environments of clients and testers, apart from the product's: a virtual environment for Python's, a folder
with node_modules for JavaScript's. Each is made once and kept in build/clients, by what it has to hold."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.machine import scaled

_HERE = Path(__file__).parent
_KEPT = Path(__file__).parents[3] / "build" / "clients"
_NODE_MAJOR = 20
_INSTALL_S = 600
_RUN_S = 240


class NoClients(Exception):
    """Why there is no environment here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnvironment:
    """`program`: what runs a script; it runs in `folder`, where a script finds its packages."""

    program: str
    folder: Path
    suffix: str

    def run(self, script: str, *arguments: str) -> str:
        """What a script prints. Raises AssertionError where it fails."""
        path = self.folder / f"script-{hashlib.sha256(script.encode()).hexdigest()[:12]}{self.suffix}"
        path.write_text(script)
        done = subprocess.run(
            [self.program, str(path), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=scaled(_RUN_S),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def python_clients() -> ClientEnvironment:
    """Raises NoClients where the package index is not there."""
    return python_environment((_HERE / "requirements.txt").read_text())


def python_environment(requirements: str) -> ClientEnvironment:
    """With these packages, as a requirements file has them. Raises NoClients where the package index is not
    there."""
    folder = _KEPT / f"python-{_digest(requirements + sys.version)}"
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "requirements.txt"
    listed.write_text(requirements)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "--requirement", str(listed)],
    ]
    _make(folder, commands)
    return ClientEnvironment(program=str(python), folder=folder, suffix=".py")


def node_clients() -> ClientEnvironment:
    """Raises NoClients where node, npm or the package index is not there."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NoClients("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < _NODE_MAJOR:
        raise NoClients(f"node {version} is too old: {_NODE_MAJOR} or newer is needed")
    wanted = (_HERE / "package.json").read_text()
    folder = _KEPT / f"node-{_digest(wanted)}"
    if not (folder / "package.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(_HERE / "package.json", folder)
    _make(folder, [[npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]])
    return ClientEnvironment(program=node, folder=folder, suffix=".mjs")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _make(folder: Path, commands: list[list[str]]) -> None:
    """One that was not finished is made again."""
    stamp = folder / ".installed"
    if stamp.is_file():
        return
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=scaled(_INSTALL_S), check=False
            )
        except subprocess.TimeoutExpired:
            raise NoClients(f"{Path(command[0]).name} did not install in time") from None
        if done.returncode != 0:
            raise NoClients(f"the package index does not give what is wanted: {done.stderr.strip()[-300:]}")
    stamp.touch()
