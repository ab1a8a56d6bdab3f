"""A stack of real instances for one test, of a small random model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvcommons.engine.drafts import speculation
from kvcommons.engine.drafts.choice import Candidate, Depth
from kvcommons.engine.drafts.model import DraftModel, load_draft_model
from tests.contract.engine_stack import SlowIterations, Stack, scale_calls
from tests.contract.engine_turns import Reference
from tests.machine import scaled
from tests.unit.model import reference_folders


@pytest.fixture(scope="session")
def engine_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """By the model's kind: its folder, and transformers with its weights. Made once."""
    made: dict[str, tuple[Path, Reference]] = {}

    def make(kind: str) -> tuple[Path, Reference]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            reference_folders.write(folder, kind)
            made[kind] = (folder, Reference(folder))
        return made[kind]

    return make


@pytest.fixture(params=["llama"])
async def engines(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    socket_folder: Path,
    engine_reference: Callable[[str], tuple[Path, Reference]],
) -> AsyncIterator[Stack]:
    """An empty stack: a test starts in it what it needs."""
    scale_calls(monkeypatch)
    stack = Stack(socket_folder, *engine_reference(request.param))
    yield stack
    await stack.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> SlowIterations:
    """Sequences outlast what is done to them meanwhile, which takes as long as the machine is slow."""
    return SlowIterations(monkeypatch, scaled(0.02))


@pytest.fixture
def none_comes_home_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lent stays where it is, though its debtor has room again."""
    monkeypatch.setattr("services.decode.moving.mover.HOMECOMING_S", 3600)


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they cost here, all are verified."""

    def choose(candidates: dict[int, Candidate], *_: Any, **__: Any) -> dict[int, int]:
        return {key: len(one.chances) for key, one in candidates.items()}

    monkeypatch.setattr(speculation, "choose", choose)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch, all_drafts: None) -> list[DraftModel]:
    """Draft models that instances load: whatever it costs here, they are asked for four drafts of each
    sequence, and all are verified."""
    loaded: list[DraftModel] = []

    def load(*arguments: Any, **named: Any) -> DraftModel:
        loaded.append(load_draft_model(*arguments, **named))
        return loaded[-1]

    monkeypatch.setattr(speculation, "draft_depth", lambda *_, **__: Depth(drafts=4, saved_s=1e9))
    monkeypatch.setattr("services.decode.service.load_draft_model", load)
    return loaded
