"""Requests that come again under one Idempotency-Key: told the same again, once it was computed."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from services.router.sessions.turn import SessionTurn
from services.router.turn.planning import RequestPlan
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

on_both = pytest.mark.parametrize("rest_store", ["embedded", "sql"], indirect=True)

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}]}
STATELESS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HI | {"logprobs": True, "n": 2}),
    (COMPLETIONS, {"prompt": "hi there", "echo": True, "logprobs": 1}),
    (RESPONSES, {"input": "hi there", "store": False}),
    (MESSAGES, HI | {"model": "demo", "max_tokens": 20}),
]


def new(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:8]}"


async def send(
    served: Stack, path: str, body: dict[str, Any], key: str, **headers: str
) -> tuple[int, bytes, bool]:
    """Status, body, and whether it says that it was told before."""
    async with served.http.post(path, json=body, headers={"Idempotency-Key": key, **headers}) as response:
        replayed = response.headers.get("Idempotent-Replayed")
        assert replayed in (None, "true")
        return response.status, await response.read(), replayed is not None


async def code_of(served: Stack, path: str, body: dict[str, Any], key: str) -> tuple[int, str, str | None]:
    status, answer, _ = await send(served, path, body, key)
    error = json.loads(answer)["error"]
    return status, error["code"], error["param"]


def jobs(served: Stack) -> int:
    return sum(len(engine.prefill.jobs) for engine in served.engines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), STATELESS)
async def test_an_answer_without_a_session_is_given_again(
    served: Stack, path: str, body: dict[str, Any], stream: bool
) -> None:
    """To the byte, and computed once; without a key, or with another one, anew."""
    served.says("hello")
    body, key = body | {"stream": stream}, new("key")
    status, first, replayed = await send(served, path, body, key)
    assert (status, replayed) == (200, False)
    computed = jobs(served)
    served.says("something else")
    assert await send(served, path, body, key) == (200, first, True)
    assert jobs(served) == computed
    _, other, replayed = await send(served, path, body, new("key"))
    assert not replayed
    assert other != first
    assert jobs(served) == 2 * computed


async def test_a_key_stands_for_one_request(served: Stack) -> None:
    """Method, path, session and body: another one under it is refused, and changes nothing."""
    served.says("hello")
    key, session = new("key"), new("s")
    for body in (HI, HI | {"session_id": session}):
        key = new("key")
        assert (await send(served, CHAT, body, key))[0] == 200
        computed = jobs(served)
        refused = (422, "idempotency_key_reused", "Idempotency-Key")
        assert await code_of(served, CHAT, body | {"max_tokens": 3}, key) == refused
        assert await code_of(served, COMPLETIONS, {"prompt": "a"}, key) == refused
        status, _, _ = await send(served, CHAT, HI, key, **{"X-Session-ID": new("s")})
        assert status == 422
        assert jobs(served) == computed
        assert (await send(served, CHAT, body, key))[2]


@pytest.mark.parametrize("given", ["", "k" * 256, "k\u00e9y"])
async def test_keys_are_short_texts(served: Stack, given: str) -> None:
    assert await code_of(served, CHAT, HI, given) == (400, "invalid_value", "Idempotency-Key")


@pytest.mark.parametrize("in_session", [False, True])
async def test_while_it_is_under_way_it_is_a_409(served: Stack, in_session: bool) -> None:
    served.says("hello there, how are you?")
    served.script.delay_s = 0.2
    body, key = HI | ({"session_id": new("s")} if in_session else {}), new("key")
    first = asyncio.create_task(send(served, CHAT, body, key))
    await eventually(lambda: served.calls)
    assert await code_of(served, CHAT, body, key) == (409, "idempotency_in_progress", "Idempotency-Key")
    status, answer, _ = await first
    assert status == 200
    again = await send(served, CHAT, body, key)
    assert json.loads(again[1])["choices"] == json.loads(answer)["choices"]
    assert again[2]


async def test_a_failure_is_not_kept(served: Stack) -> None:
    served.says("hello")
    body, key = HI, new("key")
    served.script.prefill_fails = [InvalidInput("no")]
    assert (await send(served, CHAT, body, key))[0] == 400
    status, _, replayed = await send(served, CHAT, body, key)
    assert (status, replayed) == (200, False)
    assert await code_of(served, CHAT, body | {"temperature": 9}, new("key")) == (
        400, "invalid_value", "temperature",
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_who_went_away_before_the_end_has_it_computed_anew(served: Stack, stream: bool) -> None:
    """Nothing of a turn that was broken off is in its session, and so it is no answer to be given again."""
    served.says("hello there, how are you?")
    served.script.delay_s = 0.2
    session, key = new("s"), new("key")
    body = HI | {"session_id": session, "stream": stream}
    first = asyncio.create_task(send(served, CHAT, body, key))
    await eventually(lambda: served.calls)
    first.cancel()
    await eventually(lambda: not served.calls)
    served.script.delay_s = 0.0

    async def answered() -> bool:
        status, _, replayed = await send(served, CHAT, body, key)
        assert status in (200, 409)
        assert not replayed
        return status == 200

    await eventually(answered)
    _, record = await served.get(f"/v1/sessions/{session}")
    assert record["version"] == 1


FIRST = HI | {"logprobs": True, "top_logprobs": 2, "temperature": 0}


@on_both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_sessions_turn_is_told_by_any_router_however_late(
    served: Stack, socket_folder: Path, rest_store: KvStore, stream: bool
) -> None:
    """After later turns, by a router that has just started, and with no instance that could compute anything:
    the record knows what was answered, its log-probabilities and its usage included."""
    served.says("hello, Ann")
    served.script.cached_tokens = 16
    session, key = new("s"), new("key")
    body = FIRST | {"session_id": session, "stream": stream, "stop": ", B"}
    if stream:
        body["stream_options"] = {"include_usage": True}
    _, first, replayed = await send(served, CHAT, body, key)
    assert not replayed
    assert (await send(served, CHAT, body, key))[2]
    for question in ("who am I?", "sure?"):
        served.says("Ann")
        asked = {"messages": [{"role": "user", "content": question}], "session_id": session}
        assert (await served.post(CHAT, asked))[0] == 200
    _, before = await served.get(f"/v1/sessions/{session}")
    async with stack(socket_folder / "b", rest_store) as fresh:
        await fresh.show(engines=False)
        status, reported, replayed = await send(fresh, CHAT, body, key)
        assert (status, replayed) == (200, True)
        assert jobs(fresh) == 0
        assert said(reported, stream) == said(first, stream)
        reused = FIRST | {"session_id": session, "stream": stream}
        assert (await code_of(fresh, CHAT, reused, key))[:2] == (422, "idempotency_key_reused")
        _, after = await fresh.get(f"/v1/sessions/{session}")
        assert after["messages"] == before["messages"]
        assert (after["version"], after["token_ids"]) == (3, before["token_ids"])


def said(answer: bytes, stream: bool) -> dict[str, Any]:
    """What a client makes of it, whichever pieces it came in. Timings are those of each call."""
    if not stream:
        return dict(json.loads(answer))
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    content, logprobs, reasons = "", list[Any](), list[str]()
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            logprobs += (choice["logprobs"] or {}).get("content", ())
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    common = {name: chunks[0][name] for name in ("id", "created", "model", "service_tier", "session_id")}
    return common | {
        "content": content, "logprobs": logprobs, "reasons": reasons, "usage": chunks[-1]["usage"],
        "fingerprint": chunks[0]["system_fingerprint"],
    }  # fmt: skip


@on_both
async def test_a_turn_that_another_router_has_committed_meanwhile_is_found_with_the_lease(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the record and the turn's begin it was committed: whoever has the lease looks
    again, computes nothing, and the session is free at once."""
    served.says("hello")
    session, key = new("s"), new("key")
    body = HI | {"session_id": session}
    _, first, _ = await send(served, CHAT, body, key)
    computed = jobs(served)

    async def nothing(plan: RequestPlan, *asked: Any, **options: Any) -> bool:
        return False

    abandon = SessionTurn.abandon

    async def slowly(turn: SessionTurn) -> None:
        await asyncio.sleep(0.2)
        await abandon(turn)

    with monkeypatch.context() as patch:
        patch.setattr(RequestPlan, "_answered_before", nothing)
        patch.setattr(SessionTurn, "abandon", slowly)
        status, reported, replayed = await send(served, CHAT, body, key)
    assert (status, replayed) == (200, True)
    assert json.loads(reported) == json.loads(first)
    assert jobs(served) == computed
    assert (await served.post(CHAT, body))[0] == 200


