"""Documents over REST: computed part by part, committed at the end; nobody chats on the session meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcommons.errors import Unavailable
from kvcommons.pb import ledger_pb2
from services.router.api.schemas.answers import SessionPrefillState
from tests.contract.rest_stack import BLOCK_TOKENS, MODEL, MODEL_FOLDER, WINDOW, KvStore, Stack, stack
from tests.machine import scaled
from tests.unit.model.chat_folders import MISTRAL
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)
pytestmark = pytest.mark.parametrize("rest_store", ["embedded", "sql"], indirect=True)

CHAT = "/v1/chat/completions"
DOCUMENT = " ".join(f"Friend number {i} likes blue." for i in range(120))


# So that a router is missed soon.
SOON = {"lease_ms": 900, "resume_deadline_s": 0.5}


@pytest.fixture
async def served(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    """A router that gives up soon."""
    settings = SOON | {"document_patience_s": 2.0}
    async with stack(socket_folder, rest_store, settings=settings) as it:
        await it.show()
        yield it


@pytest.fixture
def session(served: Stack) -> str:
    served.says("Nice.")
    return f"s-{uuid.uuid4().hex[:8]}"


def path_of(session: str) -> str:
    return f"/v1/sessions/{session}/prefill"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def events(served: Stack, method: str, path: str, body: Any = None) -> list[Any]:
    """Of a stream, each as it is described."""
    async with served.http.request(method, path, json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    for line in lines:
        if line != b"[DONE]":
            SessionPrefillState.model_validate_json(line)
    return [None if line == b"[DONE]" else json.loads(line) for line in lines]


async def next_state(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Of a stream, as its next event has it."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            state: dict[str, Any] = json.loads(line[6:])
            return state
    raise AssertionError("the stream ended while the document was running")


async def until(served: Stack, session: str, status: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_so() -> bool:
        nonlocal found
        _, found = await served.get(path_of(session))
        return bool(found["status"] == status)

    await eventually(is_so)
    return found


async def test_a_document_becomes_what_one_chats_on(served: Stack, session: str) -> None:
    *states, last, done = await events(
        served, "POST", path_of(session), {"content": DOCUMENT, "stream": True}
    )
    assert done is None
    assert (last["status"], last["percent"], last["role"]) == ("completed", 100, "system")
    assert [state["percent"] for state in states] == sorted(state["percent"] for state in states)
    _, record = await served.get(f"/v1/sessions/{session}")
    assert record["messages"] == [{"role": "system", "content": DOCUMENT}]
    assert record["version"] == 1
    assert record["tokens"] == last["tokens"] == last["computed_tokens"]
    parts = served.engines[0].prefill.jobs
    assert len(parts) > 1, "it is long enough for several"
    assert all(part.background for part in parts)
    assert [list(part.tokens) for part in parts] == [
        record["token_ids"][: len(part.tokens)] for part in parts
    ]
    assert len(parts[-1].tokens) == record["tokens"]
    assert all(len(part.tokens) % BLOCK_TOKENS == 0 for part in parts[:-1])
    status, _ = await served.post(CHAT, user("who likes blue?", session_id=session))
    assert status == 200
    assert not served.engines[0].prefill.jobs[-1].background
    asked = list(served.engines[0].decode.jobs[-1].tokens)
    whole = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "who likes blue?"}]
    await served.post(CHAT, {"messages": whole})
    assert asked == list(served.engines[0].decode.jobs[-1].tokens), "as if all had been sent at once"


async def test_a_document_in_a_conversation_is_a_question_with_an_empty_answer(
    served: Stack, session: str
) -> None:
    await served.post(CHAT, user("hello", session_id=session))
    _, before = await served.get(f"/v1/sessions/{session}")
    status, state = await served.post(path_of(session), {"content": DOCUMENT})
    assert (status, state["status"], state["role"]) == (202, "running", "user")
    await until(served, session, "completed")
    _, after = await served.get(f"/v1/sessions/{session}")
    assert after["token_ids"][: before["tokens"]] == before["token_ids"]
    assert [message["role"] for message in after["messages"]] == ["user", "assistant"] * 2
    assert after["messages"][-1]["content"] == ""
    status, _ = await served.post(CHAT, user("and now?", session_id=session))
    assert status == 200


async def test_a_chat_meanwhile_is_told_how_far_it_is(served: Stack, session: str) -> None:
    served.script.delay_s = 1.0
    await served.post(path_of(session), {"content": DOCUMENT})

    async def is_told() -> bool:
        status, reply = await served.post(CHAT, user("hello?", session_id=session))
        assert (status, reply["error"]["code"]) == (409, "turn_in_progress")
        return bool(re.search(r"[1-9][0-9.]*% of its \d+ tokens", reply["error"]["message"]))

    await eventually(is_told)
    status, reply = await served.post(path_of(session), {"content": "another one"})
    assert (status, reply["error"]["code"]) == (409, "turn_in_progress")
    *_, last, done = await events(served, "GET", path_of(session) + "?stream=true")
    assert (last["status"], done) == ("completed", None)


async def test_a_document_whose_client_goes_away_goes_on(served: Stack, session: str) -> None:
    served.script.delay_s = 0.3
    body = {"content": DOCUMENT, "stream": True}
    async with served.http.post(path_of(session), json=body) as response:
        await response.content.readline()
    state = await until(served, session, "completed")
    assert state["percent"] == 100
    status, _ = await served.post(CHAT, user("who likes blue?", session_id=session))
    assert status == 200


async def test_a_document_may_take_longer_than_a_request(socket_folder: Path, rest_store: KvStore) -> None:
    """A chat that begins later than the document comes to its deadline while the document goes on."""
    settings = SOON | {"request_deadline_s": 1.0, "document_part_s": scaled(0.05)}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show()
        served.says("word " * 200)
        served.script.delay_s = scaled(0.4)
        path, body = path_of(f"s-{uuid.uuid4().hex[:8]}"), {"content": DOCUMENT, "stream": True}
        states, later = [], []
        async with served.http.post(path, json=body) as response:
            states.append(await next_state(response))
            chat = asyncio.create_task(served.post(CHAT, user("hello")))
            while states[-1]["status"] == "running":
                states.append(await next_state(response))
                if chat.done():
                    later.append(states[-1]["status"])
                    served.script.delay_s = 0.0
        status, reply = await chat
        assert (status, reply["error"]["code"]) == (503, "deadline_exceeded")
        assert later[0] == "running"
        assert later[-1] == "completed", states[-1]["error"]
        measured = [state for state in states if 0 < state["computed_tokens"] < state["tokens"]]
        assert measured
        for state in measured:
            assert isinstance(state["seconds_left"], float), "it is foretold"
            assert state["seconds_left"] > 0
        assert states[-1]["seconds_left"] is None


async def test_a_document_that_is_ended_leaves_the_session_as_it_was(served: Stack, session: str) -> None:
    await served.post(CHAT, user("hello", session_id=session))
    _, before = await served.get(f"/v1/sessions/{session}")
    served.script.delay_s = 5.0
    await served.post(path_of(session), {"content": DOCUMENT})
    async with served.http.delete(path_of(session)) as response:
        assert (response.status, (await response.json())["status"]) == (200, "cancelled")
    await eventually(lambda: served.calls == 0)
    served.script.delay_s = 0.0
    status, _ = await served.post(CHAT, user("and now?", session_id=session))
    assert status == 200
    _, after = await served.get(f"/v1/sessions/{session}")
    assert after["version"] == 2
    assert [message["content"] for message in after["messages"]][:3] == ["hello", "Nice.", "and now?"]
    assert after["token_ids"][: before["tokens"]] == before["token_ids"]


async def test_parts_that_fail_are_tried_again(served: Stack, session: str) -> None:
    served.script.prefill_fails = [Unavailable("gone")] * 3
    *_, last, done = await events(served, "POST", path_of(session), {"content": DOCUMENT, "stream": True})
    assert (last["status"], done) == ("completed", None)
    assert not served.script.prefill_fails


async def test_one_that_gets_no_further_is_given_up(served: Stack, session: str) -> None:
    served.script.prefill_fails = [Unavailable("gone for good")] * 10_000
    *_, last = await events(served, "POST", path_of(session), {"content": DOCUMENT, "stream": True})
    assert (last["status"], last["error"]["code"]) == ("failed", "unavailable")
    served.script.prefill_fails = []
    status, _ = await served.get(f"/v1/sessions/{session}")
    assert status == 404
    status, _ = await served.post(CHAT, user("hello", session_id=session))
    assert status == 200


async def test_what_is_wrong_is_said_before_anything_is_computed(served: Stack, session: str) -> None:
    path = path_of(session)
    status, reply = await served.post(path, {"content": DOCUMENT * 2})
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (
        400, "context_length_exceeded", "content",
    )  # fmt: skip
    assert "too many for the context window" in reply["error"]["message"]
    status, reply = await served.post(path, {"content": DOCUMENT * 50})
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (
        400, "context_length_exceeded", "content",
    )  # fmt: skip
    for body, param in (
        ({}, "content"),
        ({"content": ""}, "content"),
        ({"content": "x", "role": "assistant"}, "role"),
        ({"content": "x", "document": 1}, "document"),
    ):
        status, reply = await served.post(path, body)
        assert (status, reply["error"]["param"]) == (400, param)
    status, reply = await served.post(path, {"content": "x", "model": "another"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert (await served.get(path))[0] == 404
    async with served.http.delete(path) as response:
        assert response.status == 404
    assert not served.engines[0].decode.jobs
    status, _ = await served.post(CHAT, user("hello", session_id=session))
    assert status == 200, "no lease was left behind"


async def test_a_role_that_the_template_refuses_is_refused_before_anything_is_computed(
    socket_folder: Path, rest_store: KvStore, tmp_path: Path
) -> None:
    """Mistral's knows questions and answers only, which take turns."""
    for file in MODEL_FOLDER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    session = f"s-{uuid.uuid4().hex[:8]}"
    async with stack(socket_folder, rest_store, model=tmp_path) as served:
        await served.show()
        served.says("Nice.")
        status, reply = await served.post(path_of(session), {"content": DOCUMENT, "role": "system"})
        assert (status, reply["error"]["param"]) == (400, "role")
        assert "Roles must alternate" in reply["error"]["message"]
        assert (await served.get(path_of(session)))[0] == 404
        assert (await served.get(f"/v1/sessions/{session}"))[0] == 404
        assert not served.engines[0].prefill.jobs
        status, state = await served.post(path_of(session), {"content": DOCUMENT})
        assert (status, state["role"]) == (202, "user")
        await until(served, session, "completed")
        _, record = await served.get(f"/v1/sessions/{session}")
        assert [(one["role"], one["content"]) for one in record["messages"]] == [
            ("user", DOCUMENT), ("assistant", ""),
        ]  # fmt: skip
        status, _ = await served.post(CHAT, user("who likes blue?", session_id=session))
        assert status == 200


