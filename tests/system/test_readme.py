"""What the README and the quickstart show is what happens: their examples run, against a real stack."""

from __future__ import annotations

import json

import pytest

from tests.system.examples import examples, run_python, run_shell
from tests.system.stack import Stack


def test_python_examples_recall_and_call(stack: Stack) -> None:
    session, call = (run_python(one, stack) for one in examples("README.md", "python"))
    recalled, cached = session.strip().splitlines()
    assert "Amara" in recalled
    assert int(cached.split()[0]) > 0
    name, arguments = call.strip().split(maxsplit=1)
    assert name == "remember_pet"
    assert json.loads(arguments)["kind"] in ("cat", "dog", "horse")


@pytest.mark.parametrize("example", examples("README.md", "bash"))
def test_shell_examples_answer(stack: Stack, example: str) -> None:
    printed = run_shell(example, stack)
    assert "data: [DONE]" in printed
    assert '"id": "letters-from-home"' in printed.replace('":"', '": "')
    assert '"error"' not in printed


def test_the_quickstart_chats_keeps_a_session_and_calls_a_function(stack: Stack) -> None:
    chat, session, call = (run_python(one, stack) for one in examples("docs/quickstart.md", "python"))
    assert "Bella" in chat
    reported, asked = session.strip().splitlines()
    assert "Bella" in asked
    assert "(0 of" in reported
    assert "(0 of" not in asked
    assert call.startswith("remember_pet {'kind': ")
