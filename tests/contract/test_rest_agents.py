"""Sessions that coding clients name by header: agents with conversations of their own, turns that come at
once, and Anthropic's messages, whose whole histories are found again."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvcommons.pb.common_pb2 import ModelInfo
from services.router.admission.quotas import Quota
from services.router.sessions.branches import BRANCHES_MAX
from tests.contract.rest_stack import MODEL, KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)
pytestmark = pytest.mark.parametrize("rest_store", ["embedded", "sql"], indirect=True)

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
WORDS = "one two three four five six seven eight"
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
# As the model writes a call, and as no client writes it back.
CALL = '<tool_call>\n{"name": "look",   "arguments": {"path":   "notes.txt"}}\n</tool_call>'


def new_id() -> str:
    return f"s-{uuid.uuid4().hex[:8]}"


def claude(session: str, agent: str | None = None) -> dict[str, str]:
    """Of its session and agent, as Claude Code sends them."""
    of_agent = {"x-claude-code-agent-id": agent} if agent else {}
    return {"x-claude-code-session-id": session, **of_agent}


def said(*texts: str) -> list[dict[str, Any]]:
    """Question and answer in turns."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


async def chat(served: Stack, messages: Any, answer: str, headers: dict[str, str]) -> dict[str, Any]:
    served.says(answer)
    status, reply = await served.post(CHAT, {"messages": messages}, headers=headers)
    assert status == 200, reply
    return reply


async def ask(
    served: Stack, messages: Any, answer: str, headers: dict[str, str], **fields: Any
) -> tuple[dict[str, Any], str | None]:
    """The message, and the session that it is kept in."""
    served.says(answer)
    body = {"model": MODEL.name, "max_tokens": 200, "messages": messages, **fields}
    async with served.http.post(MESSAGES, json=body, headers=headers) as response:
        message = await response.json()
        assert response.status == 200, message
        return message, response.headers.get("X-Session-ID")


async def contents(served: Stack, session: str) -> list[str]:
    _, record = await served.get(f"/v1/sessions/{session}")
    return [message["content"] for message in record["messages"]]


def asked_tokens(served: Stack) -> list[int]:
    return list(served.engines[0].decode.jobs[-1].tokens)


async def test_an_agent_has_a_session_of_its_own_beside_its_parents(served: Stack) -> None:
    session = new_id()
    await chat(served, said("plan"), "a plan", {"X-Session-ID": session})
    for headers in (
        {"x-claude-code-session-id": session, "x-claude-code-agent-id": "explorer"},
        {"session-id": session, "thread-id": "explorer"},
    ):
        reply = await chat(served, said("look around"), "seen", headers)
        assert (reply["session_id"], reply.get("branch")) == (f"{session}~@explorer", None)
    assert await contents(served, f"{session}~@explorer") == ["look around", "seen"] * 2
    assert await contents(served, session) == ["plan", "a plan"]
    _, page = await served.get(f"/v1/sessions?limit=2&after={session}~")
    listed = page["data"][0]
    assert (listed["id"], listed["parent"], listed["agent"]) == (f"{session}~@explorer", session, "explorer")
    _, branches = await served.get(f"/v1/sessions/{session}/branches")
    assert branches["data"] == [], "it shares nothing with its parent"
    reply = await chat(served, said("and?"), "that", {"session-id": session, "thread-id": session})
    assert reply["session_id"] == session, "the agent that began a session has its id"


async def test_an_agent_that_speaks_first_has_a_parent_too(served: Stack) -> None:
    session = new_id()
    await chat(served, said("look"), "seen", claude(session, "a1"))
    _, record = await served.get(f"/v1/sessions/{session}~@a1")
    assert (record["parent"], record["agent"], record["cut"]) == (session, "a1", 0)
    assert await contents(served, session) == []


async def test_agents_go_with_their_session(served: Stack) -> None:
    session, other = new_id(), new_id()
    await chat(served, said("look"), "seen", claude(session, "a1"))
    await chat(served, said("look", "seen", "more"), "this", claude(session, "a1"))
    again = await chat(served, said("look", "seen", "more"), "that", claude(session, "a1"))
    assert again["branch"] == f"{session}~@a1~2"
    await chat(served, said("look"), "seen", {"X-Session-ID": f"{session}~@b"})  # nobody's agent
    await chat(served, said("look"), "seen", claude(other, "a1"))
    async with served.http.delete(f"/v1/sessions/{session}") as gone:
        assert gone.status == 200
    for id, status in ((f"{session}~@a1", 404), (f"{session}~@a1~2", 404), (f"{other}~@a1", 200)):
        assert (await served.get(f"/v1/sessions/{id}"))[0] == status, id
    assert (await served.get(f"/v1/sessions/{session}~@b"))[0] == 200
    await chat(served, said("look"), "anew", claude(session, "a1"))
    _, record = await served.get(f"/v1/sessions/{session}~@a1")
    assert (record["parent"], len(record["messages"])) == (session, 2), "one that goes on begins anew"


