"""kill -9 of a process of decode in stages, in ranks, or both (then of prefill's, too), the first one or one
beside it, or of a pool where its sequences lie, while they generate: each stream has the very tokens of an
undisturbed one, all blocks come back, and so does the group."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fault.conftest import slow_tables
from tests.fault.streams import SAMPLINGS, stream, token_ids, until_whole
from tests.system.stack import Stack

SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stages": ({"decode_stages": 2}, ("decode-stage-1", "decode")),
    "ranks": ({"decode_tensor": 2}, ("decode-rank-1", "decode")),
    "both": (
        {"stages": 2, "tensor": 2, "decode_stages": 2, "decode_tensor": 2},
        (
            "decode-stage-1-rank-1",
            "decode-stage-1",
            "decode-rank-1",
            "decode",
            "prefill",
            "prefill-stage-1",
            "prefill-rank-1",
        ),
    ),
    # Whose sequences lie on pools, or on a head group of them.
    "pools": (
        {"decode_stages": 2, "attention_pool": 2},
        ("attention_pool-1", "decode-stage-1", "attention_pool-2", "decode"),
    ),
    "heads": (
        {"decode_stages": 2, "decode_tensor": 2, "attention_pool": 2},
        ("attention_pool-1", "decode-stage-1-rank-1", "attention_pool-2", "decode-rank-1", "decode"),
    ),
}


@dataclass(frozen=True, slots=True)
class Staged:
    stack: Stack
    victims: tuple[str, ...]
    whole: dict[str, int]  # ready instances, by service


@pytest.fixture(scope="module", params=SHAPES)
def staged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, slow_model: Path
) -> Iterator[Staged]:
    shape, victims = SHAPES[request.param]
    members = {
        "prefill_stage": shape.get("stages", 1) * shape.get("tensor", 1) - 1,
        "decode_stage": shape.get("decode_stages", 1) * shape.get("decode_tensor", 1) - 1,
    }
    folder, pools = tmp_path_factory.mktemp("staged"), shape.get("attention_pool", 0)
    placed: dict[str, object] = {"placement": "offload"} if pools else {}
    tables = slow_tables(decode=placed, up={"heads": request.param == "heads"})
    with Stack(folder, tables=tables, model=str(slow_model), **({"attention_pool": 0} | shape)) as stack:
        whole = {"prefill": 1, "decode": 1, "kvstore": 1, "attention_pool": pools, **members}
        yield Staged(stack, victims, whole)
    stack.assert_gone()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_survive_a_stage(staged: Staged) -> None:
    plain = undisturbed(staged, "plain")
    assert killed_at(staged, staged.victims[0], "one", at_piece=40) == plain


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills(staged: Staged) -> None:
    draw, plain = random.Random(5), undisturbed(staged, "plain-of-thirty")
    for number in range(30):
        victim = draw.choice(staged.victims)
        assert killed_at(staged, victim, f"{number}-{victim}", at_piece=draw.randrange(1, 150)) == plain


def undisturbed(staged: Staged, session: str) -> list[list[int]]:
    """Tokens of each way to sample."""
    until_whole(staged.stack, staged.whole)
    made = []
    for name, sampling in SAMPLINGS.items():
        stream(staged.stack, f"{session}-{name}", "Tell me about owls.", **sampling)
        made.append(token_ids(staged.stack, f"{session}-{name}"))
    return made


def killed_at(staged: Staged, victim: str, session: str, *, at_piece: int) -> list[list[int]]:
    """The same side by side, while this process is killed in the middle of the first stream."""
    until_whole(staged.stack, staged.whole)
    pid, killed = staged.stack.pid(victim), threading.Event()

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            os.kill(pid, signal.SIGKILL)

    def say(name: str) -> list[int]:
        disturb = kill if name == "greedy" else None
        stream(
            staged.stack,
            f"{session}-{name}",
            "Tell me about owls.",
            disturb,
            at_piece=at_piece,
            **SAMPLINGS[name],
        )
        return token_ids(staged.stack, f"{session}-{name}")

    with ThreadPoolExecutor(len(SAMPLINGS)) as threads:
        made = list(threads.map(say, SAMPLINGS))
    assert killed.is_set()
    until_whole(staged.stack, staged.whole)
    for name in ("prefill", "decode", *(name for name in staged.victims if name.startswith("attention"))):
        staged.stack.until(lambda name=name: staged.stack._is_idle(name), 20.0, f"{name} holds blocks")
    return made
