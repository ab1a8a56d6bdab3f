"""Bodies that are made to be expensive: what they would build is counted first, and no body of an allowed
size holds the event loop for long."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcommons.errors import KVCommonsError
from services.router.api.messages import translation as messages_translation
from services.router.api.messages.requests import MessagesRequest, TokenCountRequest
from services.router.api.responses import translation as responses_translation
from services.router.api.responses.requests import InputTokensRequest, ResponsesRequest
from services.router.api.schemas import scan
from services.router.api.schemas.body import Body
from services.router.api.schemas.requests import ChatRequest, CompletionRequest, SessionPrefill
from services.router.api.schemas.scan import CONTAINERS_MAX, NAMES_MAX, VALUES_MAX, check_counts
from services.router.api.schemas.validation import parse_json, validate, validate_known
from services.router.api.tokenizing import DetokenizeRequest, TokenizeRequest
from services.router.config import RouterConfig
from services.router.turn.plan import given_prompts, messages_of
from services.router.turn.volatile import VolatileLines, stable

BYTES = RouterConfig.__dataclass_fields__["max_body_bytes"].default
# What a body may take, in times of what an honest one of 5,000 messages takes in turn with it. Alone on a
# core that is 19 to 25 ms, and none takes 50. Beside others, who share its caches, what goes through more
# memory is slowed more.
HONEST_TIMES_MAX = 4


def filled(start: bytes, middle: bytes, end: bytes) -> bytes:
    """The largest body that is `middle` again and again."""
    return start + middle * ((BYTES - len(start) - len(end)) // len(middle)) + end


def dumped(first: dict[str, Any] | None = None, /, **fields: Any) -> bytes:
    return json.dumps({**(first or {}), **fields}).encode()


USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return dumped({"messages": [USER]}, **fields)


def names(count: int) -> dict[str, Any]:
    return {f"name{at}": at for at in range(count)}


PART = {"type": "text", "text": "a"}
OUTPUT = {"type": "output_text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
VOLATILE = "request_id_" + "a" * 100 + "\n2026-11-24 09:15:17.\n"
HOSTILE: dict[str, bytes] = {
    "400,000 nulls": b'{"messages":[' + b",".join([b"null"] * 400_000) + b"]}",
    "nulls within the limit": chat(messages=[None] * (VALUES_MAX - 100)),
    "deep": filled(b'{"messages":', b"[", b"]}"),
    "deep within the limit": b'{"messages":' + b"[" * (CONTAINERS_MAX - 10),
    "many names": b"{" + b",".join(b'"name%d":1' % at for at in range(250_000)) + b"}",
    "names within the limit": chat(**names(NAMES_MAX - 10)),
    "names of one message": chat(messages=[{"role": "user", "content": "hi", **names(NAMES_MAX - 10)}]),
    "one long name": filled(b'{"', b"k", b'":1}'),
    "long names": b"{" + b",".join(b'"%04d%s":1' % (at, b"k" * 1000) for at in range(4000)) + b"}",
    "many messages": chat(messages=[{"role": "user", "content": "hi"}] * 100_000),
    "messages within the limit": chat(messages=[{"role": "user", "content": "hi"}] * 5000),
    "wrong messages": chat(messages=[{"role": "nobody", "content": 5}] * 5000),
    "parts of one message": chat(messages=[{"role": "user", "content": [PART] * (CONTAINERS_MAX - 100)}]),
    "messages of parts": chat(messages=[{"role": "user", "content": [PART]}] * 3300),
    "escaped quotes": filled(b'{"prompt":"', b'\\"', b'"}'),
    "backslashes": filled(b'{"prompt":"', b"\\\\", b'"}'),
    "escaped letters": filled(b'{"prompt":"', b"\\u00e9", b'"}'),
    "escapes among commas": filled(b'{"prompt":"', b',\\"', b'"}'),
    "a text of commas": filled(b'{"prompt":"', b",", b'"}'),
    "letters of two bytes": filled(b'{"prompt":"', "é".encode(), b'"}'),
    "empty strings": filled(b'{"prompt":[""', b',""', b"]}"),
    "blanks": filled(b"{", b" ", b"}"),
    "stop strings": chat(stop=["a"] * (VALUES_MAX - 100)),
    "long stop strings": filled(b'{"messages":[],"stop":["', b"s", b'"]}'),
    "biases": chat(logit_bias={str(at): 101 for at in range(NAMES_MAX - 100)}),
    "wrong biases": chat(logit_bias={str(at): "much" for at in range(NAMES_MAX - 100)}),
    "wrong metadata": chat(metadata=names(NAMES_MAX - 100)),
    "token ids": json.dumps({"prompt": list(range(10**8, 10**8 + VALUES_MAX - 100))}).encode(),
    "prompts": json.dumps({"prompt": ["ab"] * (VALUES_MAX - 100)}).encode(),
    "lists of token ids": json.dumps({"prompt": [[1, 2]] * (CONTAINERS_MAX - 100)}).encode(),
    "numbers": b'{"prompt":[' + b"1.7976931348623157e308," * (VALUES_MAX - 100) + b"1]}",
    "a big number": filled(b'{"prompt":', b"1", b"}"),
    "a long fraction": filled(b'{"temperature":0.', b"123456789", b"}"),
    "a long id": filled(b'{"messages":[],"session_id":"', b"s", b'"}'),
    "a long role": filled(b'{"messages":[{"role":"', b"r", b'"}]}'),
    "a mistake at the end": filled(b'{"prompt":"', "é".encode(), b'"}}'),
    "token ids as floats": json.dumps({"prompt": [float(at) for at in range(VALUES_MAX - 100)]}).encode(),
    "lists of floats": json.dumps({"prompt": [[1.0]] * (CONTAINERS_MAX - 100)}).encode(),
    "volatile lines": chat(messages=[{"role": "system", "content": VOLATILE}] * 4000),
    "unknown fields of parts": chat(
        messages=[
            *[USER] * 4000,
            *[{"role": "user", "content": [PART | {"x": 1}]}] * 60,
        ]
    ),
    "unknown fields of tools": chat(tools=[TOOL | {"x": 1}] * 60),
    "unknown fields of calls": chat(
        messages=[
            *[USER] * 4000,
            *[{"role": "assistant", "tool_calls": [CALL | {"x": 1}]}] * 60,
        ]
    ),
}
# Of the other APIs.
ASKS = {"model": "m", "max_tokens": 5}
BLOCK = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why " * 50}]}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OTHERS: dict[str, tuple[type[Body], bytes]] = {
    "messages of blocks": (
        MessagesRequest,
        dumped(ASKS, messages=[{"role": "user", "content": [PART]}] * 3300),
    ),
    "blocks of one message": (
        MessagesRequest,
        dumped(ASKS, messages=[{"role": "assistant", "content": [BLOCK] * 4000}, USER]),
    ),
    "unknown fields of blocks": (
        MessagesRequest,
        dumped(ASKS, messages=[*[USER] * 4000, *[{"role": "user", "content": [PART | {"x": 1}]}] * 60]),
    ),
    "wrong betas": (MessagesRequest, dumped(ASKS, messages=[USER], betas=[1] * (VALUES_MAX - 100))),
    "wrong callers": (
        TokenCountRequest,
        dumped(
            messages=[USER],
            model="m",
            tools=[{"name": "f", "input_schema": {}, "allowed_callers": [1] * (VALUES_MAX - 100)}],
        ),
    ),
    "a system of volatile lines": (
        TokenCountRequest,
        dumped(messages=[USER], model="m", system="Current time: 10:32\n" * 45_000),
    ),
    "thoughts": (ResponsesRequest, dumped(input=[THOUGHT] * 2400)),
    "calls": (ResponsesRequest, dumped(input=[CALL_ITEM] * 4900)),
    "items of messages": (
        InputTokensRequest,
        dumped(input=[{"role": "assistant", "content": [OUTPUT]}] * 3300),
    ),
    "wrong items": (ResponsesRequest, dumped(input=[{"type": "message", "role": 5}] * 5000)),
    "wrong includes": (ResponsesRequest, dumped(input="hi", include=[1] * (VALUES_MAX - 100))),
    "wrong allowed tools": (
        ResponsesRequest,
        dumped(
            input="hi",
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{}] * (CONTAINERS_MAX - 100)},
        ),
    ),
    "messages to tokenize": (TokenizeRequest, dumped(messages=[USER] * 5000)),
    "volatile lines to tokenize": (
        TokenizeRequest,
        dumped(messages=[{"role": "system", "content": VOLATILE}] * 4000),
    ),
    "tokens to detokenize": (DetokenizeRequest, dumped(tokens=[1.0] * (VALUES_MAX - 100))),
    "wrong tokens to detokenize": (DetokenizeRequest, dumped(tokens=["a"] * (VALUES_MAX - 100))),
    "a document": (SessionPrefill, filled(b'{"content":"', "é".encode(), b'"}')),
    "a document of names": (SessionPrefill, dumped(names(NAMES_MAX - 10), content="a")),
}
ALL = {
    **{
        name: (CompletionRequest if body.startswith(b'{"prompt"') else ChatRequest, body)
        for name, body in HOSTILE.items()
    },
    **OTHERS,
}


def served(request: Body) -> None:
    """What becomes of a request on the event loop before its prompt is rendered elsewhere."""
    match request:
        case TokenCountRequest():
            served(validate(ChatRequest, messages_translation.chat_body(request)))
        case InputTokensRequest():
            served(validate(ChatRequest, responses_translation.chat_body(request)))
            stable(request.instructions or "", "move")
        case ChatRequest():
            VolatileLines.of(messages_of(request), "move")
        case TokenizeRequest(messages=list() as messages):
            served(ChatRequest.model_validate({"messages": messages}))
        case CompletionRequest():
            given_prompts(request)


def read(body: bytes, schema: type[Body] = CompletionRequest, *, refuses: bool = True) -> bool:
    """As the router does. Whether the body is taken."""
    try:
        value = parse_json(body)
        served(validate(schema, value) if refuses else validate_known(schema, value)[0])
    except KVCommonsError:
        return False
    return True


def cpu_s(body: bytes, schema: type[Body], *, refuses: bool) -> float:
    """Of this thread, to read it."""
    began_s = time.thread_time()
    read(body, schema, refuses=refuses)
    return time.thread_time() - began_s


@pytest.fixture(scope="module")
def others_frozen() -> None:
    """As in a router: no collection of garbage goes over what lived before. One that goes over all that other
    tests left takes 60 ms, and falls into each turn of a body where the turns allocate what it waits for."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("others_frozen")
