"""GET /v1/commons: a picture of the whole stack, once and as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcommons.errors import Unavailable
from kvcommons.pb import holder_pb2, holder_pb2_grpc
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.rpc.server import RpcServer
from kvcommons.telemetry.telemetry import Telemetry
from services.router.api.schemas.answers import Error
from services.router.api.schemas.commons import CommonsPicture
from services.router.commons.watch import VIEWERS_MAX, CommonsWatch
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.machine import scaled
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

STREAM = {"stream": "true"}


async def pictures(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The events' data, "[DONE]" included."""
    async for line in response.content:
        if line.startswith(b"data: "):
            event = "[DONE]" if line == b"data: [DONE]\n" else json.loads(line[6:])
            if event != "[DONE]":
                (Error if "error" in event else CommonsPicture).model_validate(event)
            yield event


async def show_lenders(served: Stack) -> None:
    """A pool that lends, and the ledger itself, beside the engine and the store."""
    engines = [one for engine in served.engines for one in engine.instances()]
    pool = pb.Instance(
        id="pool-0",
        service="attention_pool",
        control_address=engines[0].control_address,
        host="there",
        load=pb.Load(total_blocks=64, free_blocks=60, ready=True, loans={"decode-engine0": 4}),
    )
    ledger = pb.Instance(
        id="ledger-0", service="ledger", control_address=served.ledger.address, load=pb.Load(ready=True)
    )
    await served.ledger.show([*engines, served.store.instance, pool, ledger])
    await eventually(lambda: _knows(served, 5))


async def _knows(served: Stack, instances: int) -> bool:
    return len((await served.get("/v1/commons"))[1]["instances"]) == instances


async def test_a_picture_has_services_tiers_loans_and_settlements(served: Stack) -> None:
    await show_lenders(served)
    legs = [pb.Leg(debtor="a", creditor="b", left_blocks=3, settled_blocks=5)]
    settlement = pb.Settlement(id="1-1", term=1, legs=legs, step=pb.Settlement.Step.COPY, round=2)
    served.ledger.settlements = [pb.SettlementReport(settlement=settlement, begun_ms=250)]
    served.says("hello")
    body = {"messages": [{"role": "user", "content": "hi"}], "session_id": "seen"}
    await served.post("/v1/chat/completions", body)
    await eventually(lambda: _has_settlement(served))
    status, body = await served.get("/v1/commons")
    assert status == 200
    assert abs(body["taken_at"] - time.time()) < scaled(60)
    assert [(one["service"], one["id"]) for one in body["instances"]] == [
        ("prefill", "prefill-engine0"),
        ("decode", "decode-engine0"),
        ("attention_pool", "pool-0"),
        ("kvstore", "kvstore-0"),
        ("ledger", "ledger-0"),
    ]
    assert body["loans"] == [{"creditor": "pool-0", "debtor": "decode-engine0", "blocks": 4}]
    (tiers,) = body["tiers"]
    assert tiers["kvstore"] == "kvstore-0"
    assert tiers["sessions"] >= 1, "the real store said so"
    (reported,) = body["settlements"]
    assert (reported["id"], reported["step"], reported["round"], reported["begun_s"]) == (
        "1-1",
        "copy",
        2,
        0.25,
    )
    assert reported["legs"][0]["settled_blocks"] == 5
    (default,) = body["classes"]
    assert (default["name"], default["met"]) == ("default", 1)


async def _has_settlement(served: Stack) -> bool:
    return bool((await served.get("/v1/commons"))[1]["settlements"])


async def test_a_sequence_is_seen_from_its_first_token_to_its_last(served: Stack) -> None:
    served.says("word " * 400)
    served.script.delay_s = 0.01
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    async with (
        served.http.get("/v1/commons", params=STREAM) as watched,
        served.http.post("/v1/chat/completions", json=body) as answer,
    ):
        tokens: list[int] = []
        async for picture in pictures(watched):
            for one in picture["sequences"]:
                assert one["decode"] in (None, "decode-engine0")
                if one["phase"] == "generating":
                    assert [held["instance"] for held in one["holders"]] == ["decode-engine0"]
                    assert 16 * one["holders"][0]["blocks"] >= one["tokens"] > one["prompt_tokens"]
                    tokens.append(one["tokens"])
            assert picture["queue"]["running"] >= len(picture["sequences"])
            if len(set(tokens)) >= 3:
                break
        assert tokens == sorted(tokens)
        answer.close()
        async for picture in pictures(watched):
            if not picture["sequences"]:
                break


