"""Decode in pipeline stages, and in ranks: its tokens are those of transformers, and of a decode with the
whole model, whatever becomes of one of its processes meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from kvcommons.config import DataPlane
from kvcommons.engine.iteration_costs import IterationCosts, IterationWork
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import CapacityExhausted, InvalidInput, Loading, Unavailable
from kvcommons.pb import common_pb2, ledger_pb2
from kvcommons.rpc.directory import Directory
from kvcommons.stages.link import StageLink
from kvcommons.stages.settings import StageSettings
from services.decode.config import DecodeConfig
from services.decode.stage import stage_share
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, prefill_idle, settings, slow
from tests.contract.engine_turns import Turn, assert_exact, prompt, turn, whole_beside_a_kill
from tests.contract.filled_pipeline import FilledPipeline
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_truncation import Session, stays_in_use
from tests.contract.truncation_reference import TruncatedReference
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "seed": 5, "logprobs": True},
    {"temperature": 0.8, "seed": 6, "top_k": 40, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.2, "seed": 7, "min_p": 0.02, "logit_bias": {17: 4.0, 3: -50.0}},
    {"temperature": 1.0, "seed": 7, "choice": 1, "top_p": 0.9},
]


async def test_an_iteration_tells_stages_as_much_however_long_the_context(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequence state is theirs, too, and they hear what changes (Mnemosyne, section 5): a position in a row
    of the plan takes a byte more from 128 tokens on, and its block's number when it gets one."""
    await engines.lenders()
    prefill, decode = await engines.prefill(), await engines.staged_decode(2)
    told: list[tuple[int, int]] = []  # bytes of spans, and of changes
    send = StageLink.send

    def noted(link: StageLink, changes: Any, spans: Any = (), *hidden: Any, **options: Any) -> None:
        if spans:
            told.append((sum(one.ByteSize() for one in spans), sum(one.ByteSize() for one in changes)))
        send(link, changes, spans, *hidden, **options)

    monkeypatch.setattr(StageLink, "send", noted)
    most: dict[int, tuple[int, int]] = {}
    for context in (30, 300):
        tokens, expected = engines.reference.prompt(context, 2 * BLOCK + 2)
        one = turn(prefill, decode, engines.model, tokens, len(expected))
        running = asyncio.create_task(one.run())
        await eventually(lambda one=one: bool(one.tokens))
        told.clear()  # it has begun, with all that is to be known of it
        assert (await running).tokens == expected
        assert len(told) >= BLOCK
        most[context] = max(told)[0], max(changes for _, changes in told)
        await engines.idle("decode")
    assert most[300][0] <= most[30][0] + 1
    assert most[300][1] <= most[30][1] + 4
    assert most[30][1] > 0, "it grew by a block meanwhile"


@pytest.mark.parametrize(
    ("engines", "stages", "tensor"),
    [
        ("llama", 2, 1),
        ("qwen3", 3, 1),
        ("qwen3", 1, 2),
        ("llama-tied-biased", 2, 2),
        ("qwen2", 1, 4),
        slow("mistral-sliding", 1, 4),
        slow("llama", 3, 2),
    ],
    indirect=["engines"],
)
async def test_several_sequences_generate_the_reference(engines: Stack, stages: int, tensor: int) -> None:
    """More than there are stages: each has a batch of them. Logits are compared as logarithms of
    probabilities."""
    await engines.lenders()
    prefill, decode = await engines.prefill(), await engines.staged_decode(stages, tensor=tensor)
    known = [engines.reference.prompt(length, 40) for length in (75, 33, 16, 100, 1)]
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)
    turns = [turn(prefill, decode, engines.model, tokens, 40, sampling=sampling) for tokens, _ in known]
    made = await asyncio.gather(*(one.run() for one in turns))
    for one, (tokens, expected) in zip(made, known, strict=True):
        assert_exact(engines.reference, one, tokens, expected)
    await engines.idle("decode")
    await prefill_idle(prefill)


