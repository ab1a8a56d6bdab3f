"""What the README shows is what happens: its examples run, against a real stack."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import scaled
from tests.system.stack import Stack

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8000"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", examples("python"))
def test_python_examples_recall(stack: Stack, example: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", example.replace(ADDRESS, stack.url)],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    recalled, cached = done.stdout.strip().splitlines()
    assert "Amara" in recalled
    assert int(cached.split()[0]) > 0


@pytest.mark.parametrize("example", examples("bash"))
def test_shell_examples_answer(stack: Stack, example: str) -> None:
    done = subprocess.run(
        ["bash", "-ec", example.replace(ADDRESS, stack.url)],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "data: [DONE]" in done.stdout
    assert '"id": "letters-from-home"' in done.stdout.replace('":"', '": "')
    assert '"error"' not in done.stdout


def test_examples_are_there() -> None:
    assert examples("python")
    assert examples("bash")
