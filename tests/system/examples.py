"""Examples in documents, run against a real stack."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.machine import scaled
from tests.system.stack import Stack

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"


def examples(document: str, language: str) -> list[str]:
    """Of a document, named by its path in the repository; there is at least one."""
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert found, f"{document} has no example in {language}"
    return found


def run_python(example: str, stack: Stack) -> str:
    """What it prints."""
    return _run([sys.executable, "-c", example.replace(ADDRESS, stack.url)])


def run_shell(example: str, stack: Stack) -> str:
    """What it prints."""
    return _run(["bash", "-ec", example.replace(ADDRESS, stack.url)])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
