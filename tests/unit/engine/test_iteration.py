"""What fails of one group of an iteration's rows is no other group's failure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.token_rows import TokenRows
from kvcommons.holder.budget import AttentionBudget
from tests.unit.engine.test_forward import LLAMA, core_of, sequences


def groups(core: Core) -> list[TokenRows]:
    remote = RemoteAttention(core.layout, core.backend, AttentionBudget(1.0))
    composer = Composer(core, remote, attend_deadline_s=1.0)
    batches = [composer.batch(None, [one]) for one in sequences(core, 20, 30)]
    return [composer.rows(batch) for batch in batches if batch is not None]


def tokens(made: list[Any]) -> list[int]:
    return [one.token for one in made]


@pytest.mark.parametrize("step", ["open", "attend", "sampling", "wanted_logprobs"])
def test_a_group_that_fails_ends_alone(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        core = core_of(LLAMA, "float32")
        undisturbed = Iteration(core, groups(core)).run()

        core = core_of(LLAMA, "float32")
        failing, other = groups(core)
        error = ValueError("of one group")
        closed: list[int] = []

        def fails(*_: object, **__: object) -> None:
            raise error

        def watched(number: int, close: Callable[[], None]) -> None:
            closed.append(number)
            close()

        monkeypatch.setattr(failing, step, fails)
        for number, group in enumerate((failing, other)):
            monkeypatch.setattr(group, "close", partial(watched, number, group.close))
        iteration = Iteration(core, [failing, other])
        made = iteration.run()
    assert iteration.failures == {0: error}
    assert tokens(made[1]) == tokens(undisturbed[1])
    assert not made[0]
    assert sorted(closed) == ([1] if step == "open" else [0, 1])


def test_all_groups_are_closed_though_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(LLAMA, "float32")
    both = groups(core)
    closed: list[int] = []

    def fails() -> None:
        closed.append(len(closed))
        raise ValueError("cannot be closed")

    for group in both:
        monkeypatch.setattr(group, "close", fails)
    iteration = Iteration(core, both)
    with torch.inference_mode(), pytest.raises(ValueError, match="cannot be closed"):
        iteration.run()
    assert closed == [0, 1]
    assert iteration.timing.seconds > 0
