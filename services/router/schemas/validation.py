"""From bytes to a validated body; whatever does not fit becomes one InvalidInput that names the field."""

from __future__ import annotations

import difflib
import json
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvcommons.errors import InvalidInput, UnsupportedParameter
from services.router.schemas.requests import Body, ChatMessage, ChatRequest

B = TypeVar("B", bound=Body)

# Values with which a field that is not built does nothing.
_NO_EFFECT: tuple[Any, ...] = (False, [], {}, "")
_NO_EFFECT_OF: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
}
_TOOL_ROLES = ("tool", "function")
_TOOL_FIELDS = (
    "tool_calls",
    "tool_call_id",
    "function_call",
    "annotations",
    "audio",
    "refusal",
    "reasoning_content",
)
_SHOWN_CHARS = 80


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidInput."""
    if not body.strip():
        raise InvalidInput("the body is empty: send a JSON object with content type application/json")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the body is not UTF-8: byte {error.start} is wrong") from None
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"the body is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None
    except ValueError:  # Python refuses integers of more than 4,300 digits
        raise InvalidInput("the body has a number that is too long") from None
    if b"\\u" in body:
        _check_surrogates(value)
    if not isinstance(value, dict):
        raise InvalidInput(f"the body is {_kind(value)}, and has to be a JSON object")
    return without_nulls(value)


def validate(schema: type[B], value: dict[str, Any]) -> B:
    """Raises InvalidInput, or UnsupportedParameter for what the API knows and this server has not built."""
    value = _without_unbuilt(schema, value)
    if schema is ChatRequest:
        value = _checked_messages(value)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=True)
        raise _explained(schema, value, errors) from None


def without_nulls(value: Any) -> Any:
    """A copy without the members of objects that are null: SDKs write out every field that they know, and a
    null says of each that it is absent. A null in a list has a place there, and stays."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _no_constant(name: str) -> NoReturn:
    raise InvalidInput(f"the body has the number {name}, which JSON does not know")


def _check_surrogates(value: Any) -> None:
    """JSON can write half of a surrogate pair, which no text can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(
            "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no text"
        ) from None


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


def _checked_messages(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses tools and other media in messages by name; leaves out empty fields of them (clients send
    answers back as they got them, with `"annotations": []`)."""
    messages = value.get("messages")
    if not isinstance(messages, list):
        return value
    checked: list[Any] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            checked.append(message)
            continue
        if message.get("role") in _TOOL_ROLES:
            raise UnsupportedParameter(f"{where}.role: tools are not built yet", param=f"{where}.role")
        for name in _TOOL_FIELDS:
            if message.get(name) not in (None, [], ""):
                raise UnsupportedParameter(f"{where}.{name}: only text is built", param=f"{where}.{name}")
        content = message.get("content")
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                param = f"{where}.content[{part_index}].type"
                raise UnsupportedParameter(f"{param}: {_cut(kind)!r} is not built, only text is", param=param)
        checked.append({name: item for name, item in message.items() if name not in _TOOL_FIELDS})
    return {**value, "messages": checked}


def _explained(schema: type[Body], value: dict[str, Any], errors: list[ErrorDetails]) -> InvalidInput:
    # Of a union's errors the one that got deepest into the value is about what was meant.
    located = [(_located(value, error), error) for error in errors]
    path, error = max(located, key=lambda pair: len(pair[0]))
    param = _param(path)
    if error["type"] == "extra_forbidden":
        return InvalidInput(f"unknown field {param!r}{_nearest(schema, path)}", param=param)
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


def _nearest(schema: type[Body], path: list[int | str]) -> str:
    unknown = str(path[-1])
    known = [*schema.model_fields, *schema.NOT_BUILT] if len(path) == 1 else []
    if len(path) > 1 and path[0] == "messages":
        known = list(ChatMessage.model_fields)
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else "; /openapi.json has those that are known"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
