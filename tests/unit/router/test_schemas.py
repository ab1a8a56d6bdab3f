"""Bodies: what is accepted, and what the rest is told. The routes' own suite has the HTTP side."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from kvcommons.errors import InvalidInput, UnsupportedParameter
from services.router.api.messages.requests import MessagesRequest, TextBlock
from services.router.api.responses.requests import ResponsesRequest
from services.router.api.schemas.body import Body
from services.router.api.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    SessionCreate,
    check_session_id,
)
from services.router.api.schemas.validation import parse_json, validate, validate_known
from services.router.sessions.conversation import ToolCall
from services.router.turn.plan import messages_of
from services.router.turn.sampling import sampling_of, stops_of

FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
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
        {"store": True, "reasoning_effort": "low", "verbosity": "low", "skip_special_tokens": True},
        {"repetition_penalty": 1, "min_tokens": 0, "include_stop_str_in_output": False},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": None, "refusal": None}]},
        {"prediction": None},
        {"prediction": {"type": "content", "content": "a"}},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}, "n": 2},
        {"prediction": {"type": "content", "content": " "}, "tools": [FUNCTION], "logprobs": True},
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
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"tools": [FUNCTION | {"x": 1}]}, "tools[0].x"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [FUNCTION] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 262_144}}]}, "tools"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 4}, "stop"),
        ({"n": True}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"top_p": 0}, "top_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"prediction": {}}, "prediction.type"),
        ({"prediction": False}, "prediction"),
        ({"prediction": "a"}, "prediction"),
        ({"prediction": [{"type": "content", "content": "a"}]}, "prediction"),
        ({"prediction": {"type": "tokens", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": ""}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        (
            {"prediction": {"type": "content", "content": [{"type": "text", "text": ""}]}},
            "prediction.content",
        ),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url", "text": "a"}]}},
            "prediction.content[0].type",
        ),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text"),
        ({"prediction": {"type": "content", "content": ["a"]}}, "prediction.content[0]"),
        ({"prediction": {"type": "content", "content": "a", "weight": 1}}, "prediction.weight"),
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
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
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


def test_an_answer_with_calls_can_be_sent_back_and_its_schemas_keep_their_nulls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [call]}
    )
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]}
    schema = {"type": "object", "properties": {"a": {"default": None, "enum": [None, 1]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": None}}
    asked = chat(messages=[*HI["messages"], answer.model_dump(), result], tools=[tool])
    _, said, reported = messages_of(asked)
    assert (said.content, said.tool_calls) == ("", (ToolCall(id="c", name="f", arguments="{}"),))
    assert (reported.role, reported.content, reported.tool_call_id) == ("tool", "1", "c")
    assert asked.tools is not None
    assert asked.tools[0].function.parameters == schema


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'max_tokens'"):
        chat(max_token=5)
    with pytest.raises(InvalidInput, match="did you mean 'ttl_s'"):
        validate(SessionCreate, {"ttl": 5})


BODIES: dict[type[Body], dict[str, Any]] = {
    ChatRequest: HI,
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: HI | {"model": "m", "max_tokens": 5},
}
SAYS: list[tuple[type[Body], dict[str, Any], str]] = [
    (ChatRequest, {"temperature": "hot"}, "temperature has to be a number, and is a string"),
    (ChatRequest, {"temperature": 3}, "temperature has to be at most 2, and is 3"),
    (ChatRequest, {"stream": 1}, "stream has to be true or false, and is a number"),
    (ChatRequest, {"n": 1.5}, "n has to be an integer, and is 1.5"),
    (ChatRequest, {"stop": ""}, "stop has to have at least 1 character"),
    (ChatRequest, {"stop": {}}, "stop has to be a string, or a list, and is an object"),
    (ChatRequest, {"messages": []}, "messages has to have at least 1 entry"),
    (CompletionRequest, {"logprobs": True}, "logprobs has to be an integer, and is true"),
    (ResponsesRequest, {"input": [5]}, "input[0] has to be an object, and is a number"),
    (ResponsesRequest, {"input": [{"type": 5}]}, "input[0] needs a type, which is a string"),
    (ResponsesRequest, {"tools": [5]}, "tools[0] has to be an object, and is a number"),
    (
        ResponsesRequest,
        {"tool_choice": {"type": "x"}},
        "tool_choice.type has to be one of 'function', 'custom', 'allowed_tools', and is 'x'",
    ),
    (
        MessagesRequest,
        {"thinking": {"type": "deep"}},
        "thinking.type has to be 'enabled', 'disabled' or 'adaptive', and is 'deep'",
    ),
]


@pytest.mark.parametrize(("schema", "fields", "says"), SAYS, ids=[says for _, _, says in SAYS])
def test_an_error_says_what_has_to_be_there(schema: type[Body], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        validate(schema, BODIES[schema] | fields)
    assert refused.value.message == says
    assert says.startswith(refused.value.param or "no field")


VALUES: list[Any] = [
    None, True, 5, -5, 1.5, 1e30, "", "x", "x" * 300, [], {}, [5], [{}], ["a"], [None], [5] * 2000, {"a": 1},
    {"type": "x"}, {"type": 5}, {"type": "function"}, {"type": "grammar"}, {"name": 5}, [{"type": "x"}],
    [{"type": "text"}], [{"type": "function_call"}], [{"type": "function", "function": {"name": ""}}],
    [{"type": "custom", "name": "a", "format": {"type": "x"}}], [{"role": "x", "content": 5}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "x"}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": 5}]}],
]  # fmt: skip


@pytest.mark.parametrize("schema", BODIES)
def test_no_error_has_the_words_of_the_library_that_validates(schema: type[Body]) -> None:
    """Of any field with any value: each error is one of this server's own."""
    said: dict[str, str | None] = {}
    for name in schema.model_fields:
        for value in VALUES:
            try:
                validate(schema, BODIES[schema] | {name: value})
            except InvalidInput as refused:
                said[refused.message] = refused.param
    foreign = re.compile(
        r"\b(input|Input|list|string|value) should|valid (string|list|dictionary|number)|tag|instance of|"
        r"Value error|Extra inputs|not what /openapi"
    )
    assert len(said) > 100
    assert all(said.values())
    assert not [one for one in said if foreign.search(one)]


