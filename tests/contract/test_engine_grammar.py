"""Real instances keep answers to a grammar, wherever a token is sampled."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from llguidance import LLParserLimits

from kvcommons.engine.drafts.model import DraftModel
from kvcommons.errors import Internal, InvalidInput, KVCommonsError, Unprocessable
from kvcommons.grammar import compiled, sources
from kvcommons.grammar.grammars import Grammars
from kvcommons.model.synthetic import write_random_folder
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2, prefill_pb2
from kvcommons.token_ids import packed
from tests.contract.engine_drafts import foreseen, nothing_is_left, outcome
from tests.contract.engine_stack import Stack, scale_calls
from tests.contract.engine_turns import Reference, Turn, compute, prompt, turn
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512,
    "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
PATTERN = "([a-f]{3}-[0-9]{2} ){2,4}!"
ALL = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar") / "model"
    write_random_folder(folder, MODEL, init_range=0.08, dtype="float32")
    return folder


@pytest.fixture
async def engines(monkeypatch: pytest.MonkeyPatch, socket_folder: Path, folder: Path) -> AsyncIterator[Stack]:
    scale_calls(monkeypatch)
    stack = Stack(socket_folder, folder, cast(Reference, None))  # no oracle knows of grammars
    yield stack
    await stack.close()


def sampling(folder: Path, seed: int, **changes: Any) -> common_pb2.Sampling:
    known: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "seed": seed,
        "stop_token_ids": sorted(Tokenizer.read(folder).eos_ids),
        "grammar": sources.of_regex(PATTERN, param="grammar"),
    }  # fmt: skip
    return common_pb2.Sampling(**(known | changes))


def turns(prefill: Any, decode: Any, engines: Stack, count: int = 4) -> list[Turn]:
    return [
        turn(
            prefill,
            decode,
            engines.model,
            prompt(20 + 9 * seed, seed),
            60,
            sampling=sampling(engines.folder, seed),
        )
        for seed in range(1, count + 1)
    ]


async def refused(one: Turn, error: type[KVCommonsError], says: str) -> None:
    with pytest.raises(error, match=says):
        await one.run()


async def test_answers_keep_to_it_wherever_they_are_sampled(engines: Stack) -> None:
    """First tokens by prefill, by decode, and by the last of several stages; all the same. A sequence that
    gave way, or whose instance died, is continued by the tokens that were heard."""
    await engines.lenders()
    tokenizer = Tokenizer.read(engines.folder)
    prefill, decode = await engines.prefill(), await engines.decode()
    made = await asyncio.gather(*(one.run() for one in turns(prefill, decode, engines)))
    for one in made:
        assert one.finished is not None
        assert one.finished.reason == "stop"
        assert one.tokens[-1] in tokenizer.eos_ids
        assert re.fullmatch(PATTERN, tokenizer.decode(one.tokens))
    local = await engines.decode("local", max_local_prefill_tokens=ALL)
    staged_prefill, staged = await engines.staged(2, "p2"), await engines.staged_decode(2, "d2")
    for pair in ((None, local), (staged_prefill, staged)):
        others = await asyncio.gather(*(one.run() for one in turns(*pair, engines)))
        assert [one.tokens for one in others] == [one.tokens for one in made]
    for heard in (1, len(made[0].tokens) // 2, len(made[0].tokens) - 1):
        for pair in ((prefill, decode), (None, local), (staged_prefill, staged)):
            again = turns(*pair, engines, 1)[0]
            again.request.job.tokens += packed(made[0].tokens[:heard])
            await again.run()
            assert made[0].tokens[:heard] + again.tokens == made[0].tokens


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_a_stage_that_compiles_for_long_holds_up_no_iteration(
    engines: Stack, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The stage that samples has its first grammar, and takes longer for it than an iteration waits: the
    answer comes, and those of others do meanwhile."""
    monkeypatch.setattr("kvcommons.grammar.grammars.MASK_S", scaled(0.2))
    await engines.lenders()
    local: dict[str, Any] = {"max_local_prefill_tokens": ALL}
    alone = await engines.decode("alone", **local)
    (expected,) = await asyncio.gather(*(one.run() for one in turns(None, alone, engines, 1)))
    began: list[str] = []
    compile_text = Grammars._compile

    def slowly(self: Grammars, text: str) -> Any:
        began.append(text)
        if len(began) > 1:  # the first stage has it at once
            time.sleep(scaled(1.5))
        return compile_text(self, text)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    if who == "prefill":
        pair = (await engines.staged(2), await engines.decode("d", max_local_prefill_tokens=0))
        began.append("")  # of decode's own: nobody waits for it here
    else:
        pair = (None, await engines.staged_decode(2, "d", **local))
    free = sampling(engines.folder, 9, grammar="", stop_token_ids=[])
    beside = turn(*pair, engines.model, prompt(20, 9), 200, sampling=free)
    talking = asyncio.create_task(beside.run())
    await eventually(lambda: len(beside.tokens) > 2)
    (one,) = turns(*pair, engines, 1)
    answering = asyncio.create_task(one.run())
    await eventually(lambda: len(began) > 1)
    heard = len(beside.tokens)
    await asyncio.sleep(scaled(0.6))
    assert not one.tokens
    assert talking.done() or len(beside.tokens) > heard
    assert (await answering).tokens == expected.tokens
    await talking


