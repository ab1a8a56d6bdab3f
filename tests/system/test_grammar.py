"""Answers that keep to a grammar, over REST, from a whole stack with the demo model."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.machine import scaled
from tests.system.examples import examples, run_python
from tests.system.stack import Stack

NAMES = ("a", "b", "name", "größe", 'with "quotes"')
QUESTION = [{"role": "user", "content": "My dog is called Rexo. Tell me about it."}]


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.v1, api_key="none", max_retries=0, timeout=scaled(60)) as client:
        yield client


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of what answers are short enough to be complete."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "ref"]
    kind = draw.choice([*kinds, *["object", "array", "any"] * (2 if depth < 2 else 0)])
    if kind == "enum":
        return {"enum": draw.sample(["red", 7, None, True, "größer", [1], {"x": None}], 3)}
    if kind == "const":
        return {"const": draw.choice([None, "a b", 3])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-f]{2,4}$", "^(yes|no)$", "^\\d{3}-\\d$"])}
    if kind == "ref":
        return {"$ref": "#/$defs/shared"}
    if kind == "object":
        names = draw.sample(NAMES, draw.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(draw, depth + 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": 1, "maxItems": 2}
    if kind == "any":
        return {"anyOf": [random_schema(draw, depth + 1), random_schema(draw, depth + 1)]}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(0, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": draw.choice([5, 1000])}
    return {"type": kind} if kind != "number" else {"type": "number", "minimum": -1, "maximum": 1}


def answered(sdk: openai.OpenAI, seed: int, *, model: str, choices: int = 2) -> list[str]:
    """Asks for JSON of a random schema, at a temperature at which the model's own words are noise; every
    other time streamed. The finish reasons; asserts that each complete answer keeps to the schema."""
    draw = random.Random(seed)
    schema = random_schema(draw) | {"$defs": {"shared": {"type": "string", "maxLength": 3}}}
    asked: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "n": choices,
        "seed": seed,
        "temperature": 1.5,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    texts, reasons = [""] * choices, [""] * choices
    if seed % 2:
        for chunk in sdk.chat.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    else:
        for choice in sdk.chat.completions.create(**asked).choices:
            texts[choice.index], reasons[choice.index] = choice.message.content or "", choice.finish_reason
    for text, reason in zip(texts, reasons, strict=True):
        assert reason in ("stop", "length")
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
    return reasons


@pytest.mark.parametrize(
    "schemas", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_answers_keep_to_random_schemas(sdk: openai.OpenAI, schemas: int) -> None:
    model = sdk.models.list().data[0].id
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(answered, sdk, seed, model=model) for seed in range(schemas)]
        reasons = [reason for one in asked for reason in one.result()]
    assert reasons.count("stop") > schemas  # of twice as many


def test_an_answer_of_json_is_an_object(sdk: openai.OpenAI) -> None:
    """At a temperature at which the model's own words are noise."""
    answer = sdk.chat.completions.create(
        model=sdk.models.list().data[0].id, messages=QUESTION, n=4, temperature=1.5, seed=7, max_tokens=300,
        response_format={"type": "json_object"},
    )  # fmt: skip
    complete = [one for one in answer.choices if one.finish_reason == "stop"]
    assert complete
    for choice in answer.choices:
        text = choice.message.content or ""
        assert text.startswith("{")
        assert choice not in complete or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["positive", "negative", "größer"]}, "positive|negative|größer"),
        ({"regex": "[a-c]{3}-[0-9]{2,4}"}, "[a-c]{3}-[0-9]{2,4}"),
        ({"grammar": 'start: "(" N ("," N)? ")"\nN: /[0-9]{1,3}/'}, r"\([0-9]{1,3}(,[0-9]{1,3})?\)"),
        ({"json": '{"type": "array", "items": {"const": null}, "maxItems": 2}'}, r"\[[null\s,]*\]"),
    ],
)
def test_what_vllm_calls_structured_outputs(
    sdk: openai.OpenAI, outputs: dict[str, Any], pattern: str
) -> None:
    """In completions, where other tokens end an answer; and log-probabilities are those behind the mask."""
    model = sdk.models.list().data[0].id
    answer = sdk.completions.create(
        model=model, prompt=["My cat", "My dog"], n=2, logprobs=3, temperature=1.2, seed=3, max_tokens=200,
        extra_body={"structured_outputs": outputs},
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.logprobs is not None
        assert all(0 >= (one or 0) > -1000 for one in choice.logprobs.token_logprobs or [])
    forced = sdk.completions.create(
        model=model, prompt="x", logprobs=3, extra_body={"structured_outputs": {"regex": "q"}}
    )
    logprobs = forced.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] == 0.0


def test_the_pages_example_runs(stack: Stack) -> None:
    (example,) = examples("docs/structured-outputs.md", "python")
    assert set(ast.literal_eval(run_python(example, stack))) == {"name", "kind", "age"}


def test_a_session_goes_on_behind_a_grammar(stack: Stack) -> None:
    """A turn with a grammar, one without, and a first token that decode or prefill samples: a long prompt is
    prefill's."""
    long = " ".join(f"My friend number {at} likes blue." for at in range(80))
    for message, session in (("Who is it?", "short"), (long, "long")):
        with_grammar = stack.client.say(
            message, f"grammar-{session}", temperature=0, structured_outputs={"choice": ["Zuzu.", "Benno."]}
        )
        assert with_grammar.text in ("Zuzu.", "Benno.")
        assert with_grammar.finish_reason == "stop"
        plain = stack.client.say("And now?", f"grammar-{session}", temperature=0, max_tokens=20)
        assert plain.text
        assert plain.text not in ("Zuzu.", "Benno.")
