"""A thousand conversations through a store with DRAM for a tenth of them: each answer has to be its own."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demo import MODEL_DIR
from devstack.rest import Turn
from kvcommons.model.spec import ModelSpec, model_info
from kvcommons.rblock.layout import Layout
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

SESSIONS = 1000
CONCURRENCY = 16
BLOCK_TOKENS = 16
# A session has about six full blocks in the end: DRAM for a tenth of them.
BLOCKS_A_SESSION = 6
SYLLABLES = ("ba", "ko", "mi", "ru", "ze", "lo", "ta", "ni", "fu", "sa", "pe", "do")


def conversation(number: int) -> list[str]:
    """Three turns about a fact that is this session's alone."""
    draw = random.Random(number)
    name = "".join(draw.choice(SYLLABLES) for _ in range(3)).capitalize()
    pet = draw.choice(("cat", "dog", "parrot"))
    return [f"My {pet} is called {name}.", "How are you today?", f"What is my {pet} called?"]


def hold(stack: Stack, number: int, prefix: str, **parameters: Any) -> list[Turn]:
    return [
        stack.client.say(message, f"{prefix}-{number}", temperature=0, max_tokens=24, **parameters)
        for message in conversation(number)
    ]


def full_blocks_tokens(turn: Turn) -> int:
    """What the turn after this one can reuse: of n tokens the last has no KV yet."""
    return (turn.prompt_tokens + turn.completion_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_thousand_sessions_with_dram_for_a_tenth(tmp_path: Path) -> None:
    spec = ModelSpec.read(MODEL_DIR)
    layout = Layout.of(model_info("demo", spec, b"\0" * 32, "float32", BLOCK_TOKENS))
    dram_bytes = SESSIONS // 10 * BLOCKS_A_SESSION * layout.block_bytes
    # Little device memory, so that a turn's history has to come from the store; and it does, although the
    # demo model computes these few blocks sooner than a busy disk gives them.
    small = {"capacity_tokens": 4096}
    tables: dict[str, dict[str, Any]] = {
        **FLOAT32,
        "prefill": {**FLOAT32["prefill"], **small, "loads": "always"},
        "decode": {**FLOAT32["decode"], **small},
        "kvstore": {"dram_bytes": dram_bytes},
    }
    stack = Stack(tmp_path, tables=tables)
    with stack, ThreadPoolExecutor(CONCURRENCY) as pool:
        turns: dict[int, list[Turn]] = {number: [] for number in range(SESSIONS)}
        # Turn by turn over all sessions: between two turns of a session lie a thousand others.
        for index in range(3):
            lock = threading.Lock()

            def take(number: int, index: int = index, lock: threading.Lock = lock) -> None:
                message = conversation(number)[index]
                turn = stack.client.say(message, f"load-{number}", temperature=0, max_tokens=24)
                with lock:
                    turns[number].append(turn)

            list(pool.map(take, range(SESSIONS)))
        store = stack.client.get("/v1/status")["store"]
        reference = list(pool.map(lambda number: hold(stack, number, "plain", reuse=False), range(SESSIONS)))
        wrong = [
            number
            for number in range(SESSIONS)
            if [turn.text for turn in turns[number]] != [turn.text for turn in reference[number]]
        ]
        assert wrong == []
        assert all(turn.cached_tokens == 0 for answers in reference for turn in answers)
        cached = sum(answers[2].cached_tokens for answers in turns.values())
        reusable = sum(full_blocks_tokens(answers[1]) for answers in turns.values())
        print(f"cached {cached} of {reusable} reusable tokens; store {store}")
        # Nearly all, and nine tenths of it from disk: what loads side by side has to find room in DRAM.
        assert cached > 0.95 * reusable
        assert store["dram_capacity_blocks"] <= SESSIONS // 10 * BLOCKS_A_SESSION
        assert store["disk_blocks"] > 5 * store["dram_blocks"]
        assert store["corrupt_blocks"] == 0
        stack.assert_no_block_is_held()
    stack.assert_gone()
