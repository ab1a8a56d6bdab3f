"""`kvcommons chat` and `kvcommons status` against a real stack, and how soon the command line answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.machine import scaled
from tests.system.stack import Stack

ROOT = Path(__file__).parents[2]
START_S_MAX = scaled(0.3)
NOWHERE = "http://127.0.0.1:9"


def kvcommons(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "devstack", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        input=text,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def test_chat_shows_what_each_turn_took(stack: Stack) -> None:
    done = kvcommons(
        "chat",
        "--url",
        stack.url,
        "--session",
        "terminal",
        text="My goat is called Mirbo.\nWhat is my goat called?\n",
    )
    assert done.returncode == 0, done.stderr
    figures = r"\[first token \d+ ms, \d+ tokens/s, (\d+) of (\d+) prompt tokens cached\]"
    cached = [int(found[1]) for found in re.finditer(figures, done.stdout)]
    assert len(cached) == 2
    assert cached[1] >= 16
    assert "terminal is a new session" in done.stdout
    again = kvcommons("chat", "--url", stack.url, "--session", "terminal")
    assert "user> My goat is called Mirbo." in again.stdout


def test_status_shows_services_and_sessions(stack: Stack) -> None:
    stack.client.say("Hello!", "shown", max_tokens=4)
    done = kvcommons("status", "--url", stack.url)
    assert done.returncode == 0, done.stderr
    for word in (
        "router",
        "prefill",
        "decode",
        "attention_pool",
        "kvstore",
        "ready",
        "dram",
        "disk",
        "sessions",
    ):
        assert word in done.stdout, word
    assert re.search(r"decode\S*: products by (native|onednn)", " ".join(done.stdout.split())), done.stdout


def test_status_is_watched_without_a_terminal(stack: Stack) -> None:
    """A table each second, each with its time and as soon as it is made, until Ctrl-C."""
    command = [sys.executable, "-m", "devstack", "status", "--watch", "--url", stack.url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        silent = threading.Timer(scaled(20), watching.kill)
        silent.start()
        times = []
        for line in watching.stdout:
            if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}\n", line):
                times.append(line)
                assert next(watching.stdout).split() == ["services"]
            if len(times) == 3:
                watching.send_signal(signal.SIGINT)
                break
        assert watching.wait(scaled(20)) == 0, "it writes nothing"
        silent.cancel()
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("command", ["chat", "status"])
def test_no_server_is_a_clear_error(command: str) -> None:
    done = kvcommons(command, "--url", NOWHERE)
    assert done.returncode == 1
    assert re.search(r"start one with `.* up`", done.stderr)


def test_the_command_line_starts_at_once() -> None:
    times = []
    for _ in range(5):
        started = time.monotonic()
        assert "up" in kvcommons("--help").stdout
        times.append(time.monotonic() - started)
    assert min(times) < START_S_MAX
