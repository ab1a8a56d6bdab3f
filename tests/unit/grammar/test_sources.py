"""What a request may hold an answer to: bounds, references, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.grammar import sources


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "other.json#/$defs/a"},
        {"type": "array", "items": {"$dynamicRef": "file:///etc/passwd"}},
        {"properties": {"a": {"anyOf": [{"type": "null"}, {"$recursiveRef": "https://example.org"}]}}},
        {"properties": {"default": {"$ref": "http://127.0.0.1:9/schema.json"}}},
        {"$defs": {"const": {"$ref": "other.json"}}},
        {"$ref": "#/default/0", "default": [{"$ref": "other.json"}]},
    ],
)
def test_a_reference_that_leads_out_is_refused(schema: dict[str, Any]) -> None:
    for form in (schema, json.dumps(schema)):
        with pytest.raises(InvalidInput, match="leads out of the schema") as refused:
            sources.of_schema(form, param="here")
        assert refused.value.param == "here"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"properties": {"$ref": {"type": "string"}}},
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/c/0"}}},
        {"const": {"$ref": "http://a"}, "default": {"$ref": "http://a"}, "enum": [{"$ref": "http://a"}]},
        True,
    ],
)
def test_what_stays_within_is_taken(schema: dict[str, Any] | bool) -> None:
    assert sources.of_schema(schema, param="here") == sources.of_schema(json.dumps(schema), param="here")


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (sources.of_schema, {"enum": ["x" * sources.SCHEMA_CHARS_MAX]}),
        (sources.of_schema, {"pattern": "a" * (sources.PATTERN_CHARS_MAX + 1)}),
        (sources.of_schema, {"anyOf": [{"pattern": "a" * 1000 + str(i)} for i in range(10)]}),
        (sources.of_schema, {"patternProperties": {"a" * (sources.PATTERN_CHARS_MAX + 1): True}}),
        (sources.of_schema, {"properties": {"default": {"pattern": "a" * (sources.PATTERN_CHARS_MAX + 1)}}}),
        (sources.of_schema, {"$defs": {"enum": {"pattern": "a" * (sources.PATTERN_CHARS_MAX + 1)}}}),
        (
            sources.of_schema,
            {
                "$ref": "#/def%61ult/a~1b",
                "default": {"a/b": {"pattern": "a" * (sources.PATTERN_CHARS_MAX + 1)}},
            },
        ),
        (sources.of_schema, {"type": "string", "x-guidance": {"lenient": True}}),
        (sources.of_schema, "{"),
        (sources.of_schema, "[" * 60_000),
        (sources.of_schema, "[1]"),
        (sources.of_schema, False),
        (sources.of_regex, ""),
        (sources.of_regex, "a" * (sources.REGEX_CHARS_MAX + 1)),
        (sources.of_regex, "\ud800"),
        (sources.of_choices, []),
        (sources.of_choices, ["a", ""]),
        (sources.of_choices, ["a" * sources.CHOICES_CHARS_MAX, "b"]),
        (sources.of_lark, 'start: "a"' + " " * sources.LARK_CHARS_MAX),
        (sources.of_lark, '{"grammars": []}'),
        (sources.of_lark, 'start: %json {"$ref": "http://a"}'),
    ],
)
def test_what_is_refused_names_the_field(make: Any, given: Any) -> None:
    with pytest.raises(InvalidInput, match="here") as refused:
        make(given, param="here")
    assert refused.value.param == "here"
