"""What a request may hold an answer to, written as one grammar's text, which routers send and instances
compile.

The text is what the grammar library reads: a JSON object for schemas and regular expressions, else Lark.
Sizes are bounded here, for what the library takes to compile a text, and how deep it recurses, grows with it.
Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from kvcommons.errors import InvalidInput

SCHEMA_CHARS_MAX = 65_536
PATTERN_CHARS_MAX = 1_024  # of each in a schema
PATTERNS_CHARS_MAX = 8_192  # of all in a schema
REGEX_CHARS_MAX = 4_096
LARK_CHARS_MAX = 8_192
CHOICES_CHARS_MAX = 16_384  # of all choices

# A model that likes white space would write nothing else until its answer's end: a blank, or a line's end and
# the next line's indentation.
_WHITESPACE = r"(\x20|\x0A\x20{0,16})"
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DATA = frozenset(("const", "enum", "default", "examples", "example"))  # values, whatever they look like
_NAMED = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)  # schemas by any name
_OWN_OPTIONS = "x-guidance"


def of_json_object() -> str:
    """Any JSON object."""
    return _of_schema({"type": "object"})


def of_schema(schema: Mapping[str, Any] | bool | str, *, param: str) -> str:
    """JSON that a schema allows; `schema` may be its text. Raises InvalidInput, for `param`."""
    if isinstance(schema, str):
        _check_size(schema, SCHEMA_CHARS_MAX, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{param}: the schema is no JSON: {error}", param=param) from None
        if not isinstance(schema, (dict, bool)):
            raise InvalidInput(f"{param}: a schema is an object", param=param)
    if isinstance(schema, bool):
        if not schema:
            raise InvalidInput(f"{param}: the schema false allows no answer", param=param)
        schema = {}
    _check_size(json.dumps(schema), SCHEMA_CHARS_MAX, param)
    _check_schema(schema, param)
    return _of_schema(schema)


def of_regex(pattern: str, *, param: str) -> str:
    """Text that a regular expression matches as a whole. Raises InvalidInput, for `param`."""
    _check_size(pattern, REGEX_CHARS_MAX, param)
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Sequence[str], *, param: str) -> str:
    """One of these texts. Raises InvalidInput, for `param`."""
    if not choices or not all(choices):
        raise InvalidInput(f"{param}: at least one choice is needed, and none may be empty", param=param)
    _check_size("".join(choices), CHOICES_CHARS_MAX, param)
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))


def of_lark(grammar: str, *, param: str) -> str:
    """As a grammar in Lark's syntax says. Raises InvalidInput, for `param`."""
    _check_size(grammar, LARK_CHARS_MAX, param)
    if grammar.lstrip().startswith("{"):  # the library's own JSON form, whose parts nothing here has bounded
        raise InvalidInput(f"{param}: a grammar is in Lark's syntax, and begins with a rule", param=param)
    if "%json" in grammar or "%llguidance" in grammar or "%regex" in grammar:
        raise InvalidInput(
            f"{param}: %json, %regex and %llguidance are not taken; send a schema as json, "
            "a pattern as regex",
            param=param,
        )
    return grammar


def composed(lark: str, parts: Mapping[str, str]) -> str:
    """Of rules in Lark's syntax, which name grammars as @name, and those: their texts as made here."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, text in parts.items():
        one = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append(one | {"name": name})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _of_schema(schema: Mapping[str, Any]) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})


def _check_size(text: str, chars_max: int, param: str) -> None:
    if not text:
        raise InvalidInput(f"{param} is empty", param=param)
    if len(text) > chars_max:
        raise InvalidInput(f"{param} has {len(text)} characters, and {chars_max} are the limit", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{param} is no Unicode: {error.reason} at {error.start}", param=param) from None


def _check_schema(schema: Any, param: str) -> None:
    """Raises InvalidInput for a reference that leads out of the schema, and for patterns that are too
    long."""
    patterns = 0
    waiting, seen = [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        if _OWN_OPTIONS in one:
            raise InvalidInput(f"{param}: {_OWN_OPTIONS!r} is no keyword of JSON Schema", param=param)
        for name in _REFERENCES:
            target = one.get(name)
            if not isinstance(target, str):
                continue
            if not target.startswith("#"):
                raise InvalidInput(
                    f"{param}: {name} {target[:80]!r} leads out of the schema, and nothing is fetched: put "
                    "what it names under $defs, and refer to it as #/$defs/…",
                    param=param,
                )
            waiting.append(_pointed_at(schema, target))  # which makes a schema of what may be data
        named = one.get("patternProperties")
        texts = [one.get("pattern"), *(named if isinstance(named, dict) else ())]
        for pattern in texts:
            if isinstance(pattern, str):
                patterns += len(pattern)
                if len(pattern) > PATTERN_CHARS_MAX or patterns > PATTERNS_CHARS_MAX:
                    raise InvalidInput(
                        f"{param}: a pattern has at most {PATTERN_CHARS_MAX} characters, all of a schema "
                        f"{PATTERNS_CHARS_MAX}",
                        param=param,
                    )
        for name, value in one.items():
            if name in _NAMED and isinstance(value, dict):
                waiting += value.values()
            elif name not in _DATA:
                waiting.append(value)


def _pointed_at(schema: Any, reference: str) -> Any:
    """What a reference within the schema names by its path (RFC 6901), None where nothing is there."""
    found = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and len(step) < 6:
            found = found[int(step)] if int(step) < len(found) else None
        else:
            return None
    return found