async def test_a_document_beyond_all_memory_is_told_what_is_missing(
    socket_folder: Path, rest_store: KvStore
) -> None:
    session = f"s-{uuid.uuid4().hex[:8]}"
    async with stack(socket_folder, rest_store) as served:
        instances = [*served.engines[0].instances(), served.store.instance]
        for instance in instances[:2]:
            instance.load.CopyFrom(ledger_pb2.Load(total_blocks=8, free_blocks=8, ready=True))
        await served.ledger.show(instances)
        tokens = len(served.tokenizer.encode_text(DOCUMENT))
        assert 8 * BLOCK_TOKENS < tokens < WINDOW

        async def known() -> bool:
            return len((await served.get("/v1/status"))[1]["instances"]) == 3

        await eventually(known)
        status, reply = await served.post(path_of(session), {"content": DOCUMENT})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert reply["error"]["param"] == "content"
        needed = re.search(r"sequence of (\d+) tokens", reply["error"]["message"])
        missing = re.search(r"are missing, which is (\d+) tokens", reply["error"]["message"])
        assert needed
        assert missing
        assert int(needed[1]) > tokens, "the document, and its role"
        assert 0 <= int(missing[1]) - (int(needed[1]) - 8 * BLOCK_TOKENS) < BLOCK_TOKENS, "in whole blocks"
        assert not served.engines[0].decode.jobs
        assert MODEL.block_tokens == BLOCK_TOKENS
        assert (await served.get(path_of(session)))[0] == 404
        assert (await served.get(f"/v1/sessions/{session}"))[0] == 404
        served.says("Nice.")
        status, _ = await served.post(CHAT, user("hello", session_id=session))
        assert status == 200, "no lease was left behind"
        assert (await served.get(f"/v1/sessions/{session}"))[1]["messages"][0]["content"] == "hello"