async def test_rows_beside_one_with_a_grammar_are_as_without(engines: Stack) -> None:
    prefill, decode = await engines.prefill(), await engines.decode()

    def plain() -> Turn:
        free = sampling(engines.folder, 9, grammar="", stop_token_ids=[])
        return turn(prefill, decode, engines.model, prompt(30, 9), 40, sampling=free)

    alone = await plain().run()
    beside, *_ = await asyncio.gather(*(one.run() for one in (plain(), *turns(prefill, decode, engines))))
    assert beside.tokens == alone.tokens


@pytest.mark.usefixtures("all_drafts")
async def test_drafts_keep_to_a_grammar(engines: Stack) -> None:
    """Each is masked as it would be if it had been sampled; those that it does not allow are not computed."""
    prefill, plain = await engines.prefill(), await engines.decode("plain", max_draft_tokens=0)
    decode = await engines.decode(max_draft_tokens=6)
    expected = await asyncio.gather(*(one.run() for one in turns(prefill, plain, engines)))
    texts = [[*one.prompt, *one.tokens] for one in expected]
    for wrong in (None, 0.0, 0.3):
        with foreseen(texts, wrong) if wrong is not None else nullcontext():
            made = await asyncio.gather(*(one.run() for one in turns(prefill, decode, engines)))
        assert [one.tokens for one in made] == [one.tokens for one in expected]
    accepted, rejected = outcome(engines)
    assert accepted > 40
    assert rejected < accepted / 2, "what the grammar does not allow is no draft"
    await engines.idle("decode")


async def test_drafts_of_a_model_keep_to_a_grammar(engines: Stack, drafting: list[DraftModel]) -> None:
    """The draft model knows nothing of it: what it does not allow is no draft."""
    prefill, plain = await engines.prefill(), await engines.decode("plain", max_draft_tokens=0)
    decode = await engines.decode(max_draft_tokens=6, draft_model=str(engines.folder))
    expected = await asyncio.gather(*(one.run() for one in turns(prefill, plain, engines)))
    made = await asyncio.gather(*(one.run() for one in turns(prefill, decode, engines)))
    assert [one.tokens for one in made] == [one.tokens for one in expected]
    assert sum(outcome(engines)) > 0
    await nothing_is_left(engines, drafting)


@pytest.mark.usefixtures("all_drafts")
async def test_a_grammar_that_becomes_too_complex_ends_its_answer_alone(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some tokens, by the library's own limit; whoever generates beside it goes on."""
    monkeypatch.setattr(compiled, "_LIMITS", LLParserLimits(max_items_in_row=30, verbose_errors=False))
    await engines.lenders()
    ambiguous = sources.of_lark('start: a "!"\na: a a | "x"', param="grammar")
    (end,) = Tokenizer.read(engines.folder).encode_text("!")
    pairs = [
        (await engines.prefill(), await engines.decode()),
        (await engines.staged(2, "p2"), await engines.staged_decode(2, "d2")),
    ]
    for pair in pairs:
        well, broken = turns(*pair, engines, 2)
        broken.request.job.sampling.grammar = ambiguous
        broken.request.job.sampling.logit_bias[end] = -100
        _, good = await asyncio.gather(refused(broken, Unprocessable, "too complex"), well.run())
        assert len(broken.tokens) > 3
        assert good.finished is not None
        assert good.finished.reason == "stop"
    await engines.idle("decode")
    await engines.idle("d2")


async def test_a_first_token_that_its_grammar_has_not_is_prefills_error(engines: Stack) -> None:
    """What was generated before does not keep to it, so nothing can follow; in stages, too."""
    await engines.lenders()
    broken = turns(None, None, engines, 1)[0].request.job
    broken.tokens += packed([5])
    for prefill in (await engines.prefill(), await engines.staged(2, "p2")):
        with pytest.raises(Internal, match="does not keep to its grammar"):
            await compute(prefill, prefill_pb2.PrefillRequest(job=broken))
    local = await engines.decode(max_local_prefill_tokens=ALL)
    one = turns(None, local, engines, 1)[0]
    one.request.job.tokens += packed([5])
    await refused(one, Internal, "does not keep to its grammar")
    await engines.idle("decode")


@pytest.mark.parametrize("changes", [{"grammar": "start: nothing"}, {"stop_token_ids": []}])
async def test_what_is_no_grammar_holds_nothing(engines: Stack, changes: dict[str, Any]) -> None:
    decode = await engines.decode(max_local_prefill_tokens=ALL)
    one = turn(None, decode, engines.model, prompt(20), 9, sampling=sampling(engines.folder, 1, **changes))
    await refused(one, InvalidInput, "grammar")
    assert one.reserved is None
    await engines.idle("decode")
