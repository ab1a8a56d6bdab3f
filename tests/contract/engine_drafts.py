"""Drafts as a test wants them, right and wrong ones, and what became of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvcommons.engine.drafts import speculation
from kvcommons.engine.drafts.model import DraftModel
from kvcommons.engine.iteration import Iteration
from tests.contract.engine_stack import Stack
from tests.waiting import eventually

MOST = 6  # drafts of a sequence in an iteration


@contextmanager
def foreseen(texts: Sequence[Sequence[int]], wrong: float, most: int = MOST) -> Iterator[None]:
    """Drafts are what comes in one of these texts, but for a part of them, which is wrong."""
    draw = random.Random(3)

    def next_(self: Any, count: int) -> tuple[list[int], list[float]]:
        tokens = self._sequence.tokens.tolist()
        for text in texts:
            if len(tokens) < len(text) and list(text[: len(tokens)]) == tokens:
                coming = text[len(tokens) : len(tokens) + most]
                return [1 if draw.random() < wrong else token for token in coming], [0.5] * len(coming)
        return [], []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation._SequenceDrafts, "next", next_)
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Rows of each iteration meanwhile."""
    rows: list[int] = []
    run = Iteration.run

    def counting(iteration: Iteration, *between_layers: Any) -> Any:
        rows.append(iteration.rows)
        return run(iteration, *between_layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iteration, "run", counting)
        yield rows


def outcome(engines: Stack, name: str = "decode") -> tuple[float, float]:
    """Drafts of an instance that were accepted, and rejected."""
    registry = engines.processes[name].telemetry.registry
    of = "kvcommons_draft_tokens_total"
    found = [registry.get_sample_value(of, {"outcome": one}) or 0.0 for one in ("accepted", "rejected")]
    return found[0], found[1]


async def nothing_is_left(engines: Stack, loaded: Sequence[DraftModel]) -> None:
    """Neither in the decode instance nor in draft models."""
    await engines.idle("decode")
    for one in loaded:
        await eventually(lambda one=one: not (one._core.allocator.in_use or one._followed or one._given_up))
