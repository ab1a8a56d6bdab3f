"""kill -9 of a stage of decode, the first one or one behind it, while sequences generate in it: each stream
has the very tokens of an undisturbed one, all blocks come back, and so does the group."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.conftest import slow_tables
from tests.fault.streams import SAMPLINGS, stream, token_ids, until_whole
from tests.system.stack import Stack

WHOLE = {"prefill": 1, "decode": 1, "decode_stage": 1, "kvstore": 1}
STAGES = ("decode-stage-1", "decode")


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("staged")
    with Stack(
        folder, tables=slow_tables(), model=str(slow_model), decode_stages=2, attention_pool=0
    ) as stack:
        yield stack
    stack.assert_gone()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_survive_a_stage(staged: Stack) -> None:
    plain = undisturbed(staged, "plain")
    assert killed_at(staged, STAGES[0], "one", at_piece=40) == plain


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills(staged: Stack) -> None:
    draw, plain = random.Random(5), undisturbed(staged, "plain-of-thirty")
    for number in range(30):
        victim = draw.choice(STAGES)
        assert killed_at(staged, victim, f"{number}-{victim}", at_piece=draw.randrange(1, 150)) == plain


def undisturbed(staged: Stack, session: str) -> list[list[int]]:
    """Tokens of each way to sample."""
    until_whole(staged, WHOLE)
    made = []
    for name, sampling in SAMPLINGS.items():
        stream(staged, f"{session}-{name}", "Tell me about owls.", **sampling)
        made.append(token_ids(staged, f"{session}-{name}"))
    return made


def killed_at(staged: Stack, victim: str, session: str, *, at_piece: int) -> list[list[int]]:
    """The same side by side, while this stage is killed in the middle of the first stream."""
    until_whole(staged, WHOLE)
    pid, killed = staged.pid(victim), threading.Event()

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            os.kill(pid, signal.SIGKILL)

    def say(name: str) -> list[int]:
        disturb = kill if name == "greedy" else None
        stream(
            staged, f"{session}-{name}", "Tell me about owls.", disturb, at_piece=at_piece, **SAMPLINGS[name]
        )
        return token_ids(staged, f"{session}-{name}")

    with ThreadPoolExecutor(len(SAMPLINGS)) as threads:
        made = list(threads.map(say, SAMPLINGS))
    assert killed.is_set()
    until_whole(staged, WHOLE)
    for name in ("prefill", "decode"):
        staged.until(lambda name=name: staged._is_idle(name), 20.0, f"{name} holds blocks")
    return made