def test_what_says_the_same_twice_names_both() -> None:
    with pytest.raises(InvalidInput, match=r"max_tokens is 5 and max_completion_tokens is 6"):
        chat(max_tokens=5, max_completion_tokens=6)
    for schema, body in ((CompletionRequest, {"prompt": "a"}), (ResponsesRequest, {"input": "a"})):
        with pytest.raises(InvalidInput, match="stream: true") as refused:
            validate(schema, body | {"stream_options": {}})
        assert refused.value.param == "stream_options"
        assert validate(schema, body | {"stream_options": {}, "stream": True}).stream


APIS: tuple[type[Body], ...] = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
ELSEWHERE: list[tuple[type[Body], str, str]] = [
    (ChatRequest, "prompt", "use messages here, or /v1/completions"),
    (ChatRequest, "input", "use messages here, or /v1/responses"),
    (ChatRequest, "max_output_tokens", "use max_completion_tokens"),
    (CompletionRequest, "messages", "use prompt here, or /v1/chat/completions"),
    (ResponsesRequest, "max_tokens", "use max_output_tokens"),
    (ResponsesRequest, "messages", "use input here"),
    (ResponsesRequest, "guided_json", "text.format"),
    (MessagesRequest, "stop", "use stop_sequences"),
    (MessagesRequest, "guided_json", "output_config.format"),
]


@pytest.mark.parametrize(("schema", "name", "says"), ELSEWHERE)
def test_a_field_of_another_api_says_where_it_belongs(schema: type[Body], name: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown field '{name}'") as unknown:
        validate(schema, {name: "a"})
    assert says in unknown.value.message
    assert unknown.value.param == name


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_what_vllm_called_guided_is_refused_by_its_new_name(kind: str) -> None:
    """Also where unknown fields are left out: the answer would not keep to it."""
    for schema, body in ((ChatRequest, HI), (CompletionRequest, {"prompt": "a"})):
        with pytest.raises(UnsupportedParameter) as refused:
            validate_known(schema, body | {f"guided_{kind}": {}})
        assert f'structured_outputs: {{"{kind}": …}}' in refused.value.message
        assert refused.value.param == f"guided_{kind}"


@pytest.mark.parametrize("schema", APIS)
def test_no_hint_names_a_field_that_has_nothing_to_do_with_it(schema: type[Body]) -> None:
    """Of each field of all other APIs: it is told where that belongs, or nothing."""
    known = {*schema.model_fields, *schema.NOT_BUILT}
    assert not known & schema.ELSEWHERE.keys()
    for name in {one for other in APIS for one in (*other.model_fields, *other.NOT_BUILT)} - known:
        with pytest.raises(InvalidInput, match="unknown field") as unknown:
            validate(schema, {name: "a"})
        assert "did you mean" not in unknown.value.message, unknown.value.message


@pytest.mark.parametrize("name", ["max_time", "top_a", "typical_p", "prompt_log", "n_predict", "log", "x"])
def test_a_field_that_is_like_none_has_no_suggestion(name: str) -> None:
    with pytest.raises(InvalidInput, match="unknown field") as unknown:
        chat(**{name: 1})
    assert "did you mean" not in unknown.value.message


def test_unknown_fields_may_be_ignored_wherever_they_are() -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache": 1}], "mood": "good"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
        "top_a": 1,
        "stream": True,
        "stream_options": {"x": 1},
        "temperature": 0.5,
    }  # fmt: skip
    known, ignored = validate_known(ChatRequest, body)
    assert known.temperature == 0.5
    assert known.messages[0].text == "hi"
    assert sorted(ignored) == [
        "messages[0].content[0].cache", "messages[0].mood", "messages[1].tool_calls[0].index",
        "stream_options.x", "top_a",
    ]  # fmt: skip
    with pytest.raises(UnsupportedParameter, match="modalities"):  # it is known, and would change the answer
        validate_known(ChatRequest, HI | {"modalities": ["audio"]})
    with pytest.raises(InvalidInput, match="unknown field"):
        validate_known(ChatRequest, HI | {f"x{number}": 1 for number in range(65)})


