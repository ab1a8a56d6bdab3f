"""Lines of system prompts that change with each request, as the setting `volatile_lines` has them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_conversation import RecordedRequest, recorded_requests
from tests.contract.rest_stack import KvStore, Stack, stack

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture
async def moving(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    async with stack(socket_folder, rest_store, settings={"volatile_lines": "move"}) as it:
        await it.show()
        yield it


@pytest.fixture
async def dropping(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    async with stack(socket_folder, rest_store, settings={"volatile_lines": "drop"}) as it:
        await it.show()
        yield it


def new_id() -> str:
    return f"s-{uuid.uuid4().hex[:8]}"


def system(time: str) -> dict[str, str]:
    return {"role": "system", "content": f"Be brief.\nCurrent time: {time}\nAsk first."}


def prompts(served: Stack) -> list[list[int]]:
    return [list(job.tokens) for job in served.engines[0].decode.jobs]


async def asked(
    served: Stack, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[dict[str, Any], str | None, str | None]:
    """The answer, what its headers say of volatile lines, and of the session."""
    async with served.http.post(path, json=body, headers=headers) as response:
        reply = await response.json()
        assert response.status == 200, reply
        return reply, response.headers.get("X-Volatile-Lines"), response.headers.get("X-Session-ID")


async def test_they_stay_where_the_setting_says_nothing(served: Stack) -> None:
    served.says("hello")
    user = {"role": "user", "content": "hi"}
    _, reported, _ = await asked(served, CHAT, {"messages": [system("09:00:01"), user]})
    assert reported == "kept 1"
    assert "Be brief.\nCurrent time: 09:00:01\nAsk first." in served.tokenizer.decode(prompts(served)[0])
    _, reported, _ = await asked(served, CHAT, {"messages": [user]})
    assert reported is None


async def test_moved_lines_are_read_behind_what_is_asked(moving: Stack) -> None:
    moving.says("hello")
    user = {"role": "user", "content": "hi"}
    for time in ("09:00:01", "09:00:02"):
        _, reported, _ = await asked(moving, CHAT, {"messages": [system(time), user]})
        assert reported == "moved 1"
    first, second = map(moving.tokenizer.decode, prompts(moving))
    assert "Be brief.\nAsk first." in first
    assert first.index("Ask first.") < first.index("hi\n\nCurrent time: 09:00:01")
    assert first.partition("09:00:01")[0] == second.partition("09:00:02")[0]
    _, plain = await moving.post("/tokenize", {"messages": [system("09:00:01"), user]})
    assert plain["tokens"] == prompts(moving)[0]


async def test_a_session_keeps_what_its_model_was_told(moving: Stack) -> None:
    """And goes on with histories that have it in another place."""
    session, history = new_id(), [{"role": "user", "content": "hi"}]
    for at, answer in enumerate(("hello", "well", "fine")):
        moving.says(answer)
        body = {"messages": [system(f"09:00:0{at}"), *history], "session_id": session}
        reply, reported, kept_in = await asked(moving, CHAT, body)
        assert (reported, kept_in, reply.get("branch")) == ("moved 1", session, None)
        history += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"and {at}?"}]
    _, record = await moving.get(f"/v1/sessions/{session}")
    found = [(one["role"], one["content"]) for one in record["messages"][:5]]
    assert found == [
        ("system", "Be brief.\nAsk first."),
        ("user", "hi"),
        ("volatile", "Current time: 09:00:00"),
        ("assistant", "hello"),
        ("user", "and 0?"),
    ]
    first, second, third = prompts(moving)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    text = moving.tokenizer.decode(record["token_ids"])
    assert all(f"Current time: 09:00:0{at}" in text for at in range(3))
    # What is new only, with the system prompt in front; and what is asked again.
    moving.says("yes")
    new = [system("09:00:03"), {"role": "user", "content": "go on"}]
    reply, _, _ = await asked(moving, CHAT, {"messages": new, "session_id": session})
    assert "branch" not in reply
    again = {"messages": [system("09:00:04"), *history[:3]], "session_id": session}
    reply, _, _ = await asked(moving, CHAT, again)
    assert reply["branch"] == f"{session}~2"
    _, branch = await moving.get(f"/v1/sessions/{session}~2")
    assert branch["cut"] == 4
    status, _ = await moving.post(f"/v1/sessions/{session}/fork", {"messages": 4})
    assert status == 201


async def test_dropped_lines_are_nowhere(dropping: Stack) -> None:
    session = new_id()
    dropping.says("hello")
    body = {"messages": [system("09:00:01"), {"role": "user", "content": "hi"}], "session_id": session}
    _, reported, _ = await asked(dropping, CHAT, body)
    assert reported == "dropped 1"
    _, record = await dropping.get(f"/v1/sessions/{session}")
    assert [one["role"] for one in record["messages"]] == ["system", "user", "assistant"]
    assert "09:00:01" not in dropping.tokenizer.decode(prompts(dropping)[0])


async def test_instructions_of_responses_are_a_head_too(moving: Stack) -> None:
    moving.says("hello")
    body: dict[str, Any] = {"model": "demo", "input": "hi", "instructions": system("09:00:01")["content"]}
    first, reported, session = await asked(moving, RESPONSES, body)
    assert reported == "moved 1"
    body["instructions"] = system("09:00:02")["content"]
    _, reported, kept_in = await asked(
        moving, RESPONSES, {**body, "input": "and?", "previous_response_id": first["id"]}
    )
    assert (reported, kept_in) == ("moved 1", session), "they are those of the response before"
    before, after = prompts(moving)
    assert after[: len(before)] == before
    assert "and?\n\nCurrent time: 09:00:02" in moving.tokenizer.decode(after)
    _, conversation = await moving.post("/v1/conversations", {})
    for text in ("one", "two"):
        body |= {"input": text, "conversation": conversation["id"]}
        body["instructions"] = system(f"09:01:0{len(text)}")["content"]
        await asked(moving, RESPONSES, body)
    _, items = await moving.get(f"/v1/conversations/{conversation['id']}/items")
    assert [item["role"] for item in items["data"]] == ["assistant", "user", "assistant", "user", "system"]


def as_the_model_writes(answer: list[dict[str, Any]]) -> str:
    """An answer of the recording: text, and calls in a spacing of the model's own."""
    texts = []
    for block in answer:
        if block["type"] == "text":
            texts.append(block["text"])
        else:
            given = json.dumps(block["input"], separators=(", ", ":   "))
            texts.append(f'<tool_call>\n{{"name": "{block["name"]}", "arguments": {given}}}\n</tool_call>')
    return "\n".join(texts)