@pytest.fixture
async def routers(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[tuple[Stack, Stack]]:
    """Two, each with engines of its own, over one store."""
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        async with (
            stack(socket_folder, rest_store, settings=SOON) as one,
            stack(Path(folder), rest_store, settings=SOON) as other,
        ):
            for router in (one, other):
                await router.show()
                router.says("Nice.")
            yield one, other


async def test_any_router_says_how_far_it_is_and_ends_it(routers: tuple[Stack, Stack]) -> None:
    one, other = routers
    session = f"s-{uuid.uuid4().hex[:8]}"
    one.script.delay_s = 0.6
    await one.post(path_of(session), {"content": DOCUMENT})
    status, state = await other.get(path_of(session))
    assert (status, state["status"], state["role"]) == (200, "running", "system")
    *_, last, done = await events(other, "GET", path_of(session) + "?stream=true")
    assert (last["status"], last["percent"], done) == ("completed", 100, None)
    assert last["id"] == (await one.get(path_of(session)))[1]["id"]
    one.script.delay_s = 20.0
    ended = f"{session}-ended"
    await one.post(path_of(ended), {"content": DOCUMENT})
    async with other.http.delete(path_of(ended)) as response:
        assert (response.status, (await response.json())["status"]) == (200, "cancelled")
    await until(one, ended, "cancelled")
    await eventually(lambda: one.calls == 0)
    assert (await other.post(CHAT, user("hello", session_id=ended)))[0] == 200


async def test_another_router_goes_on_with_it(socket_folder: Path, rest_store: KvStore) -> None:
    session = f"s-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        async with stack(Path(folder), rest_store, settings=SOON) as other:
            await other.show()
            other.says("Nice.")
            async with stack(socket_folder, rest_store, settings=SOON) as one:
                await one.show()
                one.says("Nice.")
                one.script.delay_s = 60.0
                _, begun = await one.post(path_of(session), {"content": DOCUMENT})
            state = await until(other, session, "completed")
            assert state["id"] == begun["id"]
            _, record = await other.get(f"/v1/sessions/{session}")
            assert record["messages"] == [{"role": "system", "content": DOCUMENT}]
            assert record["tokens"] == begun["tokens"]
            assert (await other.post(CHAT, user("who?", session_id=session)))[0] == 200


async def test_no_more_documents_at_once_than_the_settings_say(
    socket_folder: Path, rest_store: KvStore
) -> None:
    async with stack(socket_folder, rest_store, settings={"max_documents": 1}) as served:
        await served.show()
        served.says("Nice.")
        served.script.delay_s = 0.5
        await served.post(path_of("s-one"), {"content": DOCUMENT})
        status, reply = await served.post(path_of("s-two"), {"content": DOCUMENT})
        assert (status, reply["error"]["code"]) == (429, "overloaded")
        await until(served, "s-one", "completed")
        assert (await served.post(path_of("s-two"), {"content": DOCUMENT}))[0] == 202
        await until(served, "s-two", "completed")


async def test_the_command_draws_a_bar_in_a_terminal(served: Stack, session: str, tmp_path: Path) -> None:
    """Without colours, where what is left of a bar is blank."""
    served.script.delay_s = scaled(0.5)
    file = tmp_path / "document.txt"
    file.write_text(DOCUMENT)
    command = ["-m", "devstack", "prefill", "--url", served.url, "--session", session, str(file)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    mine, terminal = os.openpty()
    running = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    reading = asyncio.create_task(asyncio.to_thread(until_closed, mine))
    try:
        status = await asyncio.wait_for(running.wait(), scaled(60))
    finally:
        if running.returncode is None:
            running.kill()
        written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", await reading)
        os.close(mine)
    assert status == 0, written
    lines = [line.strip() for line in re.split(r"[\r\n]+", written)]
    *bars, last = [line for line in lines if " tokens" in line and line.startswith(("━", "╸"))]
    begun = re.compile(r"━+╸? +[1-9]\d?(\.\d)?% of \d+ tokens, \d+ tokens/s.*")
    on_the_way = [line for line in bars if begun.fullmatch(line)]
    assert on_the_way, written
    assert re.match(r"━+ 100% of \d+ tokens", last), written
    assert last.count("━") > on_the_way[0].count("━")
    assert f"are in the session {session}" in written.partition(last)[2]


def until_closed(terminal: int) -> str:
    """All that is written to a terminal, until nobody has it open any more, which Linux calls an error."""
    written = b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 1 << 16):
            written += data
    return written.decode()
