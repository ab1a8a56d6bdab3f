"""A router before real instances that have room for a few of many requests at once: all are answered, in the
order in which they came, and decode is asked little more often than that takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kvcommons.model.tokenizer import Tokenizer
from kvcommons.rpc.process import Process
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import Tracer
from services.router.__main__ import serve
from services.router.capacity import queue, queues
from services.router.capacity.queue import CapacityQueue, Ticket
from services.router.config import RouterConfig
from tests.contract.engine_stack import BLOCK, Stack, scale_calls
from tests.contract.engine_turns import Reference
from tests.contract.rest_stack import MODEL_FOLDER
from tests.machine import scaled
from tests.waiting import eventually

ANSWER = 24
WAITS = {
    queue: ("_BACKOFF_S", "_BACKOFF_S_MAX"),
    queues: ("_PAUSE_S_MIN", "_PAUSE_S_MAX"),
}
ORDER_WAITS = ("ANSWER_TIMEOUT_S", "RETURN_TIMEOUT_S")
NEVER_S = 60.0
GENERATE = "/kvcommons.v1.Decode/Generate"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL_FOLDER)


@pytest.fixture
async def engines(
    socket_folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    scale_calls(monkeypatch)
    stack = Stack(socket_folder, MODEL_FOLDER, reference)
    await stack.lenders()
    yield stack
    await stack.close()


@dataclass(slots=True)
class Seen:
    """What the router's capacity queue did, by the numbers of the requests."""

    permits: list[int] = field(default_factory=list)  # in the order in which they might ask decode
    reserved: list[int] = field(default_factory=list)  # in the order in which they got room
    alone: list[int] = field(default_factory=list)  # those that came while nobody waited: they ask at once

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        advance, join, reserved = CapacityQueue.advance, CapacityQueue.join, CapacityQueue.reserved

        def advanced(queue: CapacityQueue, free_blocks: int | None, now_s: float) -> Ticket | None:
            found = advance(queue, free_blocks, now_s)
            if found is not None:
                self.permits.append(found.order[0])
            return found

        def joined(queue: CapacityQueue, ticket: Ticket, blocks: int) -> None:
            if not len(queue):
                self.alone.append(ticket.order[0])
            join(queue, ticket, blocks)

        def has_room(queue: CapacityQueue, ticket: Ticket) -> None:
            self.reserved.append(ticket.order[0])
            reserved(queue, ticket)

        monkeypatch.setattr(CapacityQueue, "advance", advanced)
        monkeypatch.setattr(CapacityQueue, "join", joined)
        monkeypatch.setattr(CapacityQueue, "reserved", has_room)


class Router:
    """Completions of token ids."""

    def __init__(self, http: aiohttp.ClientSession, seen: Seen) -> None:
        self.http = http
        self.seen = seen
        self.answered: list[int] = []
        self._tokenizer = Tokenizer.read(MODEL_FOLDER)

    async def ask(self, number: int, prompt: Sequence[int], expected: Sequence[int]) -> None:
        body = {
            "prompt": list(prompt), "max_tokens": len(expected), "temperature": 0, "ignore_eos": True,
            "logprobs": 0, "stream": True, "reuse": False,
        }  # fmt: skip
        tokens: list[str] = []
        async with self.http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                for got in _tokens(line):
                    tokens.append(got)
        self.answered.append(number)
        assert tokens == [self._tokenizer.token_text(token) for token in expected]

    async def running(self) -> int:
        async with self.http.get("/v1/status") as response:
            return int((await response.json())["queue"]["running"])

    async def at_once(self, prompts: Sequence[tuple[list[int], list[int]]]) -> list[asyncio.Task[None]]:
        """All of them, each as soon as the router has the one before."""
        asked = []
        for number, (prompt, expected) in enumerate(prompts):
            asked.append(asyncio.create_task(self.ask(number, prompt, expected)))

            async def there(count: int = number + 1) -> bool:
                for one in asked:
                    if one.done():
                        one.result()  # it says why it failed
                return await self.running() + len(self.answered) >= count

            await eventually(there)
        return asked


def _tokens(line: bytes) -> list[str]:
    text = line.decode().removeprefix("data:").strip()
    if not text or text == "[DONE]":
        return []
    event = json.loads(text)
    assert "error" not in event, event
    return [
        token
        for choice in event.get("choices", [])
        for token in (choice.get("logprobs") or {}).get("tokens") or []
    ]


