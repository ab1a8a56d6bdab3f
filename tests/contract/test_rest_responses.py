"""OpenAI's Responses and Conversations over REST: the sessions of a real kvstore under other names."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvcommons.errors import Unprocessable
from tests.contract.rest_stack import Stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

PATH = "/v1/responses"
CONVERSATIONS = "/v1/conversations"


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def prompt_of(served: Stack, at: int = -1) -> str:
    return served.tokenizer.decode(served.engines[0].decode.jobs[at].tokens)


async def respond(served: Stack, text: str, said: str, **fields: Any) -> dict[str, Any]:
    served.says(said)
    status, response = await served.post(PATH, {"input": text, **fields})
    assert status == 200, response
    assert text_of(response) == said
    return response


async def test_a_response_goes_on_from_the_one_before(served: Stack) -> None:
    taken = {"client_metadata": {"turn": {"id": 1}}, "reasoning": {"effort": "low", "summary": "auto"}}
    first = await respond(served, "I am Ann", "hello, Ann", **taken)
    assert first["reasoning"] == taken["reasoning"]
    second = await respond(served, "who am I?", "Ann", previous_response_id=first["id"])
    assert second["session_id"] == first["session_id"]
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(served).count("I am Ann") == 1
    _, session = await served.get(f"/v1/sessions/{first['session_id']}")
    assert [message["content"] for message in session["messages"]] == [
        "I am Ann", "hello, Ann", "who am I?", "Ann",
    ]  # fmt: skip


async def test_an_older_response_branches(served: Stack) -> None:
    first = await respond(served, "I am Ann", "hello, Ann")
    await respond(served, "I live in Bonn", "fine", previous_response_id=first["id"])
    branch = await respond(served, "who am I?", "Ann", previous_response_id=first["id"])
    assert branch["session_id"] != first["session_id"]
    assert "I am Ann" in prompt_of(served)
    assert "Bonn" not in prompt_of(served)
    after = await respond(served, "sure?", "yes", previous_response_id=branch["id"])
    assert after["session_id"] == branch["session_id"]
    _, old = await served.get(f"/v1/sessions/{first['session_id']}")
    assert len(old["messages"]) == 4, "what was branched from stays as it was"


async def test_two_that_go_on_from_one_at_once_branch(served: Stack) -> None:
    first = await respond(served, "I am Ann", "hello, Ann")
    served.says("fine")
    served.script.delay_s = 0.05
    answers = await asyncio.gather(
        *(served.post(PATH, {"input": text, "previous_response_id": first["id"]}) for text in ("a?", "b?"))
    )
    assert [status for status, _ in answers] == [200, 200]
    sessions = {response["session_id"] for _, response in answers}
    assert len(sessions) == 2
    assert first["session_id"] in sessions


async def test_instructions_are_of_one_request(served: Stack) -> None:
    first = await respond(served, "hello", "yes?", instructions="be brief")
    assert "be brief" in prompt_of(served)
    same = await respond(served, "and?", "no", previous_response_id=first["id"], instructions="be brief")
    assert same["session_id"] == first["session_id"]
    assert prompt_of(served).count("be brief") == 1
    without = await respond(served, "and?", "well", previous_response_id=same["id"])
    assert "be brief" not in prompt_of(served)
    assert "yes?" in prompt_of(served)
    assert without["session_id"] != first["session_id"]
    other = await respond(served, "so?", "so", previous_response_id=without["id"], instructions="be kind")
    assert prompt_of(served).index("be kind") < prompt_of(served).index("hello")
    assert other["instructions"] == "be kind"


async def test_what_is_not_stored_cannot_be_gone_on_with(served: Stack) -> None:
    first = await respond(served, "I am Ann", "hello, Ann", store=False)
    assert (first["session_id"], first["store"]) == (None, False)
    status, error = await served.post(PATH, {"input": "and?", "previous_response_id": first["id"]})
    assert (status, error["error"]["param"]) == (404, "previous_response_id")
    stored = await respond(served, "I am Ann", "hello, Ann")
    last = await respond(served, "who?", "Ann", previous_response_id=stored["id"], store=False)
    assert "I am Ann" in prompt_of(served)
    assert last["session_id"] is None


async def test_a_stored_response_is_read_again(served: Stack) -> None:
    first = await respond(served, "I am Ann", "hello, Ann")
    await respond(served, "who am I?", "Ann", previous_response_id=first["id"])
    status, again = await served.get(f"{PATH}/{first['id']}")
    assert status == 200
    assert (again["id"], again["output"]) == (first["id"], first["output"])
    status, error = await served.get(f"{PATH}/resp_none")
    assert (status, error["error"]["param"]) == (404, "id")
    status, _ = await served.get(f"{PATH}/{first['id']}?stream=true")
    assert status == 400


async def test_a_conversation_has_one_turn_at_a_time(served: Stack) -> None:
    _, conversation = await served.post(CONVERSATIONS, {})
    name = {"conversation": {"id": conversation["id"]}}
    first = await respond(served, "I am Ann", "hello, Ann", instructions="be kind", **name)
    assert first["conversation"] == name["conversation"]
    await respond(served, "who am I?", "Ann", conversation=conversation["id"])
    assert "be kind" in prompt_of(served), "a conversation keeps its head"
    status, error = await served.post(PATH, {"input": "x", "instructions": "be cold", **name})
    assert (status, error["error"]["param"]) == (400, "instructions")
    served.says("one two three four five six seven eight")
    served.script.delay_s = 0.05
    asked = asyncio.create_task(served.post(PATH, {"input": "go on", **name}))
    await eventually(lambda: served.calls > 0)
    status, error = await served.post(PATH, {"input": "me, too", **name})
    assert (status, error["error"]["code"]) == (409, "turn_in_progress")
    assert (await asked)[0] == 200


async def test_the_items_of_a_conversation(served: Stack) -> None:
    _, conversation = await served.post(CONVERSATIONS, {"metadata": {"topic": "names"}})
    assert conversation["metadata"] == {"topic": "names"}
    path = f"{CONVERSATIONS}/{conversation['id']}"
    for text in ("one", "two"):
        await respond(served, text, f"{text}!", conversation=conversation["id"])
    _, newest = await served.get(f"{path}/items")
    said = [item["content"][0]["text"] for item in newest["data"]]
    assert said == ["two!", "two", "one!", "one"]
    _, page = await served.get(f"{path}/items?order=asc&limit=2")
    assert ([item["role"] for item in page["data"]], page["has_more"]) == (["user", "assistant"], True)
    _, rest = await served.get(f"{path}/items?order=asc&after={page['last_id']}")
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (
        ["two", "two!"], False,
    )  # fmt: skip
    for query, param in (("order=up", "order"), ("limit=0", "limit"), ("after=x", "after")):
        status, error = await served.get(f"{path}/items?{query}")
        assert (status, error["error"]["param"]) == (400, param)
    one = rest["data"][0]
    assert await served.get(f"{path}/items/{one['id']}") == (200, one)
    status, error = await served.get(f"{path}/items/msg_x")
    assert (status, error["error"]["param"]) == (404, "item")
    async with served.http.delete(path) as gone:
        assert await gone.json() == {
            "id": conversation["id"], "object": "conversation.deleted", "deleted": True,
        }  # fmt: skip
    for missing in (path, f"{path}/items", f"{path}/items/{one['id']}"):
        assert (await served.get(missing))[0] == 404
    status, error = await served.post(PATH, {"input": "x", "conversation": conversation["id"]})
    assert (status, error["error"]["param"]) == (404, "conversation")


async def test_a_chat_session_is_a_conversation(served: Stack) -> None:
    served.says("hello, Ann")
    body = {"messages": [{"role": "user", "content": "I am Ann"}], "session_id": "ann's"}
    await served.post("/v1/chat/completions", body)
    response = await respond(served, "who am I?", "Ann", conversation="ann's")
    assert response["session_id"] == "ann's"
    branch = await respond(served, "sure?", "yes", previous_response_id=response["id"])
    assert branch["session_id"] != "ann's", "a conversation grows by its own turns only"


async def test_a_stream_has_its_life_cycle_and_is_committed(served: Stack) -> None:
    served.says("hello, Ann")
    found = await served.stream(PATH, {"input": "I am Ann"})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.completed")
    response = found[-1]["response"]
    assert text_of(response) == "hello, Ann"
    assert found[0]["response"]["id"] == response["id"]
    assert response["usage"]["input_tokens"] == len(served.engines[0].decode.jobs[0].tokens)
    status, again = await served.get(f"{PATH}/{response['id']}")
    assert (status, again["output"]) == (200, response["output"])


async def test_a_stream_that_breaks_ends_with_a_failed_response(pair: Stack) -> None:
    pair.says("one two three four five")
    pair.script.fail_at = {3: Unprocessable("no token goes on")}
    found = await pair.stream(PATH, {"input": "go"})
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "conversation": "c", "store": False}, "store"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "model": "other"}, "model"),
    ({"input": "x", "frobnicate": 1}, "frobnicate"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_refused_names_its_field(served: Stack, body: dict[str, Any], param: str) -> None:
    status, error = await served.post(PATH, body)
    assert status in (400, 404)
    assert error["error"]["param"] == param, json.dumps(error)


async def test_a_refusal_has_the_envelope_of_openai_and_no_event(served: Stack) -> None:
    """Also where a stream is asked for: none has begun."""
    body = {"input": "x", "max_output_tokens": 100_000}
    for fields in (body, body | {"stream": True}):
        async with served.http.post(PATH, json=fields) as response:
            assert (response.status, response.content_type) == (400, "application/json")
            (name, error), *others = (await response.json()).items()
        assert (name, others) == ("error", [])
        assert error.pop("message").startswith("This model's maximum context length is")
        assert error == {
            "type": "invalid_request_error",
            "param": "max_output_tokens",
            "code": "context_length_exceeded",
        }


async def test_input_tokens_are_those_of_the_prompt(served: Stack) -> None:
    status, counted = await served.post(
        f"{PATH}/input_tokens", {"input": "I am Ann", "instructions": "be kind"}
    )
    assert (status, counted["object"]) == (200, "response.input_tokens")
    assert served.engines[0].decode.jobs == []
    response = await respond(served, "I am Ann", "hello", instructions="be kind")
    assert response["usage"]["input_tokens"] == counted["input_tokens"]


async def test_an_item_whose_type_is_no_text_is_the_clients_mistake(served: Stack) -> None:
    for kind in ({}, [], 3, ["message"]):
        status, body = await served.post("/v1/responses", {"input": [{"type": kind, "role": "user"}]})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
