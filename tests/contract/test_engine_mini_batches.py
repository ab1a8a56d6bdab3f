"""A holder's share of a batch in several messages gives the tokens that it gives in one."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kvcommons.errors import DataLoss
from kvcommons.pb import common_pb2
from tests.backends import COMPILED
from tests.contract.engine_stack import SlowIterations, Stack
from tests.contract.engine_turns import turn

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


def compiled() -> bool:
    return COMPILED and not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("engines", "transport", "mini_batches"),
    [
        # Any two of these values meet; the rest of the combinations is for when there is time.
        ("llama", "tcp", 1),
        ("llama", "shm", 4),
        ("qwen2-sliding", "tcp", 4),
        ("qwen2-sliding", "shm", 1),
        pytest.param("llama", "tcp", 4, marks=pytest.mark.slow),
        pytest.param("llama", "shm", 1, marks=pytest.mark.slow),
        pytest.param("qwen2-sliding", "tcp", 1, marks=pytest.mark.slow),
        pytest.param("qwen2-sliding", "shm", 4, marks=pytest.mark.slow),
    ],
    indirect=["engines"],
)
async def test_tokens_are_the_reference(engines: Stack, transport: str, mini_batches: int) -> None:
    """Eight sequences of many lengths on two holders; batches change as they begin and end."""
    engines.transport = transport
    await engines.lenders(60, 60)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="offload", borrow_blocks=2, mini_batches=mini_batches, pipelining="off"
    )
    made = [engines.reference.prompt(20 + 23 * n, 40 + n, 100 * n + 1) for n in range(8)]
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)
    turns = [
        turn(prefill, decode, engines.model, tokens, 40 + n, sampling=sampling)
        for n, (tokens, _) in enumerate(made)
    ]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in made]
    for one, (tokens, expected) in zip(turns, made, strict=True):
        logprobs = engines.reference.logprobs(tokens, expected)
        assert [token.logprob for token in one.sampled] == pytest.approx(logprobs, abs=2e-4)
    # Messages for a layer of an iteration: at most one a holder, or more than that.
    reported = {name: engines.processes[name].telemetry.registry for name in ("decode", "pool-0", "pool-1")}
    layers = engines.reference.layers
    iterations = reported["decode"].get_sample_value("kvcommons_iteration_seconds_count") or 0.0
    labels = {"op": "attend_layer", "code": "ok"}
    messages = sum(
        reported[name].get_sample_value("kvcommons_data_server_seconds_count", labels) or 0.0
        for name in ("pool-0", "pool-1")
    )
    assert (messages > 2 * layers * iterations) == (mini_batches > 1)
    native = reported["decode"].get_sample_value("kvcommons_native_layers_total")
    assert native == (layers * iterations if compiled() else 0)
    await engines.idle("decode", "pool-0", "pool-1")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_holder_that_fails_loses_its_own_sequences_only(
    engines: Stack, transport: str, unhurried: SlowIterations
) -> None:
    """It is killed while mini-batches are under way."""
    engines.transport = transport
    pools = await engines.lenders(100, 100, process=True)  # all six fit on one that beats first
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="offload", mini_batches=4, pipelining="off", attend_deadline_s=5.0
    )
    made = [engines.reference.prompt(40 + 3 * n, 160, 100 * n + 1) for n in range(6)]
    turns = [turn(prefill, decode, engines.model, tokens, 160) for tokens, _ in made]
    tasks = []
    for one in turns:
        tasks.append(asyncio.create_task(one.run()))
        while not one.tokens:
            if tasks[-1].done():
                await tasks[-1]
            await asyncio.sleep(0.005)
    pools[0].kill()
    unhurried.over()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    lost = sum(isinstance(one, DataLoss) for one in done)
    assert 0 < lost < len(turns)
    for one, result, (_, expected) in zip(turns, done, made, strict=True):
        assert one.tokens == expected[: len(one.tokens)]
        assert isinstance(result, DataLoss) or one.tokens == expected
    await engines.idle("decode", "pool-1")
