"""What the engine's thread does where something that was posted to it fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from benchmarks.replacing import Replacing
from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt_engine import prompt_engine
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.scheduler import Scheduler
from kvcommons.errors import InvalidInput
from kvcommons.holder.budget import AttentionBudget
from kvcommons.telemetry.trace import Tracer
from services.decode.batching.engine import decode_engine
from tests.unit.engine.tiny import tiny_core

LONG_S = 10.0


class Around(Replacing):
    def _replace(self) -> None:
        raise AssertionError("no sequence runs")

    def iteration(self, batch: int, timing: IterationTiming) -> None:
        raise AssertionError("no sequence runs")

    def verified(self, drafted: int, accepted: int) -> None:
        raise AssertionError("no sequence runs")

    def ended(self, step: SequenceUpdate) -> None:
        raise AssertionError("no sequence runs")


@pytest.fixture(params=["decode", "prefill"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    core = tiny_core(layers=2)
    keeper = BlockKeeper(core, BlockSaver("engine", buffer_bytes=1 << 20))
    around = Around()
    if request.param == "prefill":
        scheduler = Scheduler(max_queue=1, max_prompts=1)
        prompts = Prompts(
            core, scheduler, chunk_tokens=16, keeper=keeper,
            histories=Histories(core, BlockLoader(lambda _: None)),
            read_buffer=ReadBuffer(layers=2, bytes_max=0), tracer=Tracer.off(),
        )  # fmt: skip
        engine = prompt_engine(core, scheduler, prompts, keeper)
    else:
        engine = _decode(core, keeper, around)
    yield engine
    engine.stop(LONG_S)
    keeper.close()


def _decode(core: Core, keeper: BlockKeeper, around: Around) -> Engine:
    return decode_engine(
        core, scheduler=Scheduler(max_batch=4), may_borrow=False, attend_deadline_s=LONG_S,
        budget=AttentionBudget(1.0), keeper=keeper, callbacks=around, metrics=around,
    )  # fmt: skip


def test_what_was_posted_behind_something_that_fails_is_answered(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.post(_fails)
    answer = engine.survey()  # both are there when the engine begins
    with caplog.at_level(logging.ERROR):
        engine.start()
        assert answer.result(LONG_S) == []
    assert "the engine's loop failed" in caplog.text


def _fails() -> None:
    raise InvalidInput("as a mistake in the engine would")


def test_what_fails_for_ever_does_not_take_a_core(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop waits for something to be posted before it tries again."""
    tries = []

    def fail(self: Engine) -> float | None:
        tries.append(1)
        raise InvalidInput("as a mistake in the engine would")

    monkeypatch.setattr(Engine, "_advance", fail)
    with caplog.at_level(logging.ERROR):
        engine.start()
        for number in range(3):
            assert engine.survey().result(LONG_S) == []
            assert len(tries) <= number + 1
