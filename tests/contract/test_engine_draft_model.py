"""A draft model changes how many tokens an iteration brings, and no token: beside transformers, and beside
instances that verify nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvcommons.engine.drafts import model as draft_models
from kvcommons.engine.drafts.model import DraftModel
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import InvalidInput, ModelNotFound
from tests.contract.engine_drafts import MOST, counted, foreseen, nothing_is_left, outcome
from tests.contract.engine_stack import BLOCK, Stack, settings
from tests.contract.engine_turns import Turn, prompt, turn
from tests.contract.test_decode_stages import decode_config
from tests.contract.test_engine_speculation import SAMPLINGS, sampling_of
from tests.contract.test_engine_truncation import Session, session, stays_in_use
from tests.unit.model import reference_folders
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)
__all__ = ["session"]


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A model of other weights, and of the same tokens."""
    return str(reference_folders.write(tmp_path / "other", "llama-all-heads", layers=1))


@pytest.mark.parametrize("engines", ["llama", "qwen3", "mistral-sliding"], indirect=True)
async def test_tokens_are_the_reference(engines: Stack, drafting: list[DraftModel], other: str) -> None:
    """By a model that always knows, and by one that never does."""
    prefill = await engines.prefill()
    knows = await engines.decode(max_draft_tokens=MOST, draft_model=str(engines.folder))
    tokens, expected = engines.reference.prompt(75, 64)
    with foreseen([], wrong=0.0), counted() as rows:  # nothing is found in a text
        made = await turn(prefill, knows, engines.model, tokens, 64).run()
    assert made.tokens == expected
    accepted, rejected = outcome(engines)
    assert accepted > 40
    assert rejected < accepted / 4
    assert len([one for one in rows if one == 5]) >= 10, "tokens are verified with four drafts"
    await nothing_is_left(engines, drafting)
    await engines.stop("decode")
    knows_nothing = await engines.decode(max_draft_tokens=MOST, draft_model=other)
    with foreseen([], wrong=0.0):
        made = await turn(prefill, knows_nothing, engines.model, tokens, 64).run()
    assert made.tokens == expected
    assert outcome(engines)[1] > 100
    await nothing_is_left(engines, drafting)


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_tokens_are_those_without_drafts(engines: Stack, drafting: list[DraftModel], name: str) -> None:
    """In a batch; one number decides what both models sample, so that drafts of sampled answers are right as
    often as those of greedy ones."""
    prefill = await engines.prefill()
    plain = await engines.decode("plain", max_draft_tokens=0)
    decode = await engines.decode(max_draft_tokens=MOST, draft_model=str(engines.folder))

    def turns(decode: Any) -> list[Turn]:
        return [
            turn(
                prefill, decode, engines.model, prompt(20 * seed, seed), 60, sampling=sampling_of(name, seed)
            )
            for seed in range(1, 5)
        ]  # fmt: skip

    expected = [await one.run() for one in turns(plain)]
    with foreseen([], wrong=0.0):
        made = await asyncio.gather(*(one.run() for one in turns(decode)))
    assert [one.tokens for one in made] == [one.tokens for one in expected]
    accepted, rejected = outcome(engines)
    assert accepted > 100
    assert rejected < accepted / 4
    await nothing_is_left(engines, drafting)


async def test_what_is_left_of_a_truncated_session(
    engines: Stack, drafting: list[DraftModel], session: Session
) -> None:
    """To the draft model that is a text of its own; the answers are the reference's."""
    store, prefill = await engines.kvstore(), await engines.prefill(loads="always")
    decode = await engines.decode(max_draft_tokens=MOST, draft_model=str(engines.folder))
    await stays_in_use(session, 2, store, [(prefill, decode)] * 2)
    assert sum(outcome(engines)) > 40
    await nothing_is_left(engines, drafting)


async def test_who_leaves_early_leaves_nothing(engines: Stack, drafting: list[DraftModel]) -> None:
    """Cancelled in the middle, or when the draft model has caught up with a part of the prompt."""
    prefill = await engines.prefill()
    decode = await engines.decode(max_draft_tokens=MOST, draft_model=str(engines.folder))
    ones = [turn(prefill, decode, engines.model, prompt(200, seed), 200) for seed in range(3)]
    running = [asyncio.create_task(one.run()) for one in ones]
    for one, task in zip(ones, running, strict=True):
        await eventually(lambda one=one: len(one.tokens) > 1)
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await nothing_is_left(engines, drafting)


async def test_with_too_little_room_some_are_drafted_for(engines: Stack, drafting: list[DraftModel]) -> None:
    """Its room is as large as decode's, and here sequences that share blocks need more of it."""
    prefill = await engines.prefill()
    decode = await engines.decode(
        max_draft_tokens=MOST, draft_model=str(engines.folder), engine={"capacity_tokens": 20 * BLOCK}
    )
    tokens, expected = engines.reference.prompt(100, 30)
    first = await turn(prefill, decode, engines.model, tokens, 1).run()
    assert first.tokens == expected[:1]
    made = [turn(prefill, decode, engines.model, tokens, 30) for _ in range(4)]
    await asyncio.gather(*(one.run() for one in made))
    assert all(one.tokens == expected for one in made)
    assert outcome(engines)[0] > 20
    await nothing_is_left(engines, drafting)


async def test_a_draft_model_of_other_tokens_is_refused(engines: Stack, tmp_path: Path) -> None:
    folder = reference_folders.write(tmp_path / "other", "llama")
    reference_folders.edit_config(folder, lambda config: config.update(vocab_size=100))
    core = draft_models.load_core(settings(engines.folder))
    own: EngineSettings = settings(engines.folder)
    with pytest.raises(InvalidInput, match="other tokens than") as refused:
        draft_models.load_draft_model(own, core, str(folder), max_draft_tokens=MOST, chunk_tokens=64)
    assert refused.value.param == "draft_model"
    with pytest.raises(ModelNotFound, match="draft_model: there is no model folder"):
        draft_models.load_draft_model(
            own, core, str(tmp_path / "nowhere"), max_draft_tokens=MOST, chunk_tokens=64
        )


@pytest.mark.parametrize(
    "changes", [{"max_draft_tokens": 0}, {"replicas": ("unix:/a", "unix:/b")}, {"pipelining": "on"}]
)
async def test_where_nothing_is_verified_a_draft_model_is_refused(
    engines: Stack, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="draft_model"):
        decode_config(engines, draft_model="/a/model", **changes)