async def test_a_recorded_conversation_goes_on_with_the_very_tokens(moving: Stack) -> None:
    """Each agent of it in a session of its own, though its billing and its time change with each request, and
    calls come back written anew."""
    session = new_id()
    calls: dict[str, str] = {}  # ids of the recording to those that were given here
    before: dict[str, list[int]] = {}
    turns = 0
    for request in recorded_requests():
        headers = {**request.headers, "x-claude-code-session-id": session}
        body = json.loads(json.dumps(request.body))
        for message in body["messages"]:
            for block in message["content"] if isinstance(message["content"], list) else ():
                for name in ("id", "tool_use_id"):
                    if name in block:
                        block[name] = calls[block[name]]
        moving.says(as_the_model_writes(request.answer or [{"type": "text", "text": "Nothing else."}]))
        message, reported, kept_in = await asked(
            moving, MESSAGES, body | {"model": "demo", "max_tokens": 100}, headers
        )
        assert reported == f"moved {len(changing(request))}"
        place = f"{session}~@{request.agent}" if request.agent else session
        assert kept_in == place
        stored = before.get(place, [])
        assert prompts(moving)[-1][: len(stored)] == stored
        async with moving.http.get(f"/v1/sessions/{place}") as response:
            before[place] = (await response.json())["token_ids"]
        for mine, theirs in zip(message["content"], request.answer or (), strict=False):
            if mine["type"] == "tool_use":
                calls[theirs["id"]] = mine["id"]
        turns += bool(stored)
    assert turns == 4


def changing(request: RecordedRequest) -> list[str]:
    text = "\n".join(block["text"] for block in request.body["system"])
    return [line for line in text.split("\n") if line.startswith(("x-anthropic-billing", "Current time"))]
