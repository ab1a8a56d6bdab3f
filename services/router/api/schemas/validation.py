"""From bytes to a validated body; whatever does not fit becomes one InvalidInput that names the field."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvcommons.errors import InvalidInput, UnsupportedParameter
from services.router.api.schemas.body import Body
from services.router.api.schemas.messages import MESSAGES_MAX, ChatMessage, TextPart
from services.router.api.schemas.reasons import kind_of, reason_of, tag_of
from services.router.api.schemas.requests import GUIDED, StreamOptions
from services.router.api.schemas.scan import check_counts

B = TypeVar("B", bound=Body)

# Values with which a field that is not built does nothing.
_NO_EFFECT: tuple[Any, ...] = (False, [], {}, "")
_NO_EFFECT_OF: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
}
# Of messages: what answers of OpenAI's have, empty where there is only text.
_MEDIA_FIELDS = frozenset(("function_call", "annotations", "audio", "refusal"))
# Of messages: which role has them; others may have them empty.
_FIELDS_OF_ROLE = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
_EMPTY: tuple[Any, ...] = (None, [], "")
_SCHEMA_FIELDS = ("response_format", "structured_outputs", "tools", "text", "output_config")
_PLAIN_ROLES = ("system", "developer", "user", "assistant")
_PLAIN_NAMES = frozenset(("role", "content", "name"))
_SHOWN_CHARS = 80
_IGNORED_MAX = 64  # fields of one request
_NAMES_ARE_KNOWN = "; /openapi.json has those that are known"
_WHOLE_MAX = 2.0**53  # beyond it a float is no certain integer
# A name that is the beginning of one other name is likely meant for it, where little is missing: "ttl" of
# "ttl_s" is, "prompt" of "prompt_logprobs" is not.
_BEGINNING_CHARS, _MISSING_CHARS_MAX = 3, 3
# Of names: "max_token" and "max_tokens" are alike, "top_a" and "top_p" are not, nor are "seed" and "speed".
_SIMILAR, _SIMILAR_SHORT, _SHORT_CHARS = 0.82, 0.9, 6


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
        raise InvalidInput(f"the body is {kind_of(value)}, and has to be a JSON object")
    if b"null" in body:
        _drop_nulls(value)
    return value


def validate(schema: type[B], value: dict[str, Any]) -> B:
    """Raises InvalidInput, or UnsupportedParameter for what the API knows and this server has not built."""
    return _validated(schema, value, _refuse)


def validate_known(schema: type[B], value: dict[str, Any]) -> tuple[B, list[str]]:
    """The same without the fields that nobody knows, which are taken out of `value`, and their names. Fields
    that are known and not built are refused as ever: to leave them out would change what is asked."""
    ignored: list[str] = []

    def ignore(unknown: _UnknownField) -> None:
        if len(ignored) >= _IGNORED_MAX:
            raise unknown
        ignored.append(unknown.param or "")
        del unknown.holder[unknown.name]

    return _validated(schema, value, ignore), ignored


class _UnknownField(InvalidInput):
    """`holder` has it, by `name`."""

    def __init__(self, holder: dict[str, Any], name: str, where: str, advice: str) -> None:
        param = where + _cut(name)
        super().__init__(f"unknown field {param!r}{advice}", param=param)
        self.holder = holder
        self.name = name


# What becomes of a field that nobody knows: raises it, or takes it out of its holder.
_OnUnknown = Callable[[_UnknownField], None]


def _refuse(unknown: _UnknownField) -> None:
    raise unknown


def _validated(schema: type[B], value: dict[str, Any], on_unknown: _OnUnknown) -> B:
    _check_names(schema, value, "", on_unknown, others=schema.NOT_BUILT)
    value = _without_unbuilt(schema, value)
    if isinstance(options := value.get("stream_options"), dict):
        _check_names(StreamOptions, options, "stream_options.", on_unknown)
    if schema.CHAT_MESSAGES and isinstance(messages := value.get("messages"), list):
        # Of more messages than are taken, the first ones are enough to say so.
        first = messages[: MESSAGES_MAX + 1]
        value = {
            **value,
            "messages": [_checked_message(index, item, on_unknown) for index, item in enumerate(first)],
        }
    body = _built(schema, value, on_unknown)
    body.check_together()
    return body


def _built(schema: type[B], value: dict[str, Any], on_unknown: _OnUnknown) -> B:
    """As often as there are kinds of places with whole floats, and twice more where fields are unknown: never
    as often as there are values."""
    extra: Literal["allow"] | None = None
    while True:
        try:
            body = schema.model_validate(value, extra=extra)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False, include_context=True)
            if _made_whole(value, errors):
                continue
            explained = _explained(value, errors)
            if not isinstance(explained, _UnknownField):
                raise explained from None
            on_unknown(explained)
            extra = "allow"  # so that one pass finds all the others
        else:
            if extra is None:
                return body
            _visit_unknown(body, value, "", on_unknown)
            extra = None


def _visit_unknown(body: Any, value: Any, where: str, on_unknown: _OnUnknown) -> None:
    """All that `value` has and the schemas of `body`, which was made of it, have not."""
    if isinstance(body, list) and isinstance(value, list):
        for at, (item, of_item) in enumerate(zip(body, value, strict=True)):
            if isinstance(item, (Body, list)):
                _visit_unknown(item, of_item, f"{where}[{at}]", on_unknown)
    elif isinstance(body, Body) and isinstance(value, dict):
        prefix = f"{where}." if where else ""
        if body.model_config["extra"] == "forbid":
            for name in body.model_extra or ():
                on_unknown(_UnknownField(value, name, prefix, _NAMES_ARE_KNOWN))
        for name, field in type(body).model_fields.items():
            if isinstance(item := getattr(body, name), (Body, list)):
                called = field.alias or name
                _visit_unknown(item, value.get(called), f"{prefix}{called}", on_unknown)


def _made_whole(value: dict[str, Any], errors: list[ErrorDetails]) -> bool:
    """Writes numbers as 5.0 as integers where those are wanted, for to JSON Schema they are: of an item of a
    list, in all its items, for the first error ends the validation of a list. Returns whether there were
    any."""
    places = {
        tuple(None if isinstance(step, int) else step for step in _located(value, error))
        for error in errors
        if error["type"] == "int_type"
    }
    found = False
    for *path, last in filter(None, places):
        holders: list[Any] = [value]
        for step in path:
            holders = [holder[key] for holder in holders for key in _keys(holder, step)]
        for holder in holders:
            for key in _keys(holder, last):
                number = holder[key]
                if isinstance(number, float) and number.is_integer() and abs(number) <= _WHOLE_MAX:
                    holder[key] = int(number)
                    found = True
    return found


def _keys(holder: Any, step: str | None) -> Iterable[Any]:
    """Those of `step` in an object, and with None all of a list; nothing where it is something else."""
    if step is None:
        return range(len(holder)) if isinstance(holder, list) else ()
    return (step,) if isinstance(holder, dict) and step in holder else ()


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
    if name in GUIDED:  # an empty schema is one, too
        return False
    neutral = (*_NO_EFFECT, *_NO_EFFECT_OF.get(name, ()))
    return any(type(given) is type(value) and given == value for value in neutral)


@cache
def _names(schema: type[Body]) -> frozenset[str]:
    return frozenset(schema.model_fields)


def _check_names(
    schema: type[Body],
    value: dict[str, Any],
    where: str,
    on_unknown: _OnUnknown,
    *,
    others: Collection[str] = (),
) -> None:
    """Calls `on_unknown` for names that `schema` does not have; pydantic would list them all.

    `where`: the path to `value`, with the dot behind it. `others`: further names that are known."""
    known = _names(schema)
    if value.keys() <= known or value.keys() <= known.union(others):
        return
    for unknown in [name for name in value if name not in known and name not in others]:
        if unknown in schema.ELSEWHERE:
            advice = f": {schema.ELSEWHERE[unknown]}"
        else:
            near = _near(_cut(unknown), [*schema.model_fields, *others])
            advice = f": did you mean {near!r}?" if near else _NAMES_ARE_KNOWN
        on_unknown(_UnknownField(value, unknown, where, advice))


def _near(unknown: str, names: Sequence[str]) -> str | None:
    """The name that was likely meant."""
    cutoff = _SIMILAR_SHORT if len(unknown) <= _SHORT_CHARS else _SIMILAR
    if alike := difflib.get_close_matches(unknown, names, n=1, cutoff=cutoff):
        return alike[0]
    begun = [
        name for name in names if name.startswith(unknown) and len(name) - len(unknown) <= _MISSING_CHARS_MAX
    ]
    return begun[0] if len(unknown) >= _BEGINNING_CHARS and len(begun) == 1 else None


def _checked_message(index: int, message: Any, on_unknown: _OnUnknown) -> Any:
    """Refuses other media and unknown fields by name, and what belongs to another role; leaves out empty
    fields (clients send answers back as they got them, with `"annotations": []`)."""
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) and role in _PLAIN_ROLES and message.keys() <= _PLAIN_NAMES:
        return message  # as nearly all are
    where = f"messages[{index}]"
    _check_names(ChatMessage, message, f"{where}.", on_unknown, others=_MEDIA_FIELDS)
    if role == "function":
        raise UnsupportedParameter(
            f'{where}.role: "function" is deprecated by OpenAI; send "tool" with a tool_call_id',
            param=f"{where}.role",
        )
    for name in message.keys() & _MEDIA_FIELDS:
        if message[name] not in _EMPTY:
            advice = "deprecated; send tool_calls" if name == "function_call" else "only text is built"
            raise UnsupportedParameter(f"{where}.{name}: {advice}", param=f"{where}.{name}")
    for name, owner in _FIELDS_OF_ROLE.items():
        if role != owner and message.get(name) not in _EMPTY:
            raise InvalidInput(
                f"{where}.{name} belongs to a message of the role {owner}", param=f"{where}.{name}"
            )
    message = {
        name: item
        for name, item in message.items()
        if name not in _MEDIA_FIELDS and not (name in _FIELDS_OF_ROLE and item in _EMPTY)
    }
    if "tool_calls" in message:
        message.setdefault("content", "")
    if role == "tool" and "tool_call_id" not in message:
        param = f"{where}.tool_call_id"
        raise InvalidInput(f"the field {param!r} is missing: which call it is the result of", param=param)
    if isinstance(content, list):
        for at, part in enumerate(content):
            _check_part(f"{where}.content[{at}]", part, on_unknown)
    return message


def _check_part(where: str, part: Any, on_unknown: _OnUnknown) -> None:
    if not isinstance(part, dict):
        return
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        param = f"{where}.type"
        raise UnsupportedParameter(f"{param}: {_cut(kind)!r} is not built, only text is", param=param)
    _check_names(TextPart, part, f"{where}.", on_unknown)


def _explained(value: dict[str, Any], errors: list[ErrorDetails]) -> InvalidInput:
    # Of a union's errors the one that got deepest into the value is about what was meant.
    located = [(_located(value, error), error) for error in errors]
    path, error = max(located, key=lambda pair: len(pair[0]))
    param = _param(path)
    if error["type"] == "extra_forbidden":
        holder = _at(value, path[:-1])
        where = _param(path[:-1])
        return _UnknownField(holder, str(path[-1]), f"{where}." if where else "", _NAMES_ARE_KNOWN)
    if error["type"] == "missing":
        return InvalidInput(f"the field {param!r} is missing", param=param)
    found = [candidate for at, candidate in located if at == path]
    why = reason_of(found, _at(value, path))
    param += tag_of(found)
    return InvalidInput(f"{param}{why}", param=param)


def _located(value: Any, error: ErrorDetails) -> list[int | str]:
    """The error's place without pydantic's names of union members: only what can be followed into the value,
    and the key that is missing there."""
    return _followed(value, error["loc"], error["type"] == "missing")[1]


def _followed(here: Any, loc: tuple[int | str, ...], missing: bool) -> tuple[bool, list[int | str]]:
    """Whether the last step of `loc` leads somewhere, and all steps that do. A block of type "text" has a
    member of that name, too: where a step may be the one or the other, the last step says which it is."""
    if not loc:
        return True, []
    step, *rest = loc
    without = _followed(here, tuple(rest), missing) if rest else (False, [])
    if isinstance(here, dict) and isinstance(step, str) and (step in here or (missing and not rest)):
        inner = here.get(step)
    elif isinstance(here, list) and isinstance(step, int) and step < len(here):
        inner = here[step]
    else:
        return without
    led, path = _followed(inner, tuple(rest), missing)
    return max((led, [step, *path]), without, key=lambda found: (found[0], len(found[1])))


def _at(value: Any, path: list[int | str]) -> Any:
    for step in path:
        value = value[step]
    return value


def _param(path: list[int | str]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{_cut(step)}" if text else _cut(step)
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
