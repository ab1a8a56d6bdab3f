"""What the engine's thread does where something that was posted to it fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from benchmarks.replacing import Replacing
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.callbacks import Step
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.errors import InvalidInput
from kvcommons.holder.budget import AttentionBudget
from kvcommons.placement.auto import Rates
from services.decode.engine import DecodeEngine
from tests.unit.decode.tiny import tiny_core

LONG_S = 10.0


class Around(Replacing):
    def _replace(self) -> None:
        raise AssertionError("no sequence runs")

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        raise AssertionError("no sequence runs")

    def ended(self, step: Step) -> None:
        raise AssertionError("no sequence runs")


@pytest.fixture
def engine() -> Iterator[DecodeEngine]:
    core = tiny_core(layers=2)
    keeper = BlockKeeper(core, BlockSaver("engine", buffer_bytes=1 << 20))
    around = Around()
    engine = DecodeEngine(
        core, max_batch=4, may_borrow=False, attend_deadline_s=LONG_S, rates=Rates(),
        budget=AttentionBudget(1.0), keeper=keeper, callbacks=around, metrics=around,
    )  # fmt: skip
    yield engine
    engine.stop(LONG_S)
    keeper.close()


def test_what_was_posted_behind_something_that_fails_is_answered(
    engine: DecodeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine._post(_fails)
    answer = engine.survey()  # both are there when the engine begins
    with caplog.at_level(logging.ERROR):
        engine.start()
        assert answer.result(LONG_S) == []
    assert "the engine's loop failed" in caplog.text


def _fails() -> None:
    raise InvalidInput("as a mistake in the engine would")