async def test_any_id_can_stand_in_the_answers_header(served: Stack) -> None:
    for id in (f"größe 語 {new_id()}", f"% {new_id()} ,;="):
        served.says("hello")
        body = {"messages": said("hi"), "session_id": id}
        async with served.http.post(CHAT, json=body) as response:
            assert (response.status, response.headers["X-Session-ID"]) == (200, id)


async def test_an_id_in_the_body_is_taken_as_it_is(served: Stack) -> None:
    session = new_id()
    headers = claude(session, "a1")
    served.says("hello")
    status, reply = await served.post(CHAT, {"messages": said("hi"), "session_id": session}, headers=headers)
    assert (status, reply["session_id"]) == (200, session)
    status, reply = await served.post(
        CHAT, {"messages": said("hi")}, headers={"X-Session-ID": "a", "session-id": "b"}
    )
    assert (status, reply["error"]["param"]) == (400, "session_id")
    two = {"X-Session-ID": "a", "thread-id": "x", "x-claude-code-agent-id": "y"}
    status, reply = await served.post(CHAT, {"messages": said("hi")}, headers=two)
    assert (status, reply["error"]["param"]) == (400, "x-claude-code-agent-id")
    long = {"X-Session-ID": "s" * 100, "thread-id": "t" * 40}
    status, reply = await served.post(CHAT, {"messages": said("hi")}, headers=long)
    assert status == 400
    assert "shorter" in reply["error"]["message"]
    status, reply = await served.post(CHAT, {"messages": said("hi")}, headers={"thread-id": "t"})
    assert (status, reply.get("session_id")) == (200, None), "an agent without a session has none"


async def test_turns_that_come_at_once_branch(served: Stack) -> None:
    """Of what is new only, as curl sends it. The session goes on with the turn that was first."""
    session = new_id()
    headers = {"X-Session-ID": session}
    await chat(served, said("hi"), "hello", headers)
    served.says(WORDS)
    served.script.delay_s = 0.05
    first = asyncio.create_task(served.post(CHAT, {"messages": said("a")}, headers=headers))
    await eventually(lambda: served.calls > 0)
    others = [served.post(CHAT, {"messages": said(text)}, headers=headers) for text in ("b", "c")]
    replies = await asyncio.gather(first, *others)
    assert [status for status, _ in replies] == [200] * 3
    (_, of_first), *rest = replies
    assert "branch" not in of_first
    assert {reply["branch"] for _, reply in rest} == {f"{session}~2", f"{session}~3"}
    assert {reply["session_id"] for _, reply in replies} == {session}
    assert await contents(served, session) == ["hi", "hello", "a", WORDS]
    for _, reply in rest:
        assert (await contents(served, reply["branch"]))[:2] == ["hi", "hello"]
    served.script.delay_s = 0.0
    reply = await chat(served, said("on"), "yes", headers)
    assert "branch" not in reply
    assert (await contents(served, session))[-2:] == ["on", "yes"]


async def test_histories_that_come_at_once_branch(served: Stack) -> None:
    """Though both go on from the same answer, which in a session of the body is a 409."""
    session = new_id()
    headers = {"X-Session-ID": session}
    await chat(served, said("hi"), "hello", headers)
    served.says(WORDS)
    served.script.delay_s = 0.05
    first = asyncio.create_task(served.post(CHAT, {"messages": said("hi", "hello", "a")}, headers=headers))
    await eventually(lambda: served.calls > 0)
    body = {"messages": said("hi", "hello", "b"), "session_id": session}
    status, refused = await served.post(CHAT, body)
    assert (status, refused["error"]["code"]) == (409, "turn_in_progress")
    _, second = await served.post(CHAT, {"messages": said("hi", "hello", "b")}, headers=headers)
    assert second["branch"] == f"{session}~2"
    assert (await first)[0] == 200
    served.script.delay_s = 0.0
    on = await chat(served, said("hi", "hello", "b", WORDS, "c"), "C", headers)
    assert on["branch"] == f"{session}~2", "its later turns are found by their history"


