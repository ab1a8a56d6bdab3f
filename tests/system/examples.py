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


def sections(document: str) -> dict[str, tuple[str, str]]:
    """Language and text of the one example that is in a document's section, by its heading."""
    text = (ROOT / document).read_text()
    found = re.findall(r"^## ([^\n]*)\n((?:(?!^## ).*\n)*)", text, re.MULTILINE)
    examples = {heading: re.findall(r"```(\w+)\n(.*?)```", body, re.DOTALL) for heading, body in found}
    assert all(len(one) <= 1 for one in examples.values()), f"{document} has sections with several examples"
    return {heading: one[0] for heading, one in examples.items() if one}


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
