"""Compiled grammars and where answers stand in them, on the demo model's tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvcommons.errors import DeadlineExceeded, Internal, InvalidInput, Overloaded, Unprocessable
from kvcommons.grammar import grammars as settings
from kvcommons.grammar import sources
from kvcommons.grammar.compiled import AnswerState, Vocabulary
from kvcommons.grammar.grammars import Constraint, Grammars, prepare_masks
from kvcommons.model.tokenizer import Tokenizer

DEMO = Path(__file__).parents[3] / "demo" / "model"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

TENANT = "tenant"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(DEMO)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: Vocabulary(tokenizer))
    yield made
    made.close()


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


def walk(constraint: Constraint, tokens: list[int], ends: set[int], seed: int, steps: int) -> bool:
    """Appends tokens drawn among those that are allowed; whether an end came."""
    draw = random.Random(seed)
    for _ in range(steps):
        choice = draw.choice(allowed(constraint.mask(tokens)))
        if choice in ends:
            return True
        tokens.append(choice)
    return False


def constrain(grammars: Grammars, text: str, tokenizer: Tokenizer, first: int = 3) -> Constraint:
    return grammars.constrain(TENANT, text, tokenizer.eos_ids, first)


def test_an_answer_ends_where_its_grammar_does(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = sources.of_choices(["yes", "no", 'a "quoted"\nline'], param="choice")
    found = set()
    for seed in range(40):
        tokens = [5, 6, 7]
        assert walk(constrain(grammars, text, tokenizer), tokens, set(tokenizer.eos_ids), seed, 60)
        found.add(tokenizer.decode(tokens[3:]))
    assert found == {"yes", "no", 'a "quoted"\nline'}


def test_a_grammar_goes_on_where_the_tokens_stand(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A state made of the tokens so far allows at each step what the state that saw them come allows."""
    text = sources.of_schema(PERSON, param="schema")
    whole, tokens, draw = constrain(grammars, text, tokenizer), [9, 9, 9], random.Random(5)
    ends = set(tokenizer.eos_ids)
    for _ in range(60):
        mask = whole.mask(tokens)
        assert constrain(grammars, text, tokenizer).mask(tokens) == mask
        choice = draw.choice(allowed(mask))
        if choice in ends:
            break
        tokens.append(choice)
    jsonschema.validate(json.loads(tokenizer.decode(tokens[3:])), PERSON)


