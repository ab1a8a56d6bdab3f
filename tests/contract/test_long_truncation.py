"""A session of the 7M model that outgrows a window of 16K tokens, in stages and ranks and over holders:
tokens and log-probabilities are those of a replay of all tokens and truncations."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from kvcommons.model.synthetic import random_config, write_random_folder
from tests.contract.engine_stack import BLOCK, Stack, scale_calls
from tests.contract.test_engine_truncation import NEW, Session, Shapes, stays_in_use, stays_in_use_in_shapes
from tests.contract.truncation_reference import TruncatedReference

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(900)]

WINDOW = 16_384
TURNS = (16_000, 0), (600, 40), (300, 0), (200, 30)
ENGINE = {"capacity_tokens": 2 * WINDOW}


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 8000) for _ in range(count)]


@pytest.fixture
async def session(
    tmp_path: Path, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Session]:
    in_sight = list(accumulate(new + NEW - drop * BLOCK for new, drop in TURNS))
    for (_, drop), length in zip(TURNS, in_sight, strict=True):
        assert length <= WINDOW
        assert (length + drop * BLOCK > WINDOW) == bool(drop), "what is dropped has to be"
    scale_calls(monkeypatch)
    folder = tmp_path / "7m"
    config = random_config("7m") | {"max_position_embeddings": WINDOW}
    write_random_folder(folder, config, dtype="float32")
    nobody: Any = None
    stack = Stack(socket_folder, folder, nobody)
    yield Session(stack, TruncatedReference(folder), draw=words, call_s=300.0)
    await stack.close()


@pytest.mark.parametrize(
    "shapes",
    [
        [((1, 1), (1, 1)), ((2, 1), (4, 1))],
        [((4, 1), (2, 1)), ((1, 1), (1, 1))],
        [((1, 2), (1, 2)), ((2, 2), (2, 2))],
        [((2, 2), (1, 2)), ((1, 2), (2, 2))],
    ],
    ids=str,
)
async def test_truncated_contexts_of_16k_tokens_in_stages_and_ranks(
    session: Session, shapes: list[Shapes]
) -> None:
    """The second ones load their heads, and their layers, of what is left."""
    await stays_in_use_in_shapes(session, shapes, TURNS, engine=ENGINE)


@pytest.mark.parametrize(("stages", "tensor", "holders"), [(1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 2, 2)])
async def test_truncated_contexts_of_16k_tokens_over_holders(
    session: Session, stages: int, tensor: int, holders: int
) -> None:
    """Stages and ranks that generate have their part of each holder's."""
    engines, share = session.engines, -(-WINDOW // holders)
    heads = [(group, f"{part}/{tensor}") for group in "abc"[: holders - 1] for part in range(tensor)]
    pools = [f"pool-{number}" for number in range((holders - 1) * tensor)]
    await engines.lenders(*[2 * share // BLOCK for _ in pools], heads=heads if tensor > 1 else [])
    store, prefill = await engines.kvstore(), await engines.staged(stages, loads="always", engine=ENGINE)
    placed: dict[str, Any] = {"placement": "grow", "holder_tokens": share, "attend_deadline_s": 20.0}
    decodes = [
        await engines.staged_decode(stages, name, tensor=tensor, engine=ENGINE, **placed)
        for name in ("first", "fresh")
    ]
    await stays_in_use(session, 2, store, [(prefill, decode) for decode in decodes], TURNS)
    await engines.idle("first", "fresh", *pools)
