"""The first stage comes back with another division of the layers, on a whole stack: the other stages load
theirs anew, and what is computed stays the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.rpc.directory import Directory
from tests.fault.conftest import slow_tables
from tests.fault.streams import until_whole
from tests.machine import scaled
from tests.system.stack import Stack

pytestmark = pytest.mark.slow
WORDS = " ".join(f"My friend number {i} likes the colour blue." for i in range(20))
MEASURED = {"calibrate_s": 0.2}
STAGES = {"prefill": 3, "decode": 2}
WHOLE = {"prefill": 1, "prefill_stage": 2, "decode": 1, "decode_stage": 1, "kvstore": 1}


@pytest.fixture
def staged(tmp_path: Path, slow_model: Path) -> Iterator[Stack]:
    tables = slow_tables(prefill=MEASURED, decode=MEASURED)
    counts = {"stages": STAGES["prefill"], "decode_stages": STAGES["decode"]}
    with Stack(tmp_path, tables=tables, model=str(slow_model), attention_pool=0, **counts) as stack:
        yield stack
    stack.assert_gone()


async def divisions(stack: Stack, service: str) -> list[tuple[int, ...]]:
    """Layers of each stage, as the ready stages of the instance say them, each once."""
    directory = Directory([f"unix:{stack.runtime / 'ledger'}.c"], "test")
    directory.start()
    try:
        async with asyncio.timeout(scaled(20)):
            while not directory.connected:
                await asyncio.sleep(0.05)
        found = [*directory.instances(service), *directory.instances(f"{service}_stage")]
        return sorted({tuple(one.stage.division) for one in found})
    finally:
        await directory.stop()


def has_one_layer(stack: Stack, service: str, stage: int) -> bool:
    """As all stages of the instance say."""
    found = asyncio.run(divisions(stack, service))
    return len(found) == 1 and found[0][stage] == 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("service", STAGES)
def test_stages_load_what_the_first_one_says_after_a_restart(staged: Stack, service: str) -> None:
    until_whole(staged, WHOLE)
    plain = staged.client.say(WORDS, "before", max_tokens=30, temperature=0.0)
    (before,) = asyncio.run(divisions(staged, service))
    assert sum(before) == 8
    assert len(before) == STAGES[service]
    kept = staged.data / "predictors" / f"{service}.json.layers"
    learnt = json.loads(kept.read_bytes())
    times = learnt["learnt"]["layers"]
    long = 0 if before[0] > 1 else -1  # on a busy machine the first layer may have taken long, as measured
    assert before[long] > 1
    times[long] = sum(times)  # a stage has that one alone
    others = {name: staged.pid(name) for name in (f"{service}-stage-{n}" for n in range(1, STAGES[service]))}
    kept.write_text(json.dumps(learnt))
    os.kill(staged.pid(service), signal.SIGKILL)
    staged.until(lambda: has_one_layer(staged, service, long), 60.0, "the layers are divided as before")
    until_whole(staged, WHOLE)
    assert all(staged.pid(name) != pid for name, pid in others.items()), "each loads its layers anew"
    after = staged.client.say(WORDS, "after", max_tokens=30, temperature=0.0, reuse=False)
    assert after.text == plain.text
    again = staged.client.say("And who likes green?", "before", max_tokens=30, temperature=0.0)
    assert again.cached_tokens > 0
    for name in STAGES:
        staged.until(lambda name=name: staged._is_idle(name), 20.0, f"{name} holds blocks")