async def test_first_turns_that_come_at_once_are_both_kept(served: Stack) -> None:
    session = new_id()
    served.says(WORDS)
    served.script.delay_s = 0.05
    both = [
        asyncio.create_task(ask(served, said(text), WORDS, claude(session))) for text in ("title", "work")
    ]
    kept = {place for _, place in await asyncio.gather(*both)}
    assert kept == {session, f"{session}~2"}
    served.script.delay_s = 0.0
    for text in ("title", "work"):
        _, place = await ask(served, said(text, WORDS, "more"), "x", claude(session))
        assert place in kept
        assert await contents(served, place) == [text, WORDS, "more", "x"]


async def test_messages_go_on_with_the_very_tokens_of_a_call(served: Stack) -> None:
    """Which the client sends back as an object: written anew its text is another one, and so are its
    tokens. Without the header they are what the client's text gives."""
    session = new_id()
    first, place = await ask(served, said("what do they say?"), CALL, claude(session), tools=[LOOK])
    assert (first["stop_reason"], place) == ("tool_use", session)
    (call,) = first["content"]
    _, record = await served.get(f"/v1/sessions/{session}")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "buy milk"}
    history = [
        *said("what do they say?"),
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    _, place = await ask(served, history, "to buy milk", claude(session), tools=[LOOK])
    before = record["token_ids"]
    assert place == session
    assert asked_tokens(served)[: len(before)] == before
    _, place = await ask(served, history, "to buy milk", {}, tools=[LOOK])
    assert place is None
    assert asked_tokens(served)[: len(before)] != before


async def test_a_message_without_a_history_is_a_conversation_of_its_own(served: Stack) -> None:
    """Clients ask for titles and summaries beside what they work on, with the session's header and without
    its tools."""
    session = new_id()
    await ask(served, said("work"), "done", claude(session), tools=[LOOK])
    _, place = await ask(served, said("a title, please"), "Work", claude(session))
    assert place == f"{session}~2"
    _, place = await ask(served, said("work", "done", "more"), "so", claude(session), tools=[LOOK])
    assert place == session
    assert await contents(served, session) == ["work", "done", "more", "so"]
    _, place = await ask(served, said("work", "done", "more"), "or so", claude(session), tools=[LOOK])
    assert place == f"{session}~3", "what is asked again branches"


async def test_a_stream_of_messages_says_where_it_is_kept(served: Stack) -> None:
    session = new_id()
    served.says("hello")
    body = {"model": MODEL.name, "max_tokens": 9, "messages": said("hi"), "stream": True}
    async with served.http.post(MESSAGES, json=body, headers=claude(session, "a")) as response:
        assert response.headers["X-Session-ID"] == f"{session}~@a"
        await response.read()
    assert await contents(served, f"{session}~@a") == ["hi", "hello"]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"x-claude-code-session-id": "a/b"}, "x-claude-code-session-id"),
        ({"x-claude-code-session-id": "a", "x-claude-code-agent-id": "b/c"}, "x-claude-code-agent-id"),
        ({"x-claude-code-session-id": "a", "session-id": "b"}, "several sessions"),
    ],
)
async def test_bad_ids_are_told_in_anthropics_envelope(
    served: Stack, headers: dict[str, str], says: str
) -> None:
    body = {"model": MODEL.name, "max_tokens": 9, "messages": said("hi")}
    status, error = await served.post(MESSAGES, body, headers=headers)
    assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in error["error"]["message"]


async def test_another_model_goes_on_in_a_branch_that_begins_anew(served: Stack) -> None:
    """The operator serves another one: no token of the session is of use to it."""
    session = new_id()
    await ask(served, said("hi"), "hello", claude(session))
    (engine,) = served.engines
    other = ModelInfo()
    other.CopyFrom(MODEL)
    other.name, other.fingerprint = "other", b"g" * 32
    engine.serves(other)
    await served.show()

    async def seen() -> bool:
        return [one["id"] for one in (await served.get("/v1/models"))[1]["data"]] == ["other"]

    await eventually(seen)
    history = said("hi", "hello", "and?")
    _, place = await ask(served, history, "well", claude(session), model="other")
    assert place == f"{session}~2"
    _, place = await ask(
        served, [*history, *said("", "well", "so?")[1:]], "x", claude(session), model="other"
    )
    assert place == f"{session}~2"
    body = {"messages": said("new"), "session_id": session, "model": "other"}
    status, error = await served.post(CHAT, body)
    assert (status, error["error"]["param"]) == (400, "model")