@pytest.mark.parametrize("stages", [2, 3])
async def test_each_stage_has_a_batch_at_the_same_time(
    engines: Stack, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many sequences as there are stages: while one's token is in the last stage those of all others are
    in the stages before."""
    count = 8 * stages
    await engines.lenders()
    prefill, decode = await engines.prefill(), await engines.staged_decode(stages)
    known = [engines.reference.prompt(length, 20) for length in (75, 33, 16)[:stages]]
    line = FilledPipeline(monkeypatch, stages, count)
    turns = [turn(prefill, decode, engines.model, tokens, 20) for tokens, _ in known]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in known]
    batches = [group.batch for one in line.begun for group in one.groups if isinstance(group, TokenRows)]
    keys = [one.key for batch in batches[:count] for one in batch.sequences]
    assert len(keys) == count, "each batch has one of them"
    for first in range(count - stages + 1):
        assert len(set(keys[first : first + stages])) == stages
    assert line.ended >= count
    await engines.idle("decode")
    await prefill_idle(prefill)


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [
        ({"stages": 3}, {"stages": 2, "stage_layers": (2, 1)}),
        ({"stages": 1, "tensor": 2}, {"stages": 2, "tensor": 2, "stage_layers": (2, 1)}),
        slow({"stages": 2, "tensor": 4}, {"stages": 1, "tensor": 2}),
        slow({"stages": 2}, {"stages": 1, "tensor": 4}),
    ],
)
async def test_sampling_is_that_of_a_whole_model(
    engines: Stack, prefills: dict[str, Any], decodes: dict[str, Any]
) -> None:
    """Seeds, penalties, biases and probabilities, side by side; prefill is divided, too, and each of its
    processes writes its heads of its layers to those of decode's that have them. A stop token ends a
    sequence."""
    await engines.lenders()
    prefill, whole = await engines.prefill("p1"), await engines.decode("whole")
    staged_prefill = await engines.staged(**prefills, name="p3")
    staged = await engines.staged_decode(**decodes)

    def turns(prefill: Any, decode: Any) -> list[Turn]:
        return [
            turn(
                prefill, decode, engines.model, prompt(20 + 9 * number, number + 1), 50,
                sampling=common_pb2.Sampling(**one),
            )
            for number, one in enumerate(SETTINGS)
        ]  # fmt: skip

    expected = await asyncio.gather(*(one.run() for one in turns(prefill, whole)))
    made = await asyncio.gather(*(one.run() for one in turns(staged_prefill, staged)))
    for one, other in zip(made, expected, strict=True):
        assert one.tokens == other.tokens
        assert [token.logprob for token in one.sampled] == pytest.approx(
            [token.logprob for token in other.sampled], abs=1e-4
        )
        assert [[top.token for top in token.top] for token in one.sampled] == [
            [top.token for top in token.top] for token in other.sampled
        ]
    assert len({tuple(one.tokens) for one in made}) == len(SETTINGS)
    stop = made[0].tokens[12]
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, stop_token_ids=[stop])
    stopped = await turn(staged_prefill, staged, engines.model, prompt(20, 1), 50, sampling=sampling).run()
    assert stopped.tokens == made[0].tokens[: made[0].tokens.index(stop) + 1]
    assert stopped.finished is not None
    assert stopped.finished.reason == "stop"
    await engines.idle("decode")


@pytest.mark.parametrize(
    ("engines", "before", "after"),
    [("mistral-sliding", (2, 1), (3, 1)), ("mistral-sliding", (1, 4), (2, 2)), slow("llama", (2, 2), (1, 2))],
    indirect=["engines"],
)
async def test_a_second_turn_has_the_history_from_memory_and_from_the_store(
    engines: Stack, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """What stages and ranks generated they have saved, each its heads of its layers: a fresh group of another
    shape loads it."""
    await engines.lenders()
    store, prefill = await engines.kvstore(), await engines.prefill()
    decode = await engines.staged_decode(before[0], "d1", tensor=before[1])
    tokens, expected = engines.reference.prompt(75, 96)
    first = await turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0)).run()
    assert first.tokens == expected[:32]
    assert first.finished is not None
    full, known = (75 + 32 - 1) // BLOCK, tokens + expected[:32]
    assert first.finished.saved_blocks == full - 75 // BLOCK
    assert await stored(engines, store, known[: full * BLOCK]) == full

    second = turn(prefill, decode, engines.model, known, 32, history=engines.history(full))
    assert (await second.run()).tokens == expected[32:64]
    assert second.reserved is not None
    assert second.reserved.push_from_block == full
    await engines.idle("d1")

    full, known = (75 + 64 - 1) // BLOCK, tokens + expected[:64]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    decode = await engines.staged_decode(after[0], "d2", tensor=after[1], fetch_min_bytes=0)
    third = turn(prefill, decode, engines.model, known, 32, history=engines.history(full))
    assert (await third.run()).tokens == expected[64:]
    assert third.reserved is not None
    assert third.reserved.push_from_block == full
    assert not third.missing
    await engines.idle("d2")


async def test_what_the_store_has_no_more_prefill_pushes_to_all_stages(engines: Stack) -> None:
    await engines.lenders()
    await engines.kvstore()
    prefill, decode = await engines.staged(2), await engines.staged_decode(2)
    tokens, expected = engines.reference.prompt(100, 20)
    made = turn(prefill, decode, engines.model, tokens, 20, history=engines.history(6))
    assert (await made.run()).tokens == expected
    assert made.missing == [0]
    await engines.idle("decode")


async def test_a_token_is_expected_to_take_as_long_as_all_stages_do(
    engines: Stack, unhurried: SlowIterations
) -> None:
    """By what the first one alone takes, the router would take requests of a class that nobody can keep."""
    others_s = 2 * scaled(0.02)  # that the fixture makes their iterations longer
    await engines.lenders()
    prefill, decode = await engines.prefill(), await engines.staged_decode(3)
    await turn(prefill, decode, engines.model, prompt(20, 1), 40).run()
    directory = Directory(engines.ledger, "test")
    directory.start()
    try:

        def expected_s() -> float:
            (load,) = [one.load for one in directory.instances("decode")] or [ledger_pb2.Load()]
            return IterationCosts.of(load.costs).seconds(IterationWork(rows=1))

        await eventually(lambda: expected_s() > 0.75 * others_s)
    finally:
        await directory.stop()


@pytest.mark.parametrize("shapes", [[(2, 1), (3, 1)], [(1, 2), (2, 2)]])
async def test_truncated_sessions_go_on_in_stages(engines: Stack, shapes: list[tuple[int, int]]) -> None:
    """Each process has its own part of the shifted head."""
    await engines.lenders()
    store = await engines.kvstore()
    prefill = await engines.prefill(loads="always")
    names = [f"d{number}" for number in range(len(shapes))]
    pairs = [
        (prefill, await engines.staged_decode(stages, name, tensor=tensor))
        for name, (stages, tensor) in zip(names, shapes, strict=True)
    ]
    session = Session(engines, TruncatedReference(engines.folder))
    await stays_in_use(session, 2, store, pairs)
    await engines.idle(*names)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2)])
async def test_cancelled_and_preempted_sequences_give_their_blocks_back(
    engines: Stack, stages: int, tensor: int
) -> None:
    await engines.lenders()
    prefill = await engines.prefill()
    decode = await engines.staged_decode(stages, tensor=tensor, engine={"capacity_tokens": 12 * BLOCK})
    (old, expected), young = engines.reference.prompt(60, 60), prompt(60, seed=9)
    cancelled = turn(prefill, decode, engines.model, prompt(20, 3), 60)
    first, second = (turn(prefill, decode, engines.model, tokens, 60) for tokens in (old, young))
    second.request.job.max_position = 400
    running = asyncio.create_task(first.run())
    ending = asyncio.create_task(cancelled.run())
    await eventually(lambda: len(first.tokens) > 1 and len(cancelled.tokens) > 1)
    ending.cancel()
    with pytest.raises(CapacityExhausted, match="older sequences precedence"):
        await second.run()
    await running
    assert first.tokens == expected
    assert len(cancelled.tokens) < 60
    engines.reference.assert_greedy(young, second.tokens)
    await engines.idle("decode")
    with pytest.raises(CapacityExhausted, match="13 blocks and this decode instance has 12 free"):
        await turn(prefill, decode, engines.model, prompt(192, seed=77), 5).run()
    await engines.idle("decode")


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2)])
async def test_a_stage_that_is_killed_fails_its_sequences_over_and_comes_back(
    engines: Stack, stages: int, tensor: int
) -> None:
    """Of its own process, in the middle of answers: each says so, no block stays taken, what was found in
    memory is found no more; once the stage is there again, what was heard is gone on with."""
    await engines.lenders()
    prefill = await engines.prefill()
    decode = await engines.staged_decode(stages, tensor=tensor, process=True)
    known = [engines.reference.prompt(length, 60) for length in (75, 33, 20)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in known]
    running = [asyncio.create_task(one.run()) for one in turns]
    await eventually(lambda: all(len(one.tokens) > 3 for one in turns))
    engines.children[-1].kill()
    engines.children[-1].wait()
    for task in running:
        with pytest.raises(Unavailable, match="stage"):
            await task
    await engines.idle("decode")
    with pytest.raises(Loading, match="lacks stages"):
        await turn(prefill, decode, engines.model, [5, 6, 7], 2).run()
    engines.decode_stage(stages - 1, stages, rank=tensor - 1, tensor=tensor, process=True)
    await engines.decode_together(decode)
    for one, (tokens, expected) in zip(turns, known, strict=True):
        heard = len(one.tokens)
        assert one.tokens == expected[:heard]
        again = turn(
            prefill, decode, engines.model, tokens + one.tokens, 60 - heard, prompt_tokens=len(tokens)
        )
        assert (await again.run()).tokens == expected[heard:]
        assert again.reserved is not None
        if one is turns[0]:  # the others begin like it
            assert again.reserved.push_from_block == 0
    await engines.idle("decode")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (3, 1), (1, 2), (2, 2)])
async def test_kills_under_load(engines: Stack, stages: int, tensor: int) -> None:
    """Thirty times a process beside the first is killed at some moment while sequences arrive and generate:
    each has the reference's tokens up to a clear error, or all of them, and all blocks come back."""
    draw, members = random.Random(10 * tensor + stages), stages * tensor
    await engines.lenders()
    prefill = await engines.prefill()
    decode = await engines.staged_decode(stages, tensor=tensor, process=True)
    known = [engines.reference.prompt(length, 60) for length in (200, 120, 75, 33)]
    children = dict(zip(range(1, members), engines.children[-members + 1 :], strict=True))
    began = time.monotonic()
    await asyncio.gather(*(turn(prefill, decode, engines.model, tokens, 60).run() for tokens, _ in known))
    calm_s = time.monotonic() - began
    exact = refused = 0
    for _ in range(30):
        turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in known]
        number = draw.randrange(1, members)
        whole = await whole_beside_a_kill(
            turns, [expected for _, expected in known], children[number], draw, calm_s
        )
        exact, refused = exact + whole, refused + len(turns) - whole
        await engines.idle("decode")
        await prefill_idle(prefill)
        stage, rank = divmod(number, tensor)
        engines.decode_stage(stage, stages, rank=rank, tensor=tensor, process=True)
        children[number] = engines.children[-1]
        await engines.decode_together(decode)
    assert exact
    assert refused
    made = await asyncio.gather(
        *(turn(prefill, decode, engines.model, tokens, 60).run() for tokens, _ in known)
    )
    assert [one.tokens for one in made] == [expected for _, expected in known]
    await engines.idle("decode")


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"stages": 4}, "stages = 4, and the model has 3 layers"),
        ({"tensor": 3}, r"tensor = 3 does not divide 4 query heads, .* over 1, 2, 4$"),
    ],
)
async def test_what_cannot_be_divided_is_refused(engines: Stack, shape: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        stage_share(decode_config(engines, shape=StageSettings(**shape)))


@pytest.mark.parametrize("shape", [{"stages": 2}, {"tensor": 2}])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"replicas": ("unix:/a", "unix:/b")}, "replicas"),
        ({"pipelining": "on"}, "pipelining"),
        ({"mini_batches": 2}, "mini_batches"),
        ({"core_lock": "/tmp/cores"}, "core_lock"),
        ({"draft_model": "/a/model"}, "draft_model"),
    ],
)
async def test_what_stages_do_not_do_is_named(
    engines: Stack, shape: dict[str, int], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        decode_config(engines, shape=StageSettings(**shape), **changes)


def decode_config(engines: Stack, **changes: Any) -> DecodeConfig:
    return DecodeConfig(
        node=engines.node("decode"),
        data_plane=DataPlane(data_listen=engines.data("decode")),
        engine=settings(engines.folder),
        ledger=engines.ledger,
        **changes,
    )