@pytest.mark.parametrize("refuses", [True, False], ids=["refuse", "ignore"])
@pytest.mark.parametrize("name", ALL)
def test_no_body_takes_the_loops_thread_for_much_longer_than_an_honest_one(name: str, refuses: bool) -> None:
    schema, body = ALL[name]
    honest = HOSTILE["messages within the limit"]
    assert len(body) <= BYTES
    times = [  # by turns, for other processes slow both
        (cpu_s(body, schema, refuses=refuses), cpu_s(honest, ChatRequest, refuses=True)) for _ in range(5)
    ]
    took_s, honest_s = (min(one) for one in zip(*times, strict=True))
    assert took_s < HONEST_TIMES_MAX * honest_s, f"{took_s * 1e3:.0f} ms, an honest one {honest_s * 1e3:.0f}"


def test_a_long_history_passes() -> None:
    """A megabyte of text in 2,000 messages, with all the punctuation that texts have."""
    text = 'She said: "Well, [this] is {it}, isn\'t it?" \\ \n' * 11
    turns = [{"role": ("user", "assistant")[at % 2], "content": text, "name": None} for at in range(2000)]
    body = json.dumps({"messages": turns}).encode()
    assert len(body) > 1_000_000
    assert len(validate(ChatRequest, parse_json(body)).messages) == 2000
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]} for _ in range(2000)]
    assert len(validate(ChatRequest, parse_json(json.dumps({"messages": parts}).encode())).messages) == 2000