async def test_a_history_may_do_without_a_session_that_branches_no_more(served: Stack) -> None:
    """A client that never asked for a session goes on all the same."""
    session = new_id()
    await ask(served, said("hi"), "hello", claude(session))
    for _ in range(BRANCHES_MAX):
        status, _ = await served.post(f"/v1/sessions/{session}/fork", {"messages": 2})
        assert status == 201
    message, place = await ask(served, said("ho", "hey", "and?"), "well", claude(session))
    assert (message["content"][0]["text"], place) == ("well", None)
    _, place = await ask(served, said("hi", "hello", "and?"), "well", claude(session))
    assert place == session, "what goes on does so"
    body = {"messages": said("ho", "hey", "and?"), "session_id": session}
    status, error = await served.post(CHAT, body)
    assert (status, error["error"]["param"]) == (400, "session_id")


async def test_it_may_do_without_where_the_tenant_has_no_more_sessions(
    socket_folder: Path, rest_store: KvStore, tmp_path: Path
) -> None:
    tenant = f"t-{uuid.uuid4().hex[:8]}"
    (tmp_path / "keys").write_text(f"{tenant} the-key-of-ann operator\n")
    (tmp_path / "secret").write_bytes(b"s" * 32)
    settings = {
        "api_keys": str(tmp_path / "keys"),
        "secret_file": str(tmp_path / "secret"),
        "quotas": {"*": Quota(sessions=1)},
    }
    key = {"Authorization": "Bearer the-key-of-ann"}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=key)
        _, place = await ask(served, said("hi"), "hello", claude("s") | key)
        assert place == "s"
        message, place = await ask(served, said("title"), "T", claude("s") | key)
        assert (message["content"][0]["text"], place) == ("T", None)
        status, error = await served.post(CHAT, {"messages": said("x")}, headers={"X-Session-ID": "z"} | key)
        assert (status, error["error"]["code"]) == (429, "quota_exceeded")


async def test_another_agents_instructions_begin_another_conversation(served: Stack) -> None:
    """In chat, where a request without answers is what is new, unless other instructions stand before it."""
    session = new_id()
    headers = {"X-Session-ID": session}
    coder, titler = ({"role": "system", "content": text} for text in ("You write code.", "You find titles."))
    await chat(served, [coder, *said("work")], "done", headers)
    title = await chat(served, [titler, *said("work")], "Work", headers)
    assert title["branch"] == f"{session}~2"
    assert "write code" not in served.tokenizer.decode(asked_tokens(served))
    on = await chat(served, [coder, *said("more")], "so", headers)
    assert "branch" not in on
    assert await contents(served, session) == ["You write code.", "work", "done", "more", "so"]


async def respond(
    served: Stack, given: Any, answer: str, headers: dict[str, str], **fields: Any
) -> tuple[dict[str, Any], str | None]:
    served.says(answer)
    body = {"model": MODEL.name, "input": given, "store": False, **fields}
    async with served.http.post("/v1/responses", json=body, headers=headers) as response:
        reply = await response.json()
        assert response.status == 200, reply
        return reply, response.headers.get("X-Session-ID")


async def test_responses_with_whole_inputs_are_kept_by_a_header_too(served: Stack) -> None:
    """As a coding client sends them: all items each time, and none of them to be stored by itself."""
    session = new_id()
    headers = {"session-id": session, "thread-id": f"{session}-2"}
    place = f"{session}~@{session}-2"
    tool = {"type": "function", "name": "look", "parameters": LOOK["input_schema"], "strict": False}
    asked = {"type": "message", "role": "user", "content": "what do they say?"}
    first, kept_in = await respond(served, [asked], CALL, headers, tools=[tool], instructions="Be brief.")
    assert kept_in == place
    async with served.http.get(f"/v1/responses/{first['id']}") as response:
        assert response.status == 404
    _, record = await served.get(f"/v1/sessions/{place}")
    (call,) = first["output"]
    arguments = {"arguments": call["arguments"].replace(" ", "")}  # as a client may write it anew
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "buy milk"}
    again = [asked, call | arguments, result]
    _, kept_in = await respond(served, again, "milk", headers, tools=[tool], instructions="Be brief.")
    assert kept_in == place
    assert asked_tokens(served)[: record["tokens"]] == record["token_ids"]
    _, kept_in = await respond(served, "a summary", "S", headers, instructions="Be brief.")
    assert kept_in == f"{place}~2"
    stored, kept_in = await respond(served, "told", "T", {"session-id": session}, store=True)
    assert kept_in == session
    on, kept_in = await respond(
        served, "and?", "U", {"session-id": session}, store=True, previous_response_id=stored["id"]
    )
    assert kept_in not in (None, session), "it goes on with the response, whatever the header says"
    assert served.tokenizer.decode(asked_tokens(served)).count("told") == 1
    assert on["output"][0]["content"][0]["text"] == "U"
