"""Coding agents that people have, in their own programs, on a real stack: what one conversation's second
question computes, of a prompt that is nearly all instructions, tools and history."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvcommons.model.synthetic import random_config, write_random_folder
from kvcommons.model.synthetic_tokenizer import EOS_ID
from tests.machine import scaled
from tests.system.clients.environments import NoClients, node_clients
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WINDOW = 131_072  # their instructions and tools take 50,000 tokens of this tokenizer
QUESTIONS = ("Why does forecast.py give wrong means?", "And what is wrong with its name?")
# Of the second question's prompt: what is new is the question, and what stands behind the last whole block.
FOUND_MIN = 0.95


@pytest.fixture(scope="module")
def programs() -> Path:
    """Where npm put them."""
    try:
        return node_clients().folder / "node_modules"
    except NoClients as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("coding")
    tables: dict[str, dict[str, Any]] = {
        name: {**table, "capacity_tokens": WINDOW} for name, table in FLOAT32.items()
    }
    with Stack(folder / "stack", tables=tables, model=str(laconic(folder / "coder"))) as stack:
        yield stack
        stack.assert_no_block_is_held()
    stack.assert_gone()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with something to ask about."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "forecast.py").write_text("def mean(a, b):\n    return (a - b) / 2\n")
    return folder


def laconic(folder: Path) -> Path:
    """A random model whose answers end after a few tokens: of thousands of tokens two are ends, and mostly
    one of them is the likeliest, for their rows are large and opposed."""
    config = random_config("7m") | {"max_position_embeddings": WINDOW, "eos_token_id": [EOS_ID, 0]}
    write_random_folder(folder, config)
    weights = load_file(folder / "model.safetensors")
    rows = weights["lm_head.weight"]
    rows[EOS_ID] *= 8
    rows[0] = -rows[EOS_ID]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ran(command: list[str], folder: Path, **variables: str) -> str:
    """What a program prints, with nothing of this machine's in its home."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(400),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_claude_code(stack: Stack, programs: Path, work: Path) -> None:
    program = programs / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
    if not program.is_file():
        pytest.skip("npm has no Claude Code for this machine")
    answers: list[dict[str, Any]] = []
    for question in QUESTIONS:
        goes_on = ["--continue"] if answers else []
        printed = ran(
            [str(program), "--model", "coder", "--output-format", "json", *goes_on, "-p", question],
            work,
            ANTHROPIC_BASE_URL=stack.url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        answers.append(json.loads(printed))
    assert not any(answer["is_error"] for answer in answers)
    usage = answers[1]["usage"]
    found, computed = usage["cache_read_input_tokens"], usage["input_tokens"]
    print(f"Claude Code: {found} of {found + computed} tokens came from cache")
    assert found >= FOUND_MIN * (found + computed)
    assert stack.client.session(answers[1]["session_id"])["version"] >= 1


def test_codex(stack: Stack, programs: Path, work: Path) -> None:
    program = programs / ".bin" / "codex"
    if not program.exists():
        pytest.skip("npm has no Codex")
    settings = {
        "model": '"coder"',
        "model_provider": '"kvcommons"',
        "model_providers.kvcommons.name": '"kvcommons"',
        "model_providers.kvcommons.base_url": f'"{stack.v1}"',
        "model_providers.kvcommons.wire_api": '"responses"',
    }
    given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    events: list[dict[str, Any]] = []
    usages: list[dict[str, int]] = []
    for question in QUESTIONS:
        goes_on = ["resume", "--last"] if events else []
        printed = ran(
            [str(program), "exec", *given, "--skip-git-repo-check", "--json", *goes_on, question], work
        )
        events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        assert events[-1]["type"] == "turn.completed", events
        usages.append(events[-1]["usage"])  # of the whole thread so far
    found, prompt = (usages[1][name] - usages[0][name] for name in ("cached_input_tokens", "input_tokens"))
    print(f"Codex: {found} of {prompt} tokens came from cache")
    assert found >= FOUND_MIN * prompt
    thread = next(event["thread_id"] for event in events if event["type"] == "thread.started")
    assert stack.client.session(thread)["version"] >= 1