def test_text_of_the_largest_size_passes() -> None:
    for text in (b",", b":", b"[", "é".encode(), b"\\n", b"\\u00e9"):
        assert read(filled(b'{"prompt":"', text, b'"}'))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (HOSTILE["400,000 nulls"], "values"),
        (HOSTILE["many names"], "names"),
        (HOSTILE["deep"], "lists and objects"),
        (filled(b'{"prompt":["', b"\\n,", b'"]}'), "escapes"),
        (b'{"prompt":"' + b"," * 200_000 + b'"}' + b'""' * 300_000, "strings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_many_are_refused_by_name(body: bytes, says: str) -> None:
    with pytest.raises(KVCommonsError, match=f"too many {says}"):
        check_counts(body)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='",:[]{}\\né\u2028a', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('",:\\a', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def _count(value: Any) -> tuple[int, int, int]:
    """Values in lists and objects, names, lists and objects."""
    if isinstance(value, dict | list):
        inner = [_count(item) for item in (value.values() if isinstance(value, dict) else value)]
        totals = [sum(column) for column in zip(*inner, strict=True)] or [0, 0, 0]
        own = len(value)
        return totals[0] + own, totals[1] + own * isinstance(value, dict), totals[2] + 1
    return 0, 0, 0


@settings(max_examples=300, deadline=None)
@given(value=JSON_VALUES, ascii_only=st.booleans(), slice_bytes=st.integers(1, 9))
def test_what_stands_in_strings_does_not_count(value: Any, ascii_only: bool, slice_bytes: int) -> None:
    """However the body is cut into slices."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    slices = [body[start : start + slice_bytes] for start in range(0, len(body), slice_bytes)]
    outside = b"".join(scan._outside_strings(slices))
    values, names, containers = _count(value)
    assert outside.count(b":") == names
    assert outside.count(b"[") + outside.count(b"{") == containers
    assert outside.count(b",") <= values <= outside.count(b",") + containers
