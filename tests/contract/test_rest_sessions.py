"""Sessions over REST, kept by a real kvstore process, in its own folder and in a database."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.rblock.identity import IdentityChain, reusable_blocks, tenant_salt
from services.router.__main__ import _LOCAL_SECRET
from tests.contract.rest_stack import BLOCK_TOKENS, MODEL, KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)
pytestmark = pytest.mark.parametrize("rest_store", ["embedded", "sql"], indirect=True)

CHAT = "/v1/chat/completions"


def new_id() -> str:
    return f"s-{uuid.uuid4().hex[:8]}"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def test_a_session_goes_on_with_the_very_tokens(served: Stack) -> None:
    session = new_id()
    (first,) = served.says("hello, Ann")
    status, reply = await served.post(CHAT, user("I am Ann", session_id=session))
    assert (status, reply["session_id"]) == (200, session)
    asked = served.engines[0].decode.jobs[0]
    before = [*asked.tokens, *first]
    served.says("Ann")
    status, reply = await served.post(CHAT, user("who am I?"), headers={"X-Session-ID": session})
    assert (status, reply["session_id"]) == (200, session)
    again = served.engines[0].decode.jobs[1]
    assert list(again.tokens[: len(before)]) == before
    assert served.tokenizer.decode(again.tokens[len(before) :]).count("who am I?") == 1
    assert reply["usage"]["prompt_tokens"] == len(again.tokens)


async def test_the_record_says_what_was_said_and_where_it_lies(served: Stack) -> None:
    session = new_id()
    (answer,) = served.says("fine, and what is the weather like where you are?")
    await served.post(CHAT, user("how are you?", session_id=session))
    status, record = await served.get(f"/v1/sessions/{session}")
    assert status == 200
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    assert record["messages"][1]["content"].startswith("fine, and")
    tokens = [*served.engines[0].decode.jobs[0].tokens, *answer]
    assert record["token_ids"] == tokens
    assert record["tokens"] == len(tokens)
    assert record["blocks"] == reusable_blocks(len(tokens), BLOCK_TOKENS) > 0
    # The scripted engine saves no KV.
    assert record["tiers"] == {"dram": 0, "disk": 0, "absent": record["blocks"]}
    assert record["version"] == 1
    chain = IdentityChain(tenant_salt(_LOCAL_SECRET, "local"), MODEL.fingerprint, BLOCK_TOKENS)
    assert len(chain.extend(tokens)) >= record["blocks"]


async def test_looking_at_a_session_is_no_use_of_its_blocks(served: Stack) -> None:
    session = new_id()
    served.says("fine, and what is the weather like where you are?")
    await served.post(CHAT, user("how are you?", session_id=session))

    async def used() -> tuple[int, int]:
        store = (await served.get("/v1/status"))[1]["store"]
        return store["block_hits"], store["block_misses"]

    before = await used()
    _, record = await served.get(f"/v1/sessions/{session}")
    assert record["tiers"]["absent"] == record["blocks"] > 0
    assert await used() == before
    await served.post(CHAT, user("and you?", session_id=session))
    assert sum(await used()) > sum(before), "a turn is a use"


async def test_a_session_begun_anew_has_nothing_of_the_former_one(served: Stack) -> None:
    """Though the router remembers that, and both had as many turns."""
    session = new_id()
    served.says("so be it")
    for text in ("first", "second"):
        await served.post(CHAT, user(text, session_id=session))
    first = list(served.engines[0].decode.jobs[0].tokens)
    async with served.http.delete(f"/v1/sessions/{session}") as reply:
        assert reply.status == 200
    for text in ("first", "another"):
        await served.post(CHAT, user(text, session_id=session))
    *_, anew, last = served.engines[0].decode.jobs
    assert list(anew.tokens) == first
    assert "second" not in served.tokenizer.decode(last.tokens)
    _, record = await served.get(f"/v1/sessions/{session}")
    said = [message["content"] for message in record["messages"]]
    assert said == ["first", "so be it", "another", "so be it"]
    assert record["token_ids"][: len(last.tokens)] == list(last.tokens)


async def test_a_stop_match_cuts_the_sessions_tokens(served: Stack) -> None:
    session = new_id()
    (answer,) = served.says("one two three four", end=False)
    await served.post(CHAT, user("count", session_id=session, stop=" three"))
    _, record = await served.get(f"/v1/sessions/{session}")
    prompt = len(served.engines[0].decode.jobs[0].tokens)
    kept = record["token_ids"][prompt:]
    assert kept == answer[: len(kept)]
    assert served.tokenizer.decode(kept) == "one two" == record["messages"][1]["content"]


async def test_a_repeated_conversation_is_recognised(served: Stack) -> None:
    session = new_id()
    served.says("hello")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    await served.post(CHAT, {"messages": messages, "session_id": session})
    whole = [*messages, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and now?"}]
    status, _ = await served.post(CHAT, {"messages": whole, "session_id": session})
    assert status == 200
    _, record = await served.get(f"/v1/sessions/{session}")
    assert [message["content"] for message in record["messages"]] == [
        "Be brief.", "hi", "hello", "and now?", "hello"
    ]  # fmt: skip
    status, reply = await served.post(CHAT, {"messages": whole[:3], "session_id": session})
    assert (status, reply["error"]["param"]) == (400, "messages[2]")


async def test_bad_session_calls(served: Stack) -> None:
    session = new_id()
    foreign = {"messages": [{"role": "assistant", "content": "I said so"}], "session_id": session}
    status, reply = await served.post(CHAT, foreign)
    assert (status, reply["error"]["param"]) == (400, "messages[0]")
    status, reply = await served.post(CHAT, user("hi", session_id=session, n=2))
    assert (status, reply["error"]["param"]) == (400, "n")
    status, reply = await served.post(CHAT, user("hi", session_id="a/b"))
    assert (status, reply["error"]["param"]) == (400, "session_id")
    status, reply = await served.post(CHAT, user("hi", session_id="a"), headers={"session-id": "b"})
    assert (status, reply["error"]["param"]) == (400, "session_id")
    status, _ = await served.get(f"/v1/sessions/{session}")
    assert status == 404
    # A refused turn gives its lease back.
    served.says("ok")

    async def free() -> bool:
        return (await served.post(CHAT, user("hi", session_id=session)))[0] == 200

    await eventually(free)


async def test_a_session_of_a_model_that_is_served_no_more_says_so(
    socket_folder: Path, rest_store: KvStore
) -> None:
    """The operator renamed it: whoever asks for the session need not have named any model."""
    session = new_id()
    async with stack(socket_folder, rest_store) as before:
        await before.show()
        before.says("hello")
        assert (await before.post(CHAT, user("hi", session_id=session)))[0] == 200
    renamed = ModelInfo()
    renamed.CopyFrom(MODEL)
    renamed.name = "renamed"
    async with stack(socket_folder, rest_store) as after:
        after.engines[0].serves(renamed)
        await after.show()
        after.says("hello")
        requests = [
            (CHAT, user("and?", session_id=session)),
            (CHAT, user("and?", session_id=session, model="renamed")),
            (f"/v1/sessions/{session}/fork", {"messages": 2}),
            (f"/v1/sessions/{session}/prefill", {"content": "a text"}),
        ]
        for path, body in requests:
            status, answer = await after.post(path, body)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (404, "model_not_found", "session_id")
            assert "the session was made with the model 'demo', which is not served here" in error["message"]
            assert "served: renamed. Begin another session" in error["message"]
        status, answer = await after.post(CHAT, user("hi", model="demo"))
        assert (status, answer["error"]["param"]) == (404, "model")
        assert (await after.post(CHAT, user("hi", session_id=new_id())))[0] == 200


async def test_the_second_turn_at_once_is_refused(served: Stack) -> None:
    session = new_id()
    served.says("word " * 100)
    served.script.delay_s = 0.02
    first = asyncio.create_task(served.post(CHAT, user("go", session_id=session)))
    await eventually(lambda: served.calls > 0)
    with pytest.raises(openai.ConflictError) as refused:
        await served.client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "me too"}],
            extra_body={"session_id": session},
            extra_headers={"x-claude-code-session-id": session},
        )
    assert refused.value.code == "turn_in_progress"
    assert (await first)[0] == 200


async def test_a_client_that_leaves_stops_its_turn_and_commits_nothing(served: Stack) -> None:
    session = new_id()
    served.says("word " * 1000)
    served.script.delay_s = 0.5  # all of it takes far longer than is waited below
    body = user("go", session_id=session, stream=True)
    async with served.http.post(CHAT, json=body) as response:
        await response.content.readline()
        response.close()
    await eventually(lambda: served.calls == 0)
    status, _ = await served.get(f"/v1/sessions/{session}")
    assert status == 404
    served.says("back")
    served.script.delay_s = 0.0

    async def free() -> bool:
        return (await served.post(CHAT, user("hi", session_id=session)))[0] == 200

    await eventually(free)


async def test_create_list_fork_delete(served: Stack) -> None:
    session = new_id()
    status, made = await served.post("/v1/sessions", {"id": session, "ttl_s": 60})
    assert (status, made["id"], made["ttl_s"]) == (201, session, 60)
    status, reply = await served.post("/v1/sessions", {"id": session})
    assert (status, reply["error"]["code"]) == (409, "already_exists")
    status, unnamed = await served.post("/v1/sessions")
    assert status == 201
    served.says("hello")
    await served.post(CHAT, user("hi", session_id=session))
    status, fork = await served.post(f"/v1/sessions/{session}/fork", {"id": f"{session}-b"})
    assert (status, fork["id"], fork["parent"]) == (201, f"{session}-b", session)
    _, record = await served.get(f"/v1/sessions/{session}-b")
    assert [message["content"] for message in record["messages"]] == ["hi", "hello"]
    _, page = await served.get("/v1/sessions?limit=1")
    assert len(page["data"]) == 1
    assert page["has_more"]
    _, rest = await served.get(f"/v1/sessions?after={page['last_id']}&limit=100")
    assert page["last_id"] not in {one["id"] for one in rest["data"]}
    for gone in (session, unnamed["id"]):
        async with served.http.delete(f"/v1/sessions/{gone}") as response:
            assert response.status == 200
            assert (await response.json())["deleted"] is True
        assert (await served.get(f"/v1/sessions/{gone}"))[0] == 404
    assert (await served.get(f"/v1/sessions/{session}-b"))[0] == 200


async def test_every_chunk_names_the_session(served: Stack) -> None:
    session = new_id()
    served.says("hello")
    async with served.http.post(CHAT, json=user("hi", session_id=session, stream=True)) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    assert {json.loads(line[6:])["session_id"] for line in lines} == {session}
