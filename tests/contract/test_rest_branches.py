"""Sessions that people edit: whole histories, branches and cuts over REST, kept by a real kvstore."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.contract.rest_stack import BLOCK_TOKENS, Stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)
pytestmark = pytest.mark.parametrize("rest_store", ["embedded", "sql"], indirect=True)

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def new_id() -> str:
    return f"s-{uuid.uuid4().hex[:8]}"


def said(*texts: str) -> list[dict[str, str]]:
    """Question and answer in turns."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


async def ask(served: Stack, session: str, messages: Any, answer: str, **more: Any) -> dict[str, Any]:
    served.says(answer)
    status, reply = await served.post(CHAT, {"messages": messages, "session_id": session, **more})
    assert status == 200, reply
    return reply


async def contents(served: Stack, session: str) -> list[str]:
    _, record = await served.get(f"/v1/sessions/{session}")
    return [message["content"] for message in record["messages"]]


def asked_tokens(served: Stack) -> list[int]:
    return list(served.engines[0].decode.jobs[-1].tokens)


async def test_an_answer_that_is_asked_again_branches(served: Stack) -> None:
    session = new_id()
    await ask(served, session, said("I am Ann"), "hello, Ann")
    before = (await served.get(f"/v1/sessions/{session}"))[1]["token_ids"]
    await ask(served, session, said("who am I?"), "Bob")
    again = await ask(served, session, said("I am Ann", "hello, Ann", "who am I?"), "Ann")
    assert (again["session_id"], again["branch"]) == (session, f"{session}~2")
    assert asked_tokens(served)[: len(before)] == before, "the stored tokens are kept"
    assert await contents(served, session) == ["I am Ann", "hello, Ann", "who am I?", "Bob"]
    assert await contents(served, f"{session}~2") == ["I am Ann", "hello, Ann", "who am I?", "Ann"]
    # The next request of the client, which knows nothing of branches, goes on in this one.
    whole = said("I am Ann", "hello, Ann", "who am I?", "Ann", "sure?")
    on = await ask(served, session, whole, "yes")
    assert on["branch"] == f"{session}~2"
    first = await ask(served, session, said("I am Ann", "hello, Ann", "who am I?", "Bob", "sure?"), "no")
    assert "branch" not in first
    assert (await contents(served, session))[-1] == "no"