async def test_services_are_asked_once_for_all_viewers_and_never_for_none(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await show_lenders(served)
    viewer, watching = CommonsWatch.viewer, 0

    @contextmanager
    def counted(watch: CommonsWatch) -> Iterator[None]:
        nonlocal watching
        with viewer(watch):
            watching += 1
            try:
                yield
            finally:
                watching -= 1

    monkeypatch.setattr(CommonsWatch, "viewer", counted)
    before = served.ledger.asked

    async def see(count: int) -> set[float]:
        async with served.http.get("/v1/commons", params=STREAM) as watched:
            seen = set()
            async for picture in pictures(watched):
                seen.add(picture["taken_at"])
                if len(seen) == count:
                    break
        return seen

    began_s = time.monotonic()
    seen = await asyncio.gather(*(see(4) for _ in range(5)))
    seen_s = time.monotonic() - began_s
    taken = served.ledger.asked - before
    assert len(set().union(*seen)) <= taken + 1, "one may be from before"
    assert taken < 4 * 5
    # One that was under way when the last viewer left may still come.
    await eventually(lambda: not watching, "the router has seen that they left")
    await served.get("/v1/commons")
    after = served.ledger.asked
    await asyncio.sleep(seen_s)  # for each of those who watched, four were taken meanwhile
    assert served.ledger.asked == after


async def test_a_service_that_is_away_is_missing_from_the_picture_and_stops_nothing(
    socket_folder: Path, rest_store: KvStore
) -> None:
    async with stack(socket_folder, rest_store) as served:
        gone = [
            pb.Instance(
                id=f"{service}-gone",
                service=service,
                control_address="127.0.0.1:1",
                data_address="tcp:127.0.0.1:1",
                load=pb.Load(ready=True),
            )
            for service in ("kvstore", "ledger")
        ]
        await served.ledger.show(gone)
        await eventually(lambda: _knows(served, 2))
        status, body = await served.get("/v1/commons")
        assert (status, body["settlements"]) == (200, [])
        assert body["tiers"][0]["kvstore"] == "kvstore-gone"
        assert body["tiers"][0]["dram_blocks"] is None


class Lender(holder_pb2_grpc.HolderServicer):
    """Says what a test has it say of its memory, when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.answer, self.gone = asyncio.Event(), asyncio.Event(), False
        self.reply = holder_pb2.InspectReply(total_blocks=64, free_blocks=58)
        self.reply.segments.add(owner="decode-engine0", blocks=6, lease_left_ms=900)

    async def Inspect(self, request: holder_pb2.InspectRequest, context: Any) -> holder_pb2.InspectReply:
        self.asked.set()
        await self.answer.wait()
        if self.gone:
            raise Unavailable("it has no time")
        return self.reply


async def test_a_picture_is_of_the_moment_at_which_all_have_answered(
    socket_folder: Path, rest_store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that begins while a lender is asked is in it, and what is lent is what the lender says then;
    of one that does not answer it is what it said last, with its age."""
    monkeypatch.setattr("services.router.api.commons._ASK_S", scaled(10))
    lender = Lender()
    server = RpcServer(f"unix:{socket_folder}/lender.sock", Telemetry.off("attention_pool"))
    server.add(holder_pb2_grpc.add_HolderServicer_to_server, lender)
    await server.start()
    async with stack(socket_folder, rest_store) as served:
        engines = [one for engine in served.engines for one in engine.instances()]
        load = pb.Load(total_blocks=64, free_blocks=60, ready=True, loans={"decode-engine0": 4})
        pool = pb.Instance(id="pool-0", service="attention_pool", control_address=server.address, load=load)
        served.ledger.silent_ms = {"pool-0": 65_000}
        await served.ledger.show([*engines, served.store.instance, pool])
        await eventually(lambda: _serves(served))
        served.says("word " * 400)
        served.script.delay_s = 0.01
        taking = asyncio.create_task(served.get("/v1/commons"))
        await asyncio.wait_for(lender.asked.wait(), scaled(10))
        body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
        async with served.http.post("/v1/chat/completions", json=body) as answer:
            assert (await answer.content.readline()).startswith(b"data: ")
            lender.answer.set()
            _, picture = await taking
            answer.close()
        CommonsPicture.model_validate(picture)
        assert len(picture["sequences"]) == 1
        (shown,) = [one for one in picture["instances"] if one["id"] == "pool-0"]
        assert (shown["free_blocks"], shown["answers"]) == (58, True)
        assert [loan["blocks"] for loan in picture["loans"]] == [6]
        lender.gone = True
        await eventually(lambda: _shows(served, free_blocks=60, answers=False))
        _, picture = await served.get("/v1/commons")
        (shown,) = [one for one in picture["instances"] if one["id"] == "pool-0"]
        assert 65 <= shown["silent_s"] < 65 + scaled(60)
        assert [loan["blocks"] for loan in picture["loans"]] == [4]
    await server.drain(0)


async def _serves(served: Stack) -> bool:
    return (await served.get("/health"))[0] == 200


async def _shows(served: Stack, **fields: Any) -> bool:
    _, picture = await served.get("/v1/commons")
    (shown,) = [one for one in picture["instances"] if one["id"] == "pool-0"]
    return shown | fields == shown


async def test_viewers_are_bounded(served: Stack) -> None:
    watching = [await served.http.get("/v1/commons", params=STREAM) for _ in range(VIEWERS_MAX)]
    status, body = await served.get("/v1/commons?stream=true")
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert "viewers" in body["error"]["message"]
    for one in watching:
        one.close()
    await eventually(lambda: _may_watch(served))


async def _may_watch(served: Stack) -> bool:
    async with served.http.get("/v1/commons", params=STREAM) as watched:
        return watched.status == 200


async def test_a_stream_ends_when_the_router_stops(served: Stack) -> None:
    async with served.http.get("/v1/commons", params=STREAM) as watched:
        events = pictures(watched)
        await anext(events)
        served.stop.set()
        rest = [event async for event in events]
    assert rest[-1] == "[DONE]"


@pytest.mark.parametrize("stream", ["1", "", "True"])
async def test_a_stream_is_asked_for_by_true_or_false(served: Stack, stream: str) -> None:
    status, body = await served.get(f"/v1/commons?stream={stream}")
    assert (status, body["error"]["param"]) == (400, "stream")


async def test_it_is_the_operators_and_ends_with_the_key(socket_folder: Path, rest_store: KvStore) -> None:
    keys, secret = socket_folder / "keys", socket_folder / "secret"
    lines = "ann key-of-ann-1\nops key-of-ops-1 operator\n"
    keys.write_text(lines)
    secret.write_bytes(b"s" * 32)
    settings = {"api_keys": str(keys), "secret_file": str(secret)}
    ops, ann = ({"Authorization": f"Bearer key-of-{name}-1"} for name in ("ops", "ann"))
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=ops)
        for params in ({}, STREAM):
            async with served.http.get("/v1/commons", params=params, headers=ann) as refused:
                assert refused.status == 403
                assert (await refused.json())["error"]["code"] == "permission_denied"
        for without, code in (("ops key-of-ops-1\n", "permission_denied"), ("", "invalid_api_key")):
            async with served.http.get("/v1/commons", params=STREAM, headers=ops) as watched:
                events = pictures(watched)
                assert "error" not in await anext(events)
                keys.write_text("ann key-of-ann-1\n" + without)
                last = [event async for event in events][-1]
            assert last["error"]["code"] == code
            keys.write_text(lines)
            await eventually(lambda: _is_operator(served, ops))


async def _is_operator(served: Stack, headers: dict[str, str]) -> bool:
    async with served.http.get("/v1/status", headers=headers) as answered:
        return answered.status == 200