def test_a_field_is_not_taken_for_the_type_of_the_block_that_has_it() -> None:
    """pydantic names the members of a union by their type, and a block of type "text" has its text there."""
    block = {"type": "text", "text": "hi", "x": 1, "y": 2}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [dict(block)]}] * 2}
    with pytest.raises(InvalidInput) as unknown:
        validate(MessagesRequest, body)
    assert unknown.value.param == "messages[0].content[0].x"
    body["messages"] = [{"role": "user", "content": [dict(block), dict(block)]}]
    known, ignored = validate_known(MessagesRequest, body)
    assert known.messages[0].content == [TextBlock(type="text", text="hi")] * 2
    assert ignored == [f"messages[0].content[{at}].{name}" for at in (0, 1) for name in "xy"]


def test_whole_numbers_are_integers_wherever_they_stand() -> None:
    assert validate(CompletionRequest, {"prompt": [[1.0, 2], [3.0]], "n": 2.0}).prompt == [[1, 2], [3]]
    with pytest.raises(InvalidInput, match=r"prompt\[1\]\[0\]"):
        validate(CompletionRequest, {"prompt": [[1.0], [1.5]]})


def _lists(schema: Any) -> list[Any]:
    """All schemas of lists in a core schema."""
    waiting, found = [schema], []
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if one.get("type") == "list":
                found.append(one)
            waiting += [item for name, item in one.items() if name not in ("metadata", "serialization")]
        elif isinstance(one, (list, tuple)):
            waiting += one
    return found


def _bodies(base: type[Body] = Body) -> list[type[Body]]:
    return [base, *(deeper for one in base.__subclasses__() for deeper in _bodies(one))]


@pytest.mark.parametrize("schema", _bodies())
def test_the_first_error_of_a_list_ends_its_validation(schema: type[Body]) -> None:
    """A list of any values has none."""
    for one in _lists(schema.__pydantic_core_schema__):
        assert one.get("fail_fast") or one["items_schema"]["type"] == "any", one


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_completions(prompt: Any) -> None:
    assert validate(CompletionRequest, {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
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
    drawn = sampling_of(chat(), seed=9, choice=2, stop_ids=(4, 2, 100), vocab_size=100)
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


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    asked = chat(max_tokens=5.0, seed=-3.0, temperature=1.0)
    assert (asked.max_tokens, asked.seed, asked.temperature) == (5, -3, 1.0)
    assert validate(CompletionRequest, {"prompt": [[1.0, 2], [3, 4.0]]}).prompt == [[1, 2], [3, 4]]
    for wrong in (5.5, True, "5"):
        with pytest.raises(InvalidInput) as refused:
            chat(max_tokens=wrong)
        assert refused.value.param == "max_tokens"


def test_bytes_of_a_header_that_are_no_text_are_no_session_id() -> None:
    with pytest.raises(ValueError, match="printable"):
        check_session_id(b"\xff\xfe".decode(errors="surrogateescape"))


@pytest.mark.parametrize(
    ("id", "fine"),
    [
        ("s", True), ("a b~2", True), ("Zuzu's 猫 🐈", True), ("...", True), ("a" * 128, True),
        ("", False), (".", False), ("..", False), (" a", False), ("a ", False), ("a/b", False),
        ("a\\b", False), ("a\n", False), ("a\tb", False), ("\x00", False), ("a\u202eb", False),
        ("a\u200bb", False), ("\ufeffa", False), ("\ue000", False), ("\U0010fffd", False), ("a" * 129, False),
    ],
)  # fmt: skip
def test_the_rule_for_session_ids_is_the_pattern_that_is_published(id: str, fine: bool) -> None:
    schema = ChatRequest.model_json_schema()["properties"]["session_id"]["anyOf"][0]
    published = re.search(schema["pattern"], id) is not None and len(id) <= schema["maxLength"]
    try:
        check_session_id(id)
        taken = True
    except ValueError:
        taken = False
    assert taken == fine
    assert published == fine or id.endswith("\n")  # which "$" leaves out in Python only
