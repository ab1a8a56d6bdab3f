"""Grammars of whole answers, by family: what is drawn at random within one is what the parser reads as calls,
and what the family's models write is allowed."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvcommons.errors import Internal, InvalidInput
from kvcommons.grammar import sources
from kvcommons.grammar.compiled import Grammar, Vocabulary
from kvcommons.model.chat import ChatTemplate, Thinking
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from services.router.answer.formats import AnswerFormat, call_format
from services.router.answer.grammar import grammar_of_answer
from services.router.answer.parser import AnswerParser
from services.router.answer.parts import AnswerParts
from services.router.answer.text import AnswerText
from services.router.turn.tools import ToolOffer
from tests.unit.model.tool_templates import KINDS

DEMO = Path(__file__).parents[3] / "demo" / "model"
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "boolean"}},
}
NONE = {"type": "object", "properties": {}}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": CITY, "add": ADD, "now": NONE}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
)
WALKS = 12
STEPS = 3000


class Model:
    """A family's tokenizer and formats, and its grammars."""

    def __init__(self, folder: Path, thinking: Thinking | None = None) -> None:
        self.tokenizer = Tokenizer.read(folder)
        calls = call_format(ChatTemplate.read(folder, self.tokenizer))
        self.form = AnswerFormat.of(self.tokenizer, thinking=thinking, calls=calls)
        self._vocabulary = Vocabulary(self.tokenizer)

    @property
    def end(self) -> int:
        return min(self.tokenizer.eos_ids)

    def tokens(self, text: str) -> list[int]:
        """Of an answer in which the marks that are control tokens are spelled."""
        found: list[int] = []
        ids = {name: token for token, name in self.form.control_marks.items()}
        while text:
            at, name = min(((text.find(name), name) for name in ids if name in text), default=(len(text), ""))
            found += self.tokenizer.encode_text(text[:at]) + ([ids[name]] if name else [])
            text = text[at + len(name) :]
        return found

    def grammar(self, offer: ToolOffer, content: str = "") -> Grammar:
        text = grammar_of_answer(self.form, content=content, calls=offer.held_calls())
        return self._vocabulary.compile(text)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether it may be an answer, and end there."""
        state = grammar.begin(self.tokenizer.eos_ids)
        try:
            state.advance(self.tokens(text))
        except Internal:
            return False
        mask = state.mask()
        return bool(mask[self.end // 8] >> self.end % 8 & 1)

    def drawn(self, grammar: Grammar, seed: int, begin: str = "") -> list[int]:
        """A random answer behind `begin`, with its end."""
        draw = random.Random(seed)
        state = grammar.begin(self.tokenizer.eos_ids)
        tokens = self.tokens(begin)
        state.advance(tokens)
        for _ in range(STEPS):
            mask = state.mask()
            allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
            # Half of the answers that may end do, or they would never.
            token = self.end if self.end in allowed and draw.random() < 0.5 else draw.choice(allowed)
            tokens.append(token)
            if token == self.end:
                return tokens
            state.advance([token])
        raise AssertionError(f"no end after {STEPS} tokens: {self.tokenizer.decode(tokens)[-200:]!r}")

    def read(
        self, offer: ToolOffer, tokens: list[int], *, cut: bool = False
    ) -> tuple[AnswerParts, str | None]:
        """As the router reads an answer, and its finish reason. `cut`: at the end of these tokens."""
        ids = map("call-{}".format, itertools.count())
        parser = AnswerParser(
            self.form,
            names=offer.callable_names,
            new_id=lambda: next(ids),
            held_to_calls=offer.held,
            only_calls=offer.forced,
            text_names=offer.texts,
        )
        answer = AnswerText(
            self.tokenizer,
            stops=(),
            stop_ids=self.tokenizer.eos_ids,
            parser=parser,
            called=offer.finish_reason,
        )
        reason = None
        for at, token in enumerate(tokens):
            reason = answer.push(pb.SampledToken(token=token, position=at)).reason
        return answer.parts, answer.end("length").reason if cut else reason


@pytest.fixture(scope="module", params=[*KINDS, "generic"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "generic":
        return Model(DEMO)
    folder = tmp_path_factory.mktemp(request.param)
    return Model(KINDS[request.param](folder))


def check_calls(parts: AnswerParts) -> None:
    for call in parts.calls:
        schema = SCHEMAS[call.name] | {"additionalProperties": False}
        jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), ("named", "stop")], ids=["required", "named"]
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_answer_is_calls_and_nothing_else(
    model: Model, choice: str, reason: str, parallel: bool
) -> None:
    named = "add" if choice == "named" else ""
    offer = ToolOffer(definitions=TOOLS, choice=choice, named=named, parallel=parallel)
    grammar = model.grammar(offer)
    counts, names = set(), set()
    for seed in range(WALKS):
        parts, ended = model.read(offer, model.drawn(grammar, seed))
        assert parts.calls
        assert not parts.content
        assert ended == reason
        check_calls(parts)
        counts.add(len(parts.calls))
        names |= {call.name for call in parts.calls}
    assert (max(counts) > 1) == (parallel and not named)
    assert names == ({"add"} if named else set(SCHEMAS))


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_cut_answer_has_nothing_of_calls_in_its_content(model: Model, choice: str) -> None:
    """Wherever it is cut; of a call that has begun there is a beginning of its arguments."""
    offer = ToolOffer(definitions=TOOLS, choice=choice, strict=frozenset(SCHEMAS))
    assert model.form.calls is not None
    begin = model.form.calls.opening if choice == "auto" else ""
    tokens = model.drawn(model.grammar(offer), 3, begin)
    whole, _ = model.read(offer, tokens)
    for end in range(1, len(tokens)):
        parts, reason = model.read(offer, tokens[:end], cut=True)
        assert reason == "length"
        assert not parts.content or (choice == "auto" and not parts.calls and begin.startswith(parts.content))
        for call, expected in zip(parts.calls, whole.calls, strict=False):
            assert call.name == expected.name
            assert expected.arguments.startswith(call.arguments)


@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_that_may_call_is_words_and_then_calls(model: Model, parallel: bool) -> None:
    strict = frozenset(SCHEMAS)
    offer = ToolOffer(definitions=TOOLS, parallel=parallel, strict=strict)
    grammar = model.grammar(offer)
    assert model.accepts(grammar, "It is sunny in Rome.")
    form = model.form.calls
    assert form is not None
    begin = "" if form.bare else "I look it up.\n"
    counts = set()
    for seed in range(WALKS):
        tokens = model.drawn(grammar, seed, f"{begin}{form.opening}")
        parts, ended = model.read(offer, tokens)
        assert parts.calls
        assert parts.content == begin.rstrip()
        assert ended == "tool_calls"
        check_calls(parts)
        counts.add(len(parts.calls))
    assert (max(counts) > 1) == parallel


# Of tools whose input is text: grammars, and expressions that match the same. Nothing tells where the second
# ends but the end of the answer, and what the third allows is JSON, too.
TEXTS: dict[str, tuple[str, str]] = {
    "patch": (
        'start: "*** Begin\\n" line+ "*** End"\nline: SIGN /[^\\n]{0,9}/ "\\n"\nSIGN: "+" | "-"',
        r"\*\*\* Begin\n([+-][^\n]{0,9}\n)+\*\*\* End",
    ),
    "any": (r"start: /(.|\n){1,20}/", r"(.|\n){1,20}"),
    "sum": ('start: INT (SP "+" SP INT)*\nSP: " "\n%import common.INT', r"[0-9]+( \+ [0-9]+)*"),
    "object": (r"start: /[{}\[\]\"\\\\,]{1,9}/", r'[{}\[\]"\\,]{1,9}'),
}
TEXT_TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in TEXTS
)


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_input_of_a_text_tool_keeps_to_its_grammar(model: Model, choice: str, parallel: bool) -> None:
    """As it is: quotes and lines in it are not escaped, nor is anything in it the end of the call."""
    form = model.form.calls
    assert form is not None
    named = "patch" if choice == "named" else ""
    texts = {name: grammar for name, (grammar, _) in TEXTS.items()}
    tools = (*TOOLS, *TEXT_TOOLS)
    strict = frozenset(SCHEMAS)
    offer = ToolOffer(
        definitions=tools, choice=choice, named=named, parallel=parallel, strict=strict, texts=texts
    )
    grammar = model.grammar(offer)
    found: list[list[str]] = []
    for seed in range(3 * WALKS):
        tokens = model.drawn(grammar, seed, form.opening if choice == "auto" else "")
        parts, ended = model.read(offer, tokens)
        assert parts.calls
        assert not parts.content
        assert ended == offer.finish_reason
        for at, call in enumerate(parts.calls):
            if call.name in TEXTS:
                given = json.loads(call.arguments)["input"]
                assert re.fullmatch(TEXTS[call.name][1], given), (call.name, given)
                assert at == len(parts.calls) - 1
        found.append([call.name for call in parts.calls])
    last = {names[-1] for names in found}
    assert last == {"patch"} if named else (last & TEXTS.keys() and last - TEXTS.keys())
    assert max(map(len, found)) == 1 or (parallel and not named)


def test_the_input_of_a_text_tool_is_given_as_far_as_it_came(model: Model) -> None:
    form = model.form.calls
    assert form is not None
    texts = {"any": TEXTS["any"][0]}
    offer = ToolOffer(definitions=TEXT_TOOLS[1:2], choice="required", texts=texts)
    tokens = model.drawn(model.grammar(offer), 5)
    whole = json.loads(model.read(offer, tokens)[0].calls[0].arguments)["input"]
    for end in range(1, len(tokens)):
        parts, reason = model.read(offer, tokens[:end], cut=True)
        assert (reason, parts.content) == ("length", "")
        for call in parts.calls:
            given = json.loads(call.arguments)["input"].rstrip("\ufffd")  # half of a character
            assert whole.startswith(given)


def test_without_strict_arguments_are_any_object(model: Model) -> None:
    form = model.form.calls
    assert form is not None
    offer = ToolOffer(definitions=TOOLS[:1], parallel=False)
    for allowed, strict in ((True, frozenset[str]()), (False, frozenset(("weather",)))):
        grammar = model.grammar(ToolOffer(definitions=TOOLS[:1], parallel=False, strict=strict))
        written = {
            "hermes": '<tool_call>\n{"name": "weather", "arguments": {"x": [1, null]}}\n</tool_call>',
            "generic": '<tool_call>\n{"name": "weather", "arguments": {"x": [1, null]}}\n</tool_call>',
            "llama3": '{"name": "weather", "parameters": {"x": [1, null]}}',
            "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"x": [1, null]}}]',
        }[form.name]
        assert model.accepts(grammar, written) is allowed
    assert model.read(offer, [*model.tokens(written), model.end])[0].calls[0].arguments == '{"x": [1, null]}'


def test_content_has_its_grammar_beside_calls(model: Model) -> None:
    content = sources.of_schema(ADD, param="response_format")
    strict = frozenset(SCHEMAS)
    grammar = model.grammar(ToolOffer(definitions=TOOLS, strict=strict), content)
    assert model.accepts(grammar, '{"a": true, "b": false}')
    assert not model.accepts(grammar, "It is sunny.")
    form = model.form.calls
    assert form is not None
    called = model.drawn(grammar, 1, form.opening)  # a family that needs no mark needs it beside JSON
    parts, reason = model.read(ToolOffer(definitions=TOOLS, strict=strict), called)
    assert parts.calls
    assert (parts.content, reason) == ("", "tool_calls")
    forced = model.grammar(ToolOffer(definitions=TOOLS, choice="required"), content)
    assert not model.accepts(forced, '{"a": true, "b": false}')


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("control", [True, False])
def test_a_grammar_begins_behind_the_thinking(opened: bool, control: bool) -> None:
    # With marks that the tokenizer has as control tokens, and with ones that it spells.
    marks = ("<|im_start|>", "<|endoftext|>") if control else ("<think>", "</think>")
    model = Model(DEMO, Thinking(begin=marks[0], end=marks[1], opened=opened))
    offer = ToolOffer(definitions=TOOLS, choice="required")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    begin = "" if opened else marks[0]
    thought = f"{begin}\nShall I write <tool_call>? Yes.\n{marks[1]}\n\n"
    grammars: dict[str, Callable[[str], bool]] = {}
    for name, made in {
        "calls": model.grammar(offer),
        "words": model.grammar(ToolOffer(definitions=TOOLS, parallel=False)),
        "content": model.grammar(ToolOffer(), sources.of_choices(["yes"], param="x")),
    }.items():
        grammars[name] = lambda text, made=made: model.accepts(made, text)  # type: ignore[misc]
    assert grammars["calls"](thought + call)
    assert grammars["calls"](call) is not opened
    assert grammars["words"](thought + call)
    assert grammars["words"](thought + "It is noon.")
    assert grammars["content"](thought + "yes")
    assert grammars["content"]("yes") is not opened
    for held in grammars.values():
        assert not held(thought + call + call)
        assert not held(thought[: len(thought) // 2])
    parts, reason = model.read(offer, [*model.tokens(thought + call), model.end])
    assert parts.reasoning == "Shall I write <tool_call>? Yes."
    assert [one.name for one in parts.calls] == ["now"]
    assert reason == "tool_calls"


def test_nothing_is_held_without_need() -> None:
    model = Model(DEMO)
    for offer in (
        ToolOffer(),
        ToolOffer(definitions=TOOLS),
        ToolOffer(definitions=TOOLS, choice="none", parallel=False, strict=frozenset(("add",))),
        ToolOffer(parallel=False),
    ):
        assert offer.held_calls() is None
        assert grammar_of_answer(model.form, content="", calls=None) == ""
    assert grammar_of_answer(model.form, content="start: x", calls=None) == "start: x"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema.json"}}},
        {"type": "object", "description": "x" * 70_000},
    ],
)
def test_a_schema_that_no_grammar_is_made_of_names_its_function(schema: dict[str, Any]) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema}}
    with pytest.raises(InvalidInput, match=r"tools\[3\]\.function\.parameters") as refused:
        ToolOffer(definitions=(*TOOLS, bad), choice="required").held_calls()
    assert refused.value.param == "tools[3].function.parameters"
    # One that nothing holds is the client's business.
    assert ToolOffer(definitions=(*TOOLS, bad), choice="named", named="add").held_calls() is not None
