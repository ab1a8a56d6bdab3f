"""Turns over failing instances and a store that goes away: the client sees the very same tokens, or a clear
error."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcommons.errors import CapacityExhausted, Internal, InvalidInput, StaleEpoch, Unavailable
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.machine import scaled
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
TEXT = "one two three four five six seven"


def ask(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "go"}], **more}


def text_of(found: list[Any]) -> str:
    chunks = [event for event in found if isinstance(event, dict) and event.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_a_stream_goes_on_elsewhere_without_a_gap(pair: Stack) -> None:
    (answer,) = pair.says(TEXT)
    pair.script.fail_at = {3: Unavailable("gone"), 6: StaleEpoch("another epoch")}
    found = await pair.stream(CHAT, ask(seed=1, stream_options={"include_usage": True}))
    assert text_of(found) == TEXT
    assert found[-1] == "[DONE]"
    assert found[-2]["timings"]["resumptions"] == 2
    assert found[-2]["usage"]["completion_tokens"] == len(answer)
    requests = sorted(
        (request for engine in pair.engines for request in engine.decode.jobs),
        key=lambda request: len(request.tokens),
    )
    prompt = requests[0].prompt_tokens
    assert [len(request.tokens) - prompt for request in requests] == [0, 3, 6]
    assert {request.prompt_tokens for request in requests} == {prompt}
    assert {request.sampling.seed for request in requests} == {1}
    assert all(engine.decode.jobs for engine in pair.engines), "it went on on the other instance"
    await eventually(lambda: pair.calls == 0)


async def test_an_instance_that_dies_for_real(pair: Stack) -> None:
    pair.says(TEXT)
    pair.script.delay_s = 0.05
    asked = asyncio.create_task(pair.stream(CHAT, ask()))
    await eventually(lambda: pair.calls > 0)
    busy = next(engine for engine in pair.engines if engine.decode.running)
    await asyncio.sleep(0.1)
    await busy.stop()
    found = await asked
    assert text_of(found) == TEXT
    assert found[-1] == "[DONE]"


async def test_prefill_fails_and_is_tried_again(pair: Stack) -> None:
    pair.says(TEXT)
    pair.script.prefill_fails = [Unavailable("gone"), Internal("broken")]
    assert text_of(await pair.stream(CHAT, ask())) == TEXT


async def test_a_prefill_that_never_gives_its_token_holds_nothing_up(pair: Stack) -> None:
    """It told decode to start, and fell silent: what decode sends is worth more than prefill's account."""
    pair.says(TEXT)
    pair.script.tells = "never"
    found = await pair.stream(CHAT, ask(stream_options={"include_usage": True}))
    assert text_of(found) == TEXT
    assert found[-1] == "[DONE]"
    assert found[-2]["timings"]["resumptions"] == 0
    assert sum(len(engine.decode.jobs) for engine in pair.engines) == 1
    await eventually(lambda: pair.calls == 0)


async def test_missing_history_is_pushed_by_prefill(served: Stack) -> None:
    served.says(TEXT)
    served.script.missing = [0]
    served.script.delay_s = 0.05
    assert text_of(await served.stream(CHAT, ask())) == TEXT
    pushes = [request.push_from_block for request in served.engines[0].prefill.requests]
    assert pushes == [0, 0]
    assert len(served.engines[0].decode.jobs) == 1


async def test_a_silent_decode_is_taken_for_dead(pair: Stack) -> None:
    pair.says(TEXT)
    pair.script.stall_at = 4
    found = await pair.stream(CHAT, ask())
    assert text_of(found) == TEXT
    assert found[-1] == "[DONE]"


async def test_a_full_decode_is_waited_for_and_then_a_429(socket_folder: Path, rest_store: KvStore) -> None:
    settings = {"request_deadline_s": 3.0, "resume_deadline_s": 0.2}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show()
        served.says(TEXT)
        served.script.reserve_error = CapacityExhausted("no blocks", retry_after_ms=1500)
        served.script.reserve_errors = 2  # which it hears a pause apart: nobody tells of room
        assert (await served.post(CHAT, ask()))[0] == 200
        served.script.reserve_errors = 10_000
        async with served.http.post(CHAT, json=ask()) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "2"
            assert (await response.json())["error"]["code"] == "capacity_exhausted"