@contextlib.asynccontextmanager
async def router(engines: Stack, monkeypatch: pytest.MonkeyPatch, *, decodes: int) -> AsyncIterator[Router]:
    seen = Seen()
    seen.watch(monkeypatch)
    # They are for answers of a quiet machine: a queue that waits less asks more often.
    for module, names in WAITS.items():
        for name in names:
            monkeypatch.setattr(module, name, scaled(getattr(module, name)))
    # Every choice answers and comes back here. On a busy machine some come late, and the queue would go on
    # without them, out of order.
    for name in ORDER_WAITS:
        monkeypatch.setattr(queue, name, scaled(NEVER_S))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = Process(
        service="router",
        instance_id="router",
        host="here",
        stop=asyncio.Event(),
        telemetry=Telemetry(
            service="router", instance_id="router", registry=CollectorRegistry(), tracer=Tracer.off()
        ),
    )
    config = RouterConfig(
        node=engines.node("router"), ledger=engines.ledger, model=str(MODEL_FOLDER), port=port
    )
    serving = asyncio.create_task(serve(config, process))
    timeout = aiohttp.ClientTimeout(total=scaled(60))
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as http:

            async def ready() -> bool:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("/v1/status") as response:
                        instances = (await response.json())["instances"]
                        known = [one["service"] for one in instances if one["ready"]]
                        return known.count("decode") == decodes and "prefill" in known
                return False

            await eventually(ready)
            yield Router(http, seen)
    finally:
        process.stop.set()
        await asyncio.wait_for(serving, scaled(15))


def asked(engines: Stack, *decodes: str) -> tuple[int, int]:
    """How often decode was asked for room, and how often it refused or took it back."""
    counts = {"ok": 0.0, "capacity_exhausted": 0.0, "cancelled": 0.0}
    for name in decodes:
        registry = engines.processes[name].telemetry.registry
        for code in counts:
            labels = {"method": GENERATE, "code": code}
            counts[code] += registry.get_sample_value("kvcommons_rpc_calls_total", labels) or 0.0
    return int(sum(counts.values())), int(counts["capacity_exhausted"])


def probes(waited_s: float) -> float:
    """How often the first in the queue asks at most though no room is known: once in a pause."""
    return waited_s / queues._PAUSE_S_MIN


def prompts(reference: Reference, *lengths: int) -> list[tuple[list[int], list[int]]]:
    return [
        reference.prompt(length, ANSWER, first_seed=1000 * number + 1)
        for number, length in enumerate(lengths)
    ]


def in_order(numbers: Sequence[int]) -> bool:
    """But for a place or two: those that start together may join in another order."""
    numbers = list(dict.fromkeys(numbers))  # one that was refused or gave way asked again
    order = sorted(numbers)
    return all(abs(order.index(number) - place) <= 2 for place, number in enumerate(numbers))


async def test_of_many_at_once_each_waits_for_its_turn(
    engines: Stack, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engines.prefill()
    await engines.decode(engine={"capacity_tokens": 22 * BLOCK})
    wanted = prompts(reference, *[5 * BLOCK + 8] * 12)  # seven blocks at last: three at a time
    async with router(engines, monkeypatch, decodes=1) as it:
        began_s = time.monotonic()
        await asyncio.gather(*await it.at_once(wanted))
        took_s = time.monotonic() - began_s
        assert in_order(it.seen.permits), str(it.seen)
    calls, refused = asked(engines, "decode")
    assert calls == 12 + refused
    assert refused <= len(it.seen.alone) + probes(took_s), "not each that waits, at each poll"
    await engines.idle("decode")


async def test_a_large_one_among_small_ones_where_memory_is_shared(
    engines: Stack, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large one is more than an instance has, and the small ones that pass it are no more than it."""
    await engines.prefill()
    for name in ("d1", "d2"):
        await engines.decode(
            name, engine={"capacity_tokens": 24 * BLOCK}, placement="overflow", lend_share=1.0
        )
    await engines.lending("d1", "d2")
    lengths = [5 * BLOCK] * 12
    lengths[6] = 30 * BLOCK
    wanted = prompts(reference, *lengths)
    async with router(engines, monkeypatch, decodes=2) as it:
        began_s = time.monotonic()
        await asyncio.gather(*await it.at_once(wanted))
        took_s = time.monotonic() - began_s
        assert in_order([number for number in it.seen.permits if number != 6]), str(it.seen)
        before = it.seen.reserved[: it.seen.reserved.index(6)]
        assert len([number for number in before if number > 6]) <= 5, "6 blocks each, and it has 31"
    calls, refused = asked(engines, "d1", "d2")
    assert calls == 12 + refused
    assert refused <= 12 + probes(took_s)
    await engines.idle("d1", "d2")


async def test_a_client_that_goes_away_leaves_the_queue(
    engines: Stack, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engines.prefill()
    await engines.decode(engine={"capacity_tokens": 16 * BLOCK})
    wanted = prompts(reference, *[14 * BLOCK] * 3)
    async with router(engines, monkeypatch, decodes=1) as it:
        first, second, third = await it.at_once(wanted)
        second.cancel()
        await asyncio.gather(first, third)
        assert it.seen.reserved == [0, 2]

        async def empty() -> bool:
            return await it.running() == 0

        await eventually(empty)
    await engines.idle("decode")
