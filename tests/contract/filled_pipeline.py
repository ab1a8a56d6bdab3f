"""A line of stages in this process in which each has to have an iteration at the same time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcommons.pb import common_pb2
from kvcommons.stages.iteration import StageIteration
from tests.machine import scaled


class FilledPipeline:
    """Each of the next `count` iterations waits in the last of so many `stages` until the first one has begun
    the iteration that is due there meanwhile: the next one of two stages, the one after it of three. Where
    iterations go through the line one after another it waits in vain, and fails. Stages have one rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: int, count: int) -> None:
        self.begun: list[StageIteration] = []  # in the first stage
        self.ended = 0  # in the last one
        self._changed = threading.Condition()
        run = StageIteration.run

        def one_of_a_line(iteration: StageIteration, *between: Any) -> list[list[common_pb2.SampledToken]]:
            layers, model = iteration._core.layers, iteration._core.model
            with self._changed:
                if not layers.start:
                    self.begun.append(iteration)
                    self._changed.notify_all()
                elif layers.stop == model.spec.layers:
                    due = min(self.ended + stages, count)
                    filled = self._changed.wait_for(lambda: len(self.begun) >= due, scaled(20.0))
                    assert filled, f"{len(self.begun)} iterations have begun where {due} are due"
            made = run(iteration, *between)
            if layers.start and layers.stop == model.spec.layers:
                self.ended += 1
            return made

        monkeypatch.setattr(StageIteration, "run", one_of_a_line)
