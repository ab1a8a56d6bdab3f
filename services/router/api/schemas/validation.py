"""From bytes to a validated body; whatever does not fit becomes one InvalidInput that names the field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvcommons.errors import InvalidInput, UnsupportedParameter
from services.router.api.schemas.requests import (
    MESSAGES_MAX,
    Body,
    ChatMessage,
    ChatRequest,
    StreamOptions,
    TextPart,
)
from services.router.api.schemas.scan import check_counts

B = TypeVar("B", bound=Body)

# Values with which a field that is not built does nothing.
_NO_EFFECT: tuple[Any, ...] = (False, [], {}, "")
_NO_EFFECT_OF: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
}
_TOOL_ROLES = ("tool", "function")
_TOOL_FIELDS = frozenset(
    (
        "tool_calls",
        "tool_call_id",
        "function_call",
        "annotations",
        "audio",
        "refusal",
        "reasoning_content",
    )
)
_SCHEMA_FIELDS = ("response_format", "structured_outputs")
_SHOWN_CHARS = 80


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidInput."""
    if not body or body.isspace():
        raise InvalidInput("the body is empty: send a JSON object with content type application/json")
    check_counts(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(_unreadable(error)) from None
    if not isinstance(value, dict):
        raise InvalidInput(f"the body is {_kind(value)}, and has to be a JSON object")
    if b"null" in body:
        _drop_nulls(value)
    return value


def validate(schema: type[B], value: dict[str, Any]) -> B:
    """Raises InvalidInput, or UnsupportedParameter for what the API knows and this server has not built."""
    value = _without_unbuilt(schema, value)
    _check_names(schema, value, "", suggested=(*schema.model_fields, *schema.NOT_BUILT))
    if isinstance(options := value.get("stream_options"), dict):
        _check_names(StreamOptions, options, "stream_options.")
    if schema is ChatRequest and isinstance(messages := value.get("messages"), list):
        # Of more messages than are taken, the first ones are enough to say so.
        messages = [_checked_message(index, item) for index, item in enumerate(messages[: MESSAGES_MAX + 1])]
        value = {**value, "messages": messages}
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=True)
        raise _explained(value, errors) from None


def _unreadable(error: orjson.JSONDecodeError) -> str:
    if "UTF-8:" in error.msg:
        return "the body is not UTF-8 text"
    if "surrogate" in error.msg:
        return "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no text"
    if "depth" in error.msg:
        return "the body is nested too deeply"
    return f"the body is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"


def _drop_nulls(value: dict[str, Any]) -> None:
    """Takes members that are null out of all objects in `value`: SDKs write out every field that they know,
    and a null says that the field is absent. A null in a list has a place there, and stays; so does one in a
    schema, which may ask for it."""
    waiting: list[Any] = [{**value, **dict.fromkeys(_SCHEMA_FIELDS)}]
    for name in [name for name, item in value.items() if item is None]:
        del value[name]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            for name in [name for name, item in one.items() if item is None]:
                del one[name]
            one = one.values()
        waiting += [item for item in one if isinstance(item, (dict, list))]


def _without_unbuilt(schema: type[Body], value: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, given in value.items():
        if name not in schema.NOT_BUILT:
            kept[name] = given
        elif not _has_no_effect(name, given):
            raise UnsupportedParameter(f"{name}: {schema.NOT_BUILT[name]}", param=name)
    return kept


def _has_no_effect(name: str, given: Any) -> bool:
    neutral = (*_NO_EFFECT, *_NO_EFFECT_OF.get(name, ()))
    return any(type(given) is type(value) and given == value for value in neutral)


@cache
def _names(schema: type[Body]) -> frozenset[str]:
    return frozenset(schema.model_fields)


def _check_names(
    schema: type[Body], value: dict[str, Any], where: str, *, suggested: Iterable[str] | None = None
) -> None:
    """Raises InvalidInput for the first name that `schema` does not have; pydantic would list them all.

    `where`: the path to `value`, with the dot behind it. `suggested`: names that may be meant, all of the
    schema by default."""
    known = _names(schema)
    if value.keys() <= known:
        return
    unknown = _cut(next(name for name in value if name not in known))
    near = difflib.get_close_matches(unknown, suggested or sorted(known), n=1, cutoff=0.5)
    param = where + unknown
    advice = f": did you mean {near[0]!r}?" if near else "; /openapi.json has those that are known"
    raise InvalidInput(f"unknown field {param!r}{advice}", param=param)


def _checked_message(index: int, message: Any) -> Any:
    """Refuses tools, other media and unknown fields by name; leaves out empty fields of tools and media
    (clients send answers back as they got them, with `"annotations": []`)."""
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) and role not in _TOOL_ROLES and message.keys() <= _names(ChatMessage):
        return message  # as nearly all are
    where = f"messages[{index}]"
    if role in _TOOL_ROLES:
        raise UnsupportedParameter(f"{where}.role: tools are not built yet", param=f"{where}.role")
    if not message.keys().isdisjoint(_TOOL_FIELDS):
        for name, item in message.items():
            if name in _TOOL_FIELDS and item not in (None, [], ""):
                raise UnsupportedParameter(f"{where}.{name}: only text is built", param=f"{where}.{name}")
        message = {name: item for name, item in message.items() if name not in _TOOL_FIELDS}
    if isinstance(content, list):
        for at, part in enumerate(content):
            _check_part(f"{where}.content[{at}]", part)
    _check_names(ChatMessage, message, f"{where}.")
    return message


def _check_part(where: str, part: Any) -> None:
    if not isinstance(part, dict):
        return
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        param = f"{where}.type"
        raise UnsupportedParameter(f"{param}: {_cut(kind)!r} is not built, only text is", param=param)
    _check_names(TextPart, part, f"{where}.")


def _explained(value: dict[str, Any], errors: list[ErrorDetails]) -> InvalidInput:
    # Of a union's errors the one that got deepest into the value is about what was meant.
    located = [(_located(value, error), error) for error in errors]
    path, error = max(located, key=lambda pair: len(pair[0]))
    param = _param(path)
    if error["type"] == "missing":
        return InvalidInput(f"the field {param!r} is missing", param=param)
    kinds = {candidate["msg"] for at, candidate in located if at == path}
    reason = " or ".join(sorted(_reason(kind) for kind in kinds))
    return InvalidInput(f"{param}: {reason}", param=param)


def _reason(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _located(value: Any, error: ErrorDetails) -> list[int | str]:
    """The error's place without pydantic's names of union members: only what can be followed into the value,
    and the key that is missing there."""
    path: list[int | str] = []
    loc = error["loc"]
    missing = len(loc) - 1 if error["type"] == "missing" else None
    here = value
    for place, step in enumerate(loc):
        if isinstance(here, dict) and isinstance(step, str) and (step in here or place == missing):
            here = here.get(step)
            path.append(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            here = here[step]
            path.append(step)
    return path


def _param(path: list[int | str]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{_cut(step)}" if text else _cut(step)
    return text


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
