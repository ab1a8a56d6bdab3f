"""`prediction` at the router: its tokens go to decode, and the answer's usage says what became of them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from kvcommons.errors import Unavailable
from tests.contract.rest_stack import WINDOW, Stack

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
TEXT = "one two three four five six"


def ask(content: Any = TEXT, **fields: Any) -> dict[str, Any]:
    predicted = {"prediction": {"type": "content", "content": content}}
    return {"messages": [{"role": "user", "content": "count"}]} | predicted | fields


def details(accepted: int, rejected: int) -> dict[str, int]:
    return {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }


async def test_the_sdk_predicts(served: Stack) -> None:
    (answer,) = served.says(TEXT)
    served.script.accepted, served.script.rejected = {1, 2, 3}, {4: 5}
    reply = await served.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "count"}],
        prediction={"type": "content", "content": TEXT},
    )
    assert reply.choices[0].message.content == TEXT
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(answer), "what was rejected is none of it"
    reported = reply.usage.completion_tokens_details
    assert reported is not None
    assert (reported.accepted_prediction_tokens, reported.rejected_prediction_tokens) == (3, 5)
    (engine,) = served.engines
    (job,) = engine.decode.jobs
    assert list(job.prediction) == answer[:-1], "as the model would write it, without what ends an answer"
    assert not engine.prefill.jobs[0].prediction, "who has no use for it"


async def test_parts_are_one_text(served: Stack) -> None:
    (answer,) = served.says(TEXT)
    parts = [{"type": "text", "text": text} for text in (TEXT[:9], "", TEXT[9:])]
    assert (await served.post(CHAT, ask(parts)))[0] == 200
    assert list(served.engines[0].decode.jobs[0].prediction) == answer[:-1]


async def test_a_long_prediction_is_tokenized_beside_the_event_loop(served: Stack) -> None:
    served.says(TEXT)
    text = " remember" * 1000
    assert (await served.post(CHAT, ask(text)))[0] == 200
    assert list(served.engines[0].decode.jobs[0].prediction) == served.tokenizer.encode_text(text)


@pytest.mark.parametrize("repeats", [1, 10], ids=["just", "by far"])
async def test_one_that_no_answer_can_be_is_refused(served: Stack, repeats: int) -> None:
    served.says(TEXT)
    word = " remember"
    assert len(served.tokenizer.encode_text(word * 2)) == 2
    status, body = await served.post(CHAT, ask(word * (WINDOW + 1) * repeats))
    error = body["error"]
    assert (status, error["param"]) == (400, "prediction.content")
    assert error["code"] == "context_length_exceeded"
    assert "shorten" in error["message"]
    assert not served.engines[0].decode.jobs
    assert (await served.post(CHAT, ask(word * WINDOW)))[0] == 200


async def test_what_is_none_is_refused_by_name(served: Stack) -> None:
    for content, param in (("", "prediction.content"), (5, "prediction.content")):
        status, body = await served.post(CHAT, ask(content))
        assert (status, body["error"]["param"]) == (400, param)
    status, body = await served.post("/v1/completions", {"prompt": "a", "prediction": ask()["prediction"]})
    assert (status, body["error"]["param"]) == (400, "prediction")
    assert CHAT in body["error"]["message"]
    assert not served.engines[0].decode.jobs


async def test_a_null_predicts_nothing(served: Stack) -> None:
    served.says(TEXT)
    status, body = await served.post(CHAT, ask(prediction=None))
    assert (status, body["usage"]["completion_tokens_details"]) == (200, details(0, 0))
    assert not served.engines[0].decode.jobs[0].prediction


async def test_a_stream_says_it_with_its_usage(served: Stack) -> None:
    served.says(TEXT)
    served.script.accepted, served.script.rejected = {1, 2}, {3: 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await served.stream(CHAT, ask(stream_options=options))
    # A busy router may have heard of several tokens before it tells of the first one.
    reported = [event["usage"]["completion_tokens_details"] for event in found[:-1]]
    assert reported[-1] == details(2, 2)
    accepted = [one["accepted_prediction_tokens"] for one in reported]
    assert accepted == sorted(accepted)


async def test_choices_are_summed_up(served: Stack) -> None:
    """Each is drafted for by itself."""
    served.says(TEXT, TEXT)
    served.script.accepted, served.script.rejected = {1, 2}, {3: 2}
    status, body = await served.post(CHAT, ask(n=2))
    assert (status, body["usage"]["completion_tokens_details"]) == (200, details(4, 4))
    assert len({tuple(job.prediction) for job in served.engines[0].decode.jobs}) == 1


async def test_what_comes_behind_a_stop_string_is_not_counted(served: Stack) -> None:
    (answer,) = served.says(TEXT, end=False)
    served.script.accepted = set(range(1, len(answer)))
    status, body = await served.post(CHAT, ask(stop=" three"))
    used = body["usage"]
    assert (status, body["choices"][0]["message"]["content"]) == (200, "one two")
    accepted = used["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted == used["completion_tokens"] - 1


async def test_a_resumed_turn_predicts_behind_what_came(pair: Stack) -> None:
    """And counts what was verified on both instances, each token once."""
    (answer,) = pair.says(TEXT)
    pair.script.accepted, pair.script.rejected = {1, 2, 5}, {3: 4}
    pair.script.fail_at = {4: Unavailable("gone")}
    status, body = await pair.post(CHAT, ask())
    assert (status, body["choices"][0]["message"]["content"]) == (200, TEXT)
    assert body["usage"]["completion_tokens"] == len(answer)
    assert body["usage"]["completion_tokens_details"] == details(3, 4)
    first, second = sorted(
        (job for one in pair.engines for job in one.decode.jobs), key=lambda job: len(job.tokens)
    )
    assert list(second.tokens[second.prompt_tokens :]) == answer[:4]
    assert list(first.prediction) == list(second.prediction) == answer[:-1]


async def test_in_a_session_it_is_of_its_turn_alone(served: Stack) -> None:
    (answer,) = served.says(TEXT)
    served.script.accepted, served.script.rejected = {1, 2}, {3: 2}
    session = {"session_id": f"s-{uuid.uuid4().hex[:8]}"}
    key = {"Idempotency-Key": uuid.uuid4().hex}
    status, first = await served.post(CHAT, ask(**session), headers=key)
    assert (status, first["usage"]["completion_tokens_details"]) == (200, details(2, 2))
    again = await served.post(CHAT, ask(**session), headers=key)
    assert again == (200, first), "what is told again has the same usage"
    served.script.accepted, served.script.rejected = set(), {}
    status, second = await served.post(CHAT, ask(prediction=None, **session))
    assert (status, second["usage"]["completion_tokens_details"]) == (200, details(0, 0))
    predicted = [list(job.prediction) for job in served.engines[0].decode.jobs]
    assert predicted == [answer[:-1], []]
    _, stored = await served.get(f"/v1/sessions/{session['session_id']}")
    assert "prediction" not in str(stored)
