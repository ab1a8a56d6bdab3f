"""kill -9 of a pipeline stage while a prompt computes in it: the turn has the very tokens of an undisturbed
run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.fault.conftest import slow_tables
from tests.fault.streams import until_whole
from tests.machine import scaled
from tests.system.stack import Stack

pytestmark = pytest.mark.slow
WORDS = " ".join(f"My friend number {i} likes the colour blue." for i in range(60))
ROUNDS = 4


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("staged")
    with Stack(folder, tables=slow_tables(), model=str(slow_model), stages=3, attention_pool=0) as stack:
        yield stack
    stack.assert_gone()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["prefill-stage-1", "prefill-stage-2", "prefill"])
def test_a_stage_dies_while_it_computes(staged: Stack, victim: str) -> None:
    wanted = {"prefill": 1, "prefill_stage": 2, "decode": 1, "kvstore": 1}
    until_whole(staged, wanted)
    plain = staged.client.say(WORDS, f"plain-{victim}", reuse=False, max_tokens=40, temperature=0.0)
    killed = 0
    for number in range(ROUNDS):
        until_whole(staged, wanted)
        pid, inspect, ended = staged.pid(victim), staged.inspector("prefill"), threading.Event()
        hit = threading.Event()

        def kill_at_work(
            pid: int = pid, inspect=inspect, ended=ended, hit=hit, wait_s: float = 0.02 * number
        ) -> None:
            until = time.monotonic() + scaled(20)
            while time.monotonic() < until and not ended.is_set():
                try:
                    if not inspect().users:
                        continue
                except grpc.RpcError:
                    return
                time.sleep(wait_s)
                hit.set()
                os.kill(pid, signal.SIGKILL)
                return

        killer = threading.Thread(target=kill_at_work)
        killer.start()
        try:
            turn = staged.client.say(WORDS, f"{victim}-{number}", reuse=False, max_tokens=40, temperature=0.0)
        finally:
            ended.set()
            killer.join()
        killed += hit.is_set()
        assert turn.text == plain.text
    assert killed, "none was at work"
    until_whole(staged, wanted)
    for name in ("prefill", "decode"):
        staged.until(lambda name=name: staged._is_idle(name), 20.0, f"{name} holds blocks")