@on_both
async def test_where_another_router_has_the_turn_it_is_a_409(
    served: Stack, socket_folder: Path, rest_store: KvStore
) -> None:
    served.says("hello there, how are you?")
    served.script.delay_s = 0.2
    session, key = new("s"), new("key")
    body = HI | {"session_id": session}
    # It is up before the first call, which may be answered in less time than a router takes to start.
    async with stack(socket_folder / "b", rest_store) as other:
        await other.show()
        other.says("not this")
        first = asyncio.create_task(send(served, CHAT, body, key))
        await eventually(lambda: served.calls)
        assert (await code_of(other, CHAT, body, key))[:2] == (409, "turn_in_progress")
        _, answer, _ = await first
        status, reported, replayed = await send(other, CHAT, body, key)
        assert (status, replayed) == (200, True)
        assert json.loads(reported) == json.loads(answer)


@on_both
async def test_a_turn_that_went_on_in_a_branch_is_found_there(
    served: Stack, socket_folder: Path, rest_store: KvStore
) -> None:
    """Sent again, the same history would depart from the branch, too, and make another one."""
    session, key = new("s"), new("key")
    one = {"messages": [{"role": "user", "content": "I am Ann"}], "session_id": session}
    for question, answer in ((one, "hello, Ann"), (one, "hello again")):
        served.says(answer)
        assert (await served.post(CHAT, question))[0] == 200
    served.says("not Bob")
    whole = [
        {"role": "user", "content": "I am Ann"},
        {"role": "assistant", "content": "hello, Ann"},
        {"role": "user", "content": "am I Bob?"},
    ]
    body = {"messages": whole, "session_id": session}
    _, first, _ = await send(served, CHAT, body, key)
    assert json.loads(first)["branch"] == f"{session}~2"
    async with stack(socket_folder / "b", rest_store) as fresh:
        await fresh.show()
        fresh.says("never said")
        status, reported, replayed = await send(fresh, CHAT, body, key)
        assert (status, replayed) == (200, True)
        assert json.loads(reported) == json.loads(first)
        _, branches = await fresh.get(f"/v1/sessions/{session}/branches")
        assert [one["id"] for one in branches["data"]] == [f"{session}~2"]