def test_masks_that_nobody_looked_at_change_nothing(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = sources.of_regex("[ab]{4}", param="regex")
    constraint = constrain(grammars, text, tokenizer, first=0)
    tokens: list[int] = []
    for character in "abba":
        prepare_masks([(constraint, tokens, ())])
        prepare_masks([(constraint, tokens, ())])
        tokens += tokenizer.encode_text(character)
    assert allowed(constraint.mask(tokens)) == sorted(tokenizer.eos_ids)


def test_a_mask_that_takes_long_holds_up_no_other(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are computed together, the ones behind it."""
    slow = constrain(grammars, sources.of_regex("a+", param="regex"), tokenizer, first=0)
    quick = constrain(grammars, sources.of_regex("b+", param="regex"), tokenizer, first=0)
    plain, goes_on = AnswerState.mask, threading.Event()

    def mask(state: AnswerState) -> bytes:
        if state is slow._state:
            assert goes_on.wait(20)
        return plain(state)

    monkeypatch.setattr(AnswerState, "mask", mask)
    prepare_masks([(slow, [], ()), (quick, [], ())])
    only_b = allowed(quick.mask([]))
    assert {tokenizer.decode([token]).strip("b") for token in only_b} == {""}
    goes_on.set()
    assert allowed(slow.mask([])) != only_b
    prepare_masks([(quick, only_b[:1], ())])
    assert only_b[0] in allowed(quick.mask(only_b[:1]))


def test_only_what_ends_the_answer_ends_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A template's end of turn in place of the model's own end, and beyond the vocabulary's last byte."""
    text = sources.of_regex("a?", param="regex")
    (eos,) = tokenizer.eos_ids
    for ends in ({1}, {eos, 1}, {1500}):
        mask = grammars.constrain(TENANT, text, ends, 0).mask([])
        assert {token for token in allowed(mask) if token == eos or tokenizer.is_control(token)} <= ends
        assert ends <= set(allowed(mask))
    must = grammars.constrain(TENANT, sources.of_regex("a", param="regex"), {eos, 1}, 0).mask([])
    assert not {eos, 1} & set(allowed(must))


def test_an_answer_beside_its_grammar_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = sources.of_regex("[0-9]+", param="regex")
    with pytest.raises(Internal, match="does not keep to its grammar"):
        constrain(grammars, text, tokenizer, first=0).mask(tokenizer.encode_text("x"))


@pytest.mark.parametrize(
    "text",
    [
        sources.of_regex("a(", param="regex"),
        sources.of_regex("(?=a)b", param="regex"),
        sources.of_schema({"type": "frob"}, param="schema"),
        sources.of_schema({"type": "string", "const": "b", "pattern": "^a$"}, param="schema"),
        sources.of_schema({"not": {"type": "string"}}, param="schema"),
        sources.of_lark("nothing: /a/", param="grammar"),
        sources.of_lark("start: missing", param="grammar"),
    ],
)
async def test_what_is_no_grammar_is_refused(grammars: Grammars, text: str) -> None:
    for _ in range(2):  # once more out of the cache
        with pytest.raises(InvalidInput):
            await grammars.ready(TENANT, text)


async def test_a_grammar_whose_masks_take_long_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound lies far from both, on any machine: a mask of one takes half a second, of the other 1 ms."""
    monkeypatch.setattr(settings, "_MASK_CPU_S", 0.03)
    with pytest.raises(InvalidInput, match="takes too long to compute"):
        await grammars.ready(TENANT, sources.of_regex("(a{1000}){1000}", param="regex"))
    await grammars.ready(TENANT, sources.of_regex("(a{10}){10}", param="regex"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (sources.of_regex("a(", param="regex"), "unclosed group"),
        (sources.of_regex(f"{'x' * 4000}(", param="regex"), "unclosed group"),
        (sources.of_regex("a\n(?=b)", param="regex"), "look-around, including look-ahead"),
        (sources.of_regex(r"(a)\1", param="regex"), "backreferences are not supported"),
        (sources.of_schema({"type": "string", "pattern": "[a"}, param="schema"), "unclosed character class"),
        (sources.of_schema({"not": {}}, param="schema"), 'Unimplemented keys: ["not"]'),
        (sources.of_lark("start: missing", param="grammar"), 'unknown name: "missing"'),
        (sources.of_lark("start: /\u202e\x01(/", param="grammar"), "unclosed group"),
        (sources.of_lark("one: two\n" * 2, param="grammar"), "one"),
    ],
)
async def test_what_is_no_grammar_has_its_reason(grammars: Grammars, text: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        await grammars.ready(TENANT, text)
    message = refused.value.message
    assert reason in message
    assert message.isprintable()
    assert len(message) < 600


async def test_rules_that_refer_to_each_other_do_not_end_the_process(grammars: Grammars) -> None:
    """Thousands of them: on a usual stack the library would overflow it."""
    depth = 600
    rules = [f"r{at}: r{at + 1}" for at in range(depth)]
    text = sources.of_lark("\n".join(["start: r0", *rules, f'r{depth}: "a"']), param="grammar")
    await grammars.ready(TENANT, text)
    defs: dict[str, Any] = {f"{at}": {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(1400)}
    schema = {"$ref": "#/$defs/0", "$defs": {**defs, "1400": {"type": "string"}}}
    await grammars.ready(TENANT, sources.of_schema(schema, param="schema"))


async def test_a_grammar_is_compiled_once_and_the_oldest_are_dropped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "GRAMMARS_MAX", 2)
    compiled: list[str] = []

    class Counting(Vocabulary):
        def compile(self, text: str) -> Any:
            compiled.append(text)
            return super().compile(text)

    grammars = Grammars(lambda: Counting(tokenizer))
    one, two, three = (sources.of_regex(text, param="regex") for text in ("a", "b", "c"))
    for text in (one, two, one, three, one, two):
        await grammars.ready(TENANT, text)
    assert compiled == [one, two, three, two]
    await grammars.ready("another", two)
    assert compiled[4:] == [two], "how long it takes would tell what others ask for"
    monkeypatch.setattr(settings, "WAITING_MAX", 0)
    with pytest.raises(Overloaded):
        await grammars.ready(TENANT, sources.of_regex("d", param="regex"))
    await asyncio.to_thread(grammars.close)


async def test_a_grammar_that_is_not_compiled_in_time_is_ready_later(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def vocabulary() -> Vocabulary:
        assert goes_on.wait(20)
        return Vocabulary(tokenizer)

    grammars = Grammars(vocabulary)
    text = sources.of_regex("a+", param="regex")
    monkeypatch.setattr(settings, "COMPILE_S", 0.01)
    with pytest.raises(DeadlineExceeded, match="not compiled yet"):
        await asyncio.wait_for(grammars.ready(TENANT, text), 10)
    monkeypatch.undo()
    goes_on.set()
    await grammars.ready(TENANT, text)
    await asyncio.to_thread(grammars.close)


def test_a_mask_that_is_not_there_in_time_ends_its_sequence(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = constrain(grammars, sources.of_regex("a+", param="regex"), tokenizer, first=0)
    plain, goes_on = AnswerState.mask, threading.Event()

    def mask(state: AnswerState) -> bytes:
        assert goes_on.wait(20)
        return plain(state)

    grammars.compiling(TENANT, sources.of_regex("a+", param="regex")).result(20)
    monkeypatch.setattr(AnswerState, "mask", mask)
    monkeypatch.setattr(settings, "MASK_S", 0.01)
    with pytest.raises(Unprocessable, match="takes too long"):
        constraint.mask([])
    goes_on.set()


def test_white_space_has_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Compact and indented answers are allowed; a model that likes blanks comes to the next word."""
    text = sources.of_schema({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, param="schema")
    for answer, fits in (
        ('{"a":1', True),
        ('{"a": 1', True),
        ('{\n    "a": 1\n', True),
        ('{  "a"', False),
        ("{\n\n", False),
        ("{\t", False),
    ):
        constraint, tokens = constrain(grammars, text, tokenizer, first=0), list[int]()
        taken = True
        for token in tokenizer.encode_text(answer):
            taken = taken and token in allowed(constraint.mask(tokens))
            tokens.append(token)
            if not taken:
                break
        assert taken == fits, answer
