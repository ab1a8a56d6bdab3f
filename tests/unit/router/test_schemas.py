"""Bodies: what is accepted, and what the rest is told. The routes' own suite has the HTTP side."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from kvcommons.errors import InvalidInput, UnsupportedParameter
from services.router.api.schemas.requests import ChatRequest, CompletionRequest, SessionCreate
from services.router.api.schemas.validation import parse_json, validate
from services.router.turn.sampling import sampling_of, stops_of

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return validate(ChatRequest, parse_json(json.dumps(HI | fields).encode()))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False},
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"temperature": None, "stop": None, "n": None, "seed": None, "logit_bias": None},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.1, "seed": -5, "stop": "x"},
        {"stream": True, "stream_options": {"include_usage": True}, "truncation": "disabled"},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": None, "refusal": None}]},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": "a", "nme": "x"}]}, "messages[0].nme"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 4}, "stop"),
        ({"n": True}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"top_p": 0}, "top_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"session_id": "a" * 129}, "session_id"),
        ({"session_id": ""}, "session_id"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert not isinstance(refused.value, UnsupportedParameter)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions"),
        ({"store": True}, "store"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_known_and_not_built(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_a_null_is_absent() -> None:
    """The SDK's own answer, sent back as `messages.append(answer.message.model_dump())` does it."""
    answer = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    assert "annotations" in answer
    assert answer["annotations"] is None
    sent = chat(messages=[*HI["messages"], answer, *HI["messages"]]).messages
    assert [message.text for message in sent] == ["hi", "hello", "hi"]
    part = {"type": "text", "text": "a", "cache_control": None}
    assert chat(messages=[{"role": "user", "content": [part]}], no_such_field=None).messages[0].text == "a"
    assert chat(logit_bias={"5": None}, metadata={"a": None}).logit_bias == {}
    with pytest.raises(InvalidInput, match=r"'messages\[0\].content' is missing"):
        chat(messages=[{"role": "user", "content": None}])
    with pytest.raises(InvalidInput) as refused:
        chat(stop=["a", None])
    assert refused.value.param == "stop[1]"


def test_what_openai_sends_with_an_answer_can_be_sent_back() -> None:
    answer = ChatCompletionMessage(role="assistant", content="hello", annotations=[], refusal=None)
    assert chat(messages=[answer.model_dump(), *HI["messages"]]).messages[0].text == "hello"


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'max_tokens'"):
        chat(max_token=5)
    with pytest.raises(InvalidInput, match="did you mean 'ttl_s'"):
        validate(SessionCreate, {"ttl": 5})


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_completions(prompt: Any) -> None:
    assert validate(CompletionRequest, {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "session_id": "s"}, "session_id"),
    ],
)
def test_bad_completions(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        validate(CompletionRequest, body)
    assert refused.value.param == param


def test_json_that_is_none() -> None:
    for body in (
        b"",
        b" ",
        b"nul",
        b"\xff",
        b"[1]",
        b"[" * 99_999,
        b'{"n": NaN}',
        b'{"n": 1' + b"0" * 5000 + b"}",
    ):
        with pytest.raises(InvalidInput):
            parse_json(body)


def test_sampling_has_defaults_and_wraps_seeds() -> None:
    drawn = sampling_of(chat(), seed=9, choice=2, stop_ids=(4, 2), vocab_size=100)
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed, drawn.choice) == (1.0, 1.0, 0, 9, 2)
    assert list(drawn.stop_token_ids) == [2, 4]
    given = sampling_of(
        chat(seed=-1, ignore_eos=True, top_k=-1, logprobs=True, top_logprobs=3),
        seed=9,
        choice=0,
        stop_ids=(2,),
        vocab_size=100,
    )
    assert given.seed == (1 << 64) - 1
    assert (given.top_k, given.logprobs, given.top_logprobs) == (0, True, 3)
    assert not given.stop_token_ids
    with pytest.raises(InvalidInput, match="no token 100"):
        sampling_of(chat(logit_bias={"100": 1}), seed=0, choice=0, stop_ids=(), vocab_size=100)
    assert stops_of(chat(stop=["a", "b", "a"])) == ("a", "b")