@on_both
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_turn_of_a_session_that_a_header_names_is_told_again(
    served: Stack, socket_folder: Path, rest_store: KvStore, path: str
) -> None:
    """In the session, or in the branch that it made because another turn was under way, by a fresh router."""
    session = {"X-Session-ID": new("s")}
    text = {"role": "user", "content": "I am Ann"}
    body: dict[str, Any] = {"input": [text]} if path == RESPONSES else {"messages": [text]}
    body |= {"model": "demo", "max_tokens": 20} if path == MESSAGES else {}
    served.says("hello there, how are you?")
    served.script.delay_s = 0.1
    keys = [new("key"), new("key")]
    first = asyncio.create_task(send(served, path, body, keys[0], **session))
    await eventually(lambda: served.calls)
    beside = await send(served, path, body, keys[1], **session)
    answers = [await first, beside]
    assert [(status, replayed) for status, _, replayed in answers] == [(200, False)] * 2
    _, before = await served.get("/v1/sessions")
    async with stack(socket_folder / "b", rest_store) as fresh:
        await fresh.show()
        fresh.says("never said")
        for key, (_, answer, _) in zip(keys, answers, strict=True):
            status, reported, replayed = await send(fresh, path, body, key, **session)
            assert (status, replayed) == (200, True)
            assert json.loads(reported) == json.loads(answer)
        assert jobs(fresh) == 0
        _, after = await fresh.get("/v1/sessions")
        assert [one["id"] for one in after["data"]] == [one["id"] for one in before["data"]]


@on_both
@pytest.mark.parametrize("stream", [False, True])
async def test_stored_responses_are_told_again(
    served: Stack, socket_folder: Path, rest_store: KvStore, stream: bool
) -> None:
    """One that begins, one that goes on with the newest response, one that branches from an older one, and
    one of a conversation: by a fresh router, after all of them."""
    _, conversation = await served.post("/v1/conversations", {})
    reported: list[tuple[dict[str, Any], str, bytes]] = []
    ids: list[str] = []

    async def respond(said: str, **fields: Any) -> None:
        served.says(said)
        body, key = {"input": f"say {said}", "stream": stream, **fields}, new("key")
        status, answer, replayed = await send(served, RESPONSES, body, key)
        assert (status, replayed) == (200, False), answer
        reported.append((body, key, answer))
        ids.append(response_of(answer, stream)["id"])

    await respond("one", instructions="be kind")
    await respond("two", previous_response_id=ids[0], instructions="be kind")
    await respond("three", previous_response_id=ids[0])
    await respond("four", conversation=conversation["id"])
    _, before = await served.get("/v1/sessions")
    async with stack(socket_folder / "b", rest_store) as fresh:
        await fresh.show()
        fresh.says("never said")
        for body, key, answer in reported:
            status, again, replayed = await send(fresh, RESPONSES, body, key)
            assert (status, replayed) == (200, True)
            assert response_of(again, stream) == response_of(answer, stream)
        assert jobs(fresh) == 0
        _, after = await fresh.get("/v1/sessions")
        assert len(after["data"]) == len(before["data"])


def response_of(answer: bytes, stream: bool) -> dict[str, Any]:
    """The response as a whole."""
    if not stream:
        return dict(json.loads(answer))
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    last = json.loads(lines[-1])
    assert last["type"] == "response.completed"
    return dict(last["response"])


async def test_with_its_session_an_answer_is_gone(served: Stack) -> None:
    served.says("hello")
    session, key = new("s"), new("key")
    body = HI | {"session_id": session}
    assert (await send(served, CHAT, body, key))[0] == 200
    async with served.http.delete(f"/v1/sessions/{session}") as response:
        assert response.status == 200
    assert (await send(served, CHAT, body, key))[2] is False


async def test_what_a_session_does_not_keep_is_refused(served: Stack) -> None:
    body = HI | {"session_id": new("s"), "prompt_logprobs": 1}
    assert (await code_of(served, CHAT, body, new("key")))[::2] == (400, "prompt_logprobs")
    assert jobs(served) == 0