async def test_who_waits_behind_others_gets_the_same_error_at_its_deadline(
    socket_folder: Path, rest_store: KvStore
) -> None:
    async with stack(socket_folder, rest_store, settings={"request_deadline_s": 2.0}) as served:
        await served.show()
        served.says(TEXT)
        served.script.reserve_error = CapacityExhausted("no blocks", retry_after_ms=1500)
        served.script.reserve_errors = 10_000

        async def refused() -> str:
            async with served.http.post(CHAT, json=ask()) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                error = (await response.json())["error"]
                assert error["code"] == "capacity_exhausted"
                return str(error["message"])

        first = asyncio.create_task(refused())
        await eventually(lambda: served.engines[0].decode.jobs)
        # More of them than can come to ask in that time, however long a slow machine makes it.
        messages = await asyncio.gather(*(refused() for _ in range(60)))
        assert await first == "no blocks"
        assert any("others wait" in message for message in messages)
        assert len(served.engines[0].decode.jobs) <= scaled(6), "the first in the queue asks, a pause apart"
        assert served.calls == 0


async def test_a_client_of_a_whole_answer_that_leaves_stops_it(served: Stack) -> None:
    served.says("word " * 1000)
    served.script.delay_s = 0.5  # all of it takes far longer than is waited below
    asked = asyncio.create_task(served.post(CHAT, ask()))
    await eventually(lambda: served.calls > 0)
    asked.cancel()
    await eventually(lambda: served.calls == 0)


def small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that takes little that nobody has read, however busy the machine is."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    return made


async def test_a_client_that_does_not_read_loses_its_turn(socket_folder: Path, rest_store: KvStore) -> None:
    session_id = f"idle-{uuid.uuid4().hex}"
    connector = aiohttp.TCPConnector(socket_factory=small_socket)
    async with (
        stack(socket_folder, rest_store, settings={"client_stall_s": 0.5}) as served,
        aiohttp.ClientSession(served.url, connector=connector) as http,
    ):
        await served.show()
        served.says("word " * 1900)
        many = ask(session_id=session_id, stream=True, logprobs=True, top_logprobs=20, max_tokens=1900)
        async with http.post(CHAT, json=many) as response:
            assert response.status == 200, await response.text()
            # aiohttp's client stops reading once its buffer is full: what is sent stays in the sockets.

            async def ended() -> bool:
                return bool((await served.get("/v1/status"))[1]["queue"]["running"] == 0)

            await eventually(ended)
        status, session = await served.get(f"/v1/sessions/{session_id}")
        assert (status, session["error"]["code"]) == (404, "session_not_found")


async def test_an_error_any_instance_would_give_ends_the_request(pair: Stack) -> None:
    pair.says(TEXT)
    pair.script.reserve_error = InvalidInput("no such thing", param="logit_bias")
    pair.script.reserve_errors = 1
    status, reply = await pair.post(CHAT, ask())
    assert (status, reply["error"]["param"]) == (400, "logit_bias")


async def test_a_request_that_kills_its_instances_does_not_go_through_all(pair: Stack) -> None:
    pair.says(TEXT)
    pair.script.prefill_fails = [Internal(f"crash {at}") for at in range(20)]
    status, reply = await pair.post(CHAT, ask())
    assert (status, reply["error"]["code"]) == (500, "internal_error")
    assert sum(len(engine.prefill.jobs) for engine in pair.engines) == 4
    await eventually(lambda: pair.calls == 0)


async def test_instances_that_do_not_come_back_are_a_clear_error(pair: Stack) -> None:
    pair.says(TEXT)
    pair.script.stall_at = 2
    asked = asyncio.create_task(pair.stream(CHAT, ask()))
    await eventually(lambda: pair.script.stall_at is None, "two tokens were sent")
    for engine in pair.engines:
        await engine.stop()
    found = await asyncio.wait_for(asked, scaled(8))
    assert found[-1]["error"]["code"] == "unavailable"
    assert all(choice["finish_reason"] is None for event in found[:-1] for choice in event["choices"])


async def test_the_deadline_of_a_request_holds(socket_folder: Path, rest_store: KvStore) -> None:
    async with stack(socket_folder, rest_store, settings={"request_deadline_s": 1.0}) as served:
        await served.show()
        served.says("word " * 200)
        served.script.delay_s = 0.1
        found = await asyncio.wait_for(served.stream(CHAT, ask()), scaled(5))
        assert found[-1]["error"]["code"] == "deadline_exceeded"
        await eventually(lambda: served.calls == 0)


@pytest.fixture
def lone_store() -> Iterator[KvStore]:
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    kvstore = KvStore(folder)
    kvstore.start()
    yield kvstore
    kvstore.stop()
    shutil.rmtree(folder)


