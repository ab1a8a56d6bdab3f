"""Schemathesis drives a server by a specification: examples at every bound, random bodies, and calls that
follow each other. It is no dependency of the project: it gets an environment of its own, once."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.machine import scaled
from tests.system.clients.environments import python_environment

VERSION = "4.32.5"
# A model's name is asked for everywhere, and no random text is one.
_HOOKS = """
import schemathesis

MODEL = {model!r}


@schemathesis.hook
def map_body(context, body):
    return {{**body, "model": MODEL}} if isinstance(body, dict) and "model" in body else body


@schemathesis.hook
def map_path_parameters(context, parameters):
    return {{**parameters, "model": MODEL}} if parameters and "model" in parameters else parameters
"""


def schemathesis_command() -> str:
    """Raises NoClients where the package index cannot be reached."""
    environment = python_environment(f"schemathesis=={VERSION}\n")
    return str(environment.folder / "bin" / "schemathesis")


def drive(
    command: str,
    specification: str,
    url: str,
    folder: Path,
    *,
    model: str,
    checks: Iterable[str],
    phases: str,
    seconds: float,
) -> tuple[int, str]:
    """The tester's exit status and what it said: what is wrong, and how each can be repeated."""
    (folder / "hooks.py").write_text(_HOOKS.format(model=model))
    options = [f"--max-time={int(scaled(seconds))}", f"--phases={phases}", f"--checks={','.join(checks)}"]
    options += ["--continue-on-failure", "--max-failures=50", f"--request-timeout={int(scaled(30))}"]
    options += ["--suppress-health-check=all", "--no-color", f"--url={url}"]
    done = subprocess.run(
        [command, "run", specification, *options],
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks.py"},
        capture_output=True,
        text=True,
        timeout=scaled(3 * seconds + 120),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def part_of(specification: Path, operations: Mapping[str, Iterable[str]], folder: Path) -> str:
    """A large specification with these operations only, by path and method; its file."""
    whole: dict[str, Any] = json.loads(specification.read_text())
    whole["paths"] = {
        path: {method: whole["paths"][path][method] for method in methods}
        for path, methods in operations.items()
    }
    whole["security"] = []
    written = folder / "specification.json"
    written.write_text(json.dumps(whole))
    return str(written)