async def test_an_edit_goes_on_with_what_came_before_it(served: Stack) -> None:
    session = new_id()
    for at in range(3):
        await ask(served, session, said(f"question {at}, which has some length"), f"answer {at}")
    _, record = await served.get(f"/v1/sessions/{session}")
    history = [message["content"] for message in record["messages"]]
    reply = await ask(served, session, said(*history[:2], "another question"), "another answer")
    assert await contents(served, reply["branch"]) == [*history[:2], "another question", "another answer"]
    _, branches = await served.get(f"/v1/sessions/{session}/branches")
    (branch,) = branches["data"]
    assert (branch["id"], branch["parent"], branch["cut"]) == (reply["branch"], session, 2)
    assert branch["preview"] == "another question"
    _, stored = await served.get(f"/v1/sessions/{reply['branch']}")
    assert (
        stored["token_ids"][: len(record["token_ids"]) // 3]
        == record["token_ids"][: len(record["token_ids"]) // 3]
    )
    assert stored["blocks"] == (len(stored["token_ids"]) - 1) // BLOCK_TOKENS


async def test_another_head_is_computed_anew(served: Stack) -> None:
    session = new_id()
    system = {"role": "system", "content": "be brief"}
    await ask(served, session, [system, *said("hi")], "hello")
    other = [{"role": "system", "content": "be kind"}, *said("hi", "hello", "and?")]
    reply = await ask(served, session, other, "dear")
    prompt = served.tokenizer.decode(asked_tokens(served))
    assert "be kind" in prompt
    assert "be brief" not in prompt
    assert await contents(served, reply["branch"]) == ["be kind", "hi", "hello", "and?", "dear"]
    with_tools = await ask(served, session, [system, *said("hi", "hello", "and?")], "x", tools=[TOOL])
    assert with_tools["branch"] == f"{session}~3"
    _, branches = await served.get(f"/v1/sessions/{session}/branches")
    assert [one["cut"] for one in branches["data"]] == [0, 0]


async def test_an_answer_that_was_stopped_half_way_is_gone_on_from(served: Stack) -> None:
    session = new_id()
    await ask(served, session, said("hi"), "hello")
    reply = await ask(served, session, said("hi", "hello", "tell me", "once upon", "shorter"), "once")
    assert "branch" not in reply
    assert await contents(served, session) == ["hi", "hello", "tell me", "once upon", "shorter", "once"]
    status, error = await served.post(CHAT, {"messages": said("hi", "hello"), "session_id": session})
    assert (status, error["error"]["param"]) == (400, "messages[1]")


async def test_a_branch_waits_for_its_own_turns_only(served: Stack) -> None:
    session = new_id()
    await ask(served, session, said("hi"), "hello")
    await ask(served, session, said("b"), "B")
    served.says("one two three four five six seven eight")
    served.script.delay_s = 0.05
    both = [
        asyncio.create_task(served.post(CHAT, {"messages": said("hi", "hello", text), "session_id": session}))
        for text in ("c", "d")
    ]
    await eventually(lambda: served.calls > 1)
    replies = await asyncio.gather(*both)
    assert [status for status, _ in replies] == [200, 200]
    assert {reply["branch"] for _, reply in replies} == {f"{session}~2", f"{session}~3"}


async def test_a_branch_whose_first_turn_is_under_way_is_not_gone_on_with(served: Stack) -> None:
    """It was forked for that turn. Behind it a second turn of the branch has to wait, as in a session."""
    session = new_id()
    await ask(served, session, said("hi"), "hello")
    await ask(served, session, said("b"), "B")
    served.says("one two three four five six seven eight")
    served.script.delay_s = 0.05

    async def begins(*history: str) -> asyncio.Task[Any]:
        calls = served.calls
        turn = asyncio.create_task(served.post(CHAT, {"messages": said(*history), "session_id": session}))
        await eventually(lambda: served.calls > calls)
        return turn

    turns = [await begins("hi", "hello", text) for text in ("c", "d")]
    replies = [(await turn)[1] for turn in turns]
    assert [reply["branch"] for reply in replies] == [f"{session}~2", f"{session}~3"]
    history = await contents(served, f"{session}~2")
    turn = await begins(*history, "e")
    status, answer = await served.post(CHAT, {"messages": said(*history, "f"), "session_id": session})
    assert (status, answer["error"]["code"]) == (409, "turn_in_progress"), answer
    assert (await turn)[1]["branch"] == f"{session}~2"


async def test_a_history_that_comes_during_the_first_turn_waits_for_that(served: Stack) -> None:
    """Nothing of the session is committed yet, so there is nothing to branch from, and nothing is missing."""
    session = new_id()
    served.says("one two three four five six seven eight")
    served.script.delay_s = 0.05
    first = asyncio.create_task(served.post(CHAT, {"messages": said("hi"), "session_id": session}))
    await eventually(lambda: served.calls > 0)
    history = said("hi", "hello", "c")
    for messages in (history, [{"role": "system", "content": "x"}, *history]):
        status, answer = await served.post(CHAT, {"messages": messages, "session_id": session})
        assert (status, answer["error"]["code"]) == (409, "turn_in_progress"), answer
    assert (await first)[0] == 200
    assert (await contents(served, session))[0] == "hi"


async def test_a_fork_at_a_cut(served: Stack) -> None:
    session = new_id()
    await ask(served, session, said("a"), "A")
    await ask(served, session, said("b"), "B")
    status, branch = await served.post(f"/v1/sessions/{session}/fork", {"messages": 2})
    assert (status, branch["id"], branch["cut"], branch["parent"]) == (201, f"{session}~2", 2, session)
    reply = await ask(served, branch["id"], said("c"), "C")
    assert reply["session_id"] == branch["id"]
    assert await contents(served, branch["id"]) == ["a", "A", "c", "C"]
    other = new_id()
    status, fork = await served.post(f"/v1/sessions/{session}/fork", {"messages": 0, "id": other})
    assert (status, fork["id"], fork["cut"], fork["version"]) == (201, other, 0, 0)
    _, of_branch = await served.post(f"/v1/sessions/{branch['id']}/fork", {"messages": 4})
    assert (of_branch["id"], of_branch["parent"]) == (f"{session}~3", branch["id"])
    for wrong in (1, 3, 5, 99):
        status, error = await served.post(f"/v1/sessions/{session}/fork", {"messages": wrong})
        assert (status, error["error"]["param"]) == (400, "messages")
    status, _ = await served.post(f"/v1/sessions/{session}/fork", {"messages": -1})
    assert status == 400


async def test_branches_live_as_long_as_their_session(served: Stack) -> None:
    session, other = new_id(), new_id()
    await ask(served, session, said("a"), "A")
    await served.post(f"/v1/sessions/{session}/fork", {"messages": 2})
    await served.post(f"/v1/sessions/{session}/fork", {"id": other})
    async with served.http.delete(f"/v1/sessions/{session}") as gone:
        assert gone.status == 200
    assert (await served.get(f"/v1/sessions/{session}~2"))[0] == 404
    assert (await served.get(f"/v1/sessions/{other}"))[0] == 200, "a fork with an id of its own stays"
    assert (await served.get(f"/v1/sessions/{session}/branches"))[0] == 404