@pytest.fixture(params=[6.0])
async def lone(
    request: pytest.FixtureRequest, socket_folder: Path, lone_store: KvStore
) -> AsyncIterator[Stack]:
    """Its parameter is the deadline of a commit in seconds."""
    settings = {"lease_ms": 600, "commit_deadline_s": request.param}
    async with stack(socket_folder, lone_store, settings=settings) as it:
        await it.show()
        yield it


async def test_the_store_restarts_in_mid_turn(lone: Stack) -> None:
    """The stream goes on, and its end waits for the commit. The lease is renewed: the turn outlasts it."""
    lone.says(TEXT)
    lone.script.delay_s = 0.1
    session = uuid.uuid4().hex
    asked = asyncio.create_task(lone.stream(CHAT, ask(session_id=session)))
    await eventually(lambda: lone.calls > 0)
    lone.store.kill()
    await asyncio.to_thread(lone.store.start)
    found = await asked
    assert text_of(found) == TEXT
    assert found[-1] == "[DONE]"
    _, record = await lone.get(f"/v1/sessions/{session}")
    assert record["messages"][1]["content"] == TEXT


@pytest.mark.parametrize("lone", [1.0], indirect=True)
async def test_a_turn_that_cannot_be_committed_never_ends_well(lone: Stack) -> None:
    lone.says(TEXT)
    session = uuid.uuid4().hex
    lone.script.delay_s = 0.05
    streamed = asyncio.create_task(lone.stream(CHAT, ask(session_id=session)))
    await eventually(lambda: lone.calls > 0)
    lone.store.kill()
    found = await streamed
    assert text_of(found) == TEXT
    assert found[-1]["error"]["code"] == "store_unavailable"
    assert all(choice["finish_reason"] is None for event in found[:-1] for choice in event["choices"])
    status, reply = await lone.post(CHAT, ask(session_id=session))
    assert (status, reply["error"]["code"]) == (503, "store_unavailable")
    # Without a session nothing has to be kept.
    assert (await lone.post(CHAT, ask()))[0] == 200
    await asyncio.to_thread(lone.store.start)
    await eventually(lambda: _free(lone, session), within_s=15)


async def _free(lone: Stack, session: str) -> bool:
    """The next turn of the session is served: the last one's lease ran out or was given back."""
    status, _ = await lone.post(CHAT, ask(session_id=session))
    return status == 200


async def test_a_session_deleted_in_mid_turn_ends_it(lone: Stack) -> None:
    session = uuid.uuid4().hex
    lone.says(TEXT)
    assert (await lone.post(CHAT, ask(session_id=session)))[0] == 200
    lone.says("word " * 500)
    lone.script.delay_s = 0.02
    asked = asyncio.create_task(lone.stream(CHAT, ask(session_id=session)))
    await eventually(lambda: lone.calls > 0)
    async with lone.http.delete(f"/v1/sessions/{session}") as response:
        assert response.status == 200
    found = await asyncio.wait_for(asked, scaled(5))
    assert found[-1]["error"]["code"] == "session_not_found"
    await eventually(lambda: lone.calls == 0)


def router_tasks() -> Counter[str]:
    """The router's own tasks, by what they run; those of connections are aiohttp's."""
    names = Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    kinds = ("Attempt", "SessionTurn", "Generation", "Dispatch", "_watch")
    return Counter({name: count for name, count in names.items() if name.startswith(kinds)})


async def test_nothing_is_left_behind(pair: Stack) -> None:
    """Requests that end well, fail, are stopped by a stop string, and lose their client, in one heap."""
    pair.says(TEXT)
    pair.script.delay_s = 0.005
    before = router_tasks()

    async def one(number: int) -> None:
        kinds: list[dict[str, Any]] = [{}, {"n": 3}, {"stop": " four"}, {"max_tokens": 1}]
        body = ask(**kinds[number % 4])
        if number % 5 == 0:
            pair.script.fail_at[number % 6 + 1] = Unavailable("gone")
        if number % 3 == 0:
            body["session_id"] = uuid.uuid4().hex
            body["n"] = 1
        call = asyncio.create_task(pair.post(CHAT, body))
        if number % 7 == 0:
            await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.wait((call,))
        else:
            assert (await call)[0] == 200

    await asyncio.gather(*map(one, range(60)))
    await eventually(lambda: pair.calls == 0)
    await eventually(lambda: router_tasks() == before)
    _, status = await pair.get("/v1/status")
    assert status["queue"] == {"running": 0, "waiting": 0}
