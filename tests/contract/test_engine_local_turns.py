"""Prompts that decode computes itself where batches of sequences take turns: they are in none of these
batches, and tokens stay what they are."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from kvcommons.engine.iteration import Iteration
from kvcommons.engine.token_rows import TokenRows
from kvcommons.pb import common_pb2
from services.decode.staggering.peers import Peer
from tests.contract.engine_stack import Stack
from tests.contract.engine_turns import turn
from tests.contract.test_engine_local import ALL
from tests.contract.test_engine_rotation import met, slices
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


@dataclass
class Flown:
    """An iteration: its thread, of how many prompts it has a chunk and of how many sequences a token, and
    which others were under way with it."""

    thread: str
    chunks: int
    sequences: int
    beside: list[Flown] = field(default_factory=list)

    @property
    def in_turn(self) -> bool:
        return self.thread.startswith("decode-lane-")


@pytest.fixture
def flown(monkeypatch: pytest.MonkeyPatch) -> list[Flown]:
    """All iterations."""
    made, under_way, lock, run = list[Flown](), list[Flown](), threading.Lock(), Iteration.run

    def noting(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        batches = [group.batch for group in self.groups if isinstance(group, TokenRows)]
        one = Flown(
            thread=threading.current_thread().name,
            chunks=len(self.groups) - len(batches),
            sequences=len({sequence.key for batch in batches for sequence in batch.sequences}),
        )
        with lock:
            for other in under_way:
                other.beside.append(one)
            one.beside += under_way
            under_way.append(one)
            made.append(one)
        try:
            return run(self, *between_layers)
        finally:
            with lock:
                under_way.remove(one)

    monkeypatch.setattr(Iteration, "run", noting)
    return made


async def staggered(engines: Stack, decode: Any, flown: list[Flown]) -> None:
    """Two sequences take turns; two prompts of several chunks come, and generate with them."""
    made = [engines.reference.prompt(length, 45, 50 * n + 1) for n, length in enumerate((20, 35, 150, 90))]
    turns = [turn(None, decode, engines.model, tokens, 45) for tokens, _ in made]
    running = [asyncio.create_task(one.run()) for one in turns[:2]]
    await eventually(lambda: [one for one in flown if one.in_turn and one.beside], "batches take turns")
    running += [asyncio.create_task(one.run()) for one in turns[2:]]
    await asyncio.gather(*running)
    assert [one.tokens for one in turns] == [expected for _, expected in made]
    assert [one for one in flown if one.chunks and one.sequences > 1], "prompts do not wait for their end"
    last = max(number for number, one in enumerate(flown) if one.chunks)
    assert [one for one in flown[last:] if one.in_turn and one.beside], "batches take turns again"


@pytest.mark.usefixtures("unhurried")
async def test_prompts_are_in_no_batch_that_takes_turns(engines: Stack, flown: list[Flown]) -> None:
    decode = await engines.decode(max_local_prefill_tokens=ALL, chunk_tokens=32, pipelining="on")
    await staggered(engines, decode, flown)
    assert not [one for one in flown if one.chunks and (one.in_turn or one.beside)]
    await engines.idle("decode")


@pytest.mark.usefixtures("unhurried")
async def test_prompts_of_an_instance_that_rotates_are_in_no_batch_that_takes_turns(
    engines: Stack, flown: list[Flown]
) -> None:
    """Those of its own: its two batches stand still meanwhile."""
    settings: dict[str, Any] = {
        "placement": "local",
        "pipelining": "on",
        "slice_deadline_s": 2.0,
        "replicas": tuple(engines.data(f"decode-{number}") for number in range(2)),
        "max_local_prefill_tokens": ALL,
        "chunk_tokens": 32,
    }
    decodes = [await engines.decode(f"decode-{number}", **settings) for number in range(2)]
    for number in range(2):
        await met(engines, f"decode-{number}", 1)
    await staggered(engines, decodes[0], flown)
    assert slices(engines, "decode-0", "by_peers")
    assert not [one for one in flown if one.chunks and (one.in_turn or one.beside)]
    await engines.idle("decode-0", "decode-1")


async def test_no_chunk_of_a_prompt_goes_to_a_peer(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are many: what crosses is a chunk's activations, and its peers compute them for it."""
    sent: list[int] = []
    advance = Peer.advance

    def noting(self: Peer, layer: int, state: Any, attention: Tensor, **others: Any) -> Any:
        sent.append(len(attention))
        return advance(self, layer, state, attention, **others)

    monkeypatch.setattr(Peer, "advance", noting)
    settings: dict[str, Any] = {
        "placement": "local", "pipelining": "on", "slice_deadline_s": 2.0,
        "replicas": tuple(engines.data(f"decode-{number}") for number in range(2)),
        "max_local_prefill_tokens": ALL, "chunk_tokens": 32,
    }  # fmt: skip
    decodes = [await engines.decode(f"decode-{number}", **settings) for number in range(2)]
    for number in range(2):
        await met(engines, f"decode-{number}", 1)
    for decode in decodes:
        tokens, expected = engines.reference.prompt(100, 5)
        assert (await turn(None, decode, engines.model, tokens, 5).run()).tokens == expected
    assert not [rows for rows in sent if rows > 1]
