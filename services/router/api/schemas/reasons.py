"""What is wrong with a value of a body, in the words of this server: from the errors of the library that
validates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

_SHOWN_CHARS = 40  # of a value
_KINDS = {list: "a list", dict: "an object", str: "a string", int: "a number", float: "a number"}
_WORDS = {None: "null", True: "true", False: "false"}
_LEFT_OUT = "hosted"  # tag of items and tools that stands for many types
# By the library's type of an error: what the value has to be, where it is of another kind.
_WANTED = {
    "string_type": "a string",
    "string_unicode": "Unicode text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 4300 digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "an object",
}


def reason_of(errors: Sequence[ErrorDetails], value: Any) -> str:
    """What follows on the name of a field. `errors`: those of the value; several are of the members of a
    union, of which those say most whose kind the value has."""
    wanted = list(dict.fromkeys(text for text in map(_wanted, errors) if text))
    broken = list(dict.fromkeys(text for error in errors if (text := _broken(error, value))))
    if broken:
        return broken[0]
    if wanted:
        return f" has to be {', or '.join(wanted)}, and is {_shown(value, errors)}"
    return " is not what /openapi.json describes"


def tag_of(errors: Sequence[ErrorDetails]) -> str:
    """Behind the name of a field, where it is the type of its value that is wrong."""
    return ".type" if any(error["type"] == "union_tag_invalid" for error in errors) else ""


def kind_of(value: Any) -> str:
    """Of a JSON value, as people call it."""
    return _KINDS.get(type(value)) or _WORDS[value]


def _wanted(error: ErrorDetails) -> str | None:
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"]).replace("True", "true")
    return _WANTED.get(error["type"])


def _broken(error: ErrorDetails, value: Any) -> str | None:
    """Of a value that is of the right kind."""
    context = error.get("ctx", {})
    match error["type"]:
        case "value_error":
            return f": {context['error']}"
        case "greater_than":
            return f" has to be more than {context['gt']:g}, and is {_cut(value)}"
        case "greater_than_equal":
            return f" has to be at least {context['ge']:g}, and is {_cut(value)}"
        case "less_than_equal":
            return f" has to be at most {context['le']:g}, and is {_cut(value)}"
        case "too_short":
            return f" has to have at least {_count(context['min_length'], 'entry', 'entries')}"
        case "too_long":
            return f" has to have at most {_count(context['max_length'], 'entry', 'entries')}"
        case "string_too_short":
            return f" has to have at least {_count(context['min_length'], 'character', 'characters')}"
        case "string_too_long":
            most = _count(context["max_length"], "character", "characters")
            return f" has to have at most {most}, and has {len(value)}"
        case "string_pattern_mismatch":
            return f" has to match {context['pattern']}, and is {_cut(value)}"
        case "union_tag_invalid":
            tags = str(context["expected_tags"]).replace(f", '{_LEFT_OUT}'", "")
            return f" has to be one of {tags}, and is {_cut(context['tag'])}"
        case "union_tag_not_found" if isinstance(value, dict):
            return " needs a type, which is a string"
    return None


def _shown(value: Any, errors: Sequence[ErrorDetails]) -> str:
    """The value itself where it is short and of the right kind."""
    near = any(error["type"] in ("literal_error", "int_type", "int_from_float") for error in errors)
    return _cut(value) if near and type(value) in (str, int, float) else kind_of(value)


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
