"""The command line answers at once; services start in any order, and drain when they are told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack.rest import Turn
from tests.machine import scaled
from tests.system.by_hand import DRAIN_S, ByHand
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMMAND_S_MAX = scaled(0.5)
HEALTHY_S_MAX = 60.0
ANSWER_TOKENS = 300  # decode has half of the time to drain for what it generates


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["chat", "--help"]])
def test_the_command_line_answers_at_once(arguments: list[str]) -> None:
    def seconds() -> float:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "devstack", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=scaled(30),
        )
        return time.monotonic() - started

    assert min(seconds() for _ in range(3)) < COMMAND_S_MAX  # others use the machine, too


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    stack = ByHand(tmp_path)
    try:
        yield stack
    finally:
        stack.end()


def test_services_start_in_any_order_and_drain_at_a_signal(by_hand: ByHand) -> None:
    """The last one first: each comes up and waits for what it needs, which is there only later."""
    for name in ("router", "attention_pool", "decode", "prefill", "kvstore"):
        by_hand.start(name)
    assert by_hand.client.reachable()
    assert not by_hand.client.healthy()
    by_hand.start("ledger")
    by_hand.start("etcd")
    wait_until(by_hand.client.healthy, "the stack is not healthy", within_s=HEALTHY_S_MAX)
    assert by_hand.client.say("My cat is called Zuzu.", "s").finish_reason == "stop"

    # In the middle of a stream: it ends as it would have.
    answer = by_hand.client.chat("Tell me a story.", "s", max_tokens=ANSWER_TOKENS, ignore_eos=True)
    next(answer)
    exits: dict[str, tuple[int, float]] = {}
    draining = [
        threading.Thread(target=lambda name=name: exits.update({name: by_hand.stop(name)}), name=name)
        for name in ("router", "prefill", "decode")
    ]
    for thread in draining:
        thread.start()
    rest = list(answer)
    assert isinstance(rest[-1], Turn)
    assert (rest[-1].completion_tokens, rest[-1].finish_reason) == (ANSWER_TOKENS, "length")
    for thread in draining:
        thread.join(DRAIN_S + scaled(6))
    for name, done in (("router", "answered"), ("decode", "generated")):
        said = by_hand.said(name)
        assert said.index('"draining"') < said.rindex(f'"{done}"'), said
    # The ledger without etcd, the store and the pool without a ledger.
    for name in ("etcd", "ledger", "kvstore", "attention_pool"):
        exits[name] = by_hand.stop(name)
    for name, (status, seconds) in exits.items():
        assert status == (-signal.SIGTERM if name == "etcd" else 0), (name, by_hand.said(name))
        assert seconds < DRAIN_S, exits
