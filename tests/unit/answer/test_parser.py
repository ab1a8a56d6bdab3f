"""An answer's text to its parts: whatever pieces it comes in, and whatever a model makes of the format."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from kvcommons.model.chat import Thinking
from services.router.answer.formats import (
    GENERIC,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    AnswerFormat,
    CallFormat,
)
from services.router.answer.parser import AnswerParser
from services.router.answer.parts import (
    AnswerParts,
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
    joined,
)

NAMES = ("weather", "add")
WEATHER = ("weather", '{"city": "Mün\\"chen}", "days": [1, {"a": null}]}')
ADD = ("add", '{"a": 1, "b": -2.5e3}')
THINKS = Thinking(begin="<think>", end="</think>", opened=False)
OPENED = replace(THINKS, opened=True)


def written(form: CallFormat, *calls: tuple[str, str]) -> str:
    """As the family's models write calls."""
    objects = [f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}' for name, arguments in calls]
    if form.listed:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if form.before_arguments:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    if form.bare:
        return "; ".join(objects)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def parser(form: CallFormat | None, thinking: Thinking | None = None, **options: bool) -> AnswerParser:
    ids = map("call-{}".format, itertools.count())
    answer = AnswerFormat(calls=form, thinking=thinking)
    return AnswerParser(answer, names=NAMES if form else (), new_id=lambda: next(ids), **options)


def parsed(
    one: AnswerParser, text: str, draw: random.Random | None = None, *, cut: bool = False
) -> list[Part]:
    """In pieces of some characters, or whole."""
    parts: list[Part] = []
    at = 0
    while at < len(text):
        size = draw.randint(1, 7) if draw is not None else len(text)
        parts += one.push(text[at : at + size])
        at += size
    return list(joined([*parts, *one.finish(cut=cut)]))


def collected(parts: list[Part]) -> AnswerParts:
    found = AnswerParts()
    found.add(parts)
    return found


@pytest.mark.parametrize(
    "form", [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, GENERIC], ids=lambda form: form.name
)
@pytest.mark.parametrize("calls", [(WEATHER,), (ADD, WEATHER)], ids=["one", "two"])
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_calls_of_each_family(form: CallFormat, calls: tuple[tuple[str, str], ...], held: bool) -> None:
    """Arguments as the model wrote them, to the character."""
    expected: list[Part] = []
    for index, (name, arguments) in enumerate(calls):
        expected += [CallBegun(index, f"call-{index}", name), CallArguments(index, arguments)]
    for seed in range(40):
        draw = random.Random(seed) if seed else None
        one = parser(form, held_to_calls=held)
        assert parsed(one, written(form, *calls), draw) == expected
        assert one.calls == len(calls)


CALLS = [
    (HERMES, "Let me see.\n\n" + written(HERMES, ADD), "Let me see.", 1),
    (HERMES, written(HERMES, ADD) + " Done.\n", "Done.\n", 1),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", 1),
    (HERMES, '<tool_call>{"id": "x", "type": "function", "name": "add"}</tool_call>', "", 1),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", 1),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}', "", 1),  # the end is missing
    (LLAMA3, "<|python_tag|>" + written(LLAMA3, ADD), "", 1),
    (LLAMA3, "\n " + written(LLAMA3, ADD), "", 1),
    (MISTRAL, 'I add.[TOOL_CALLS]{"name": "add", "arguments": {}}', "I add.", 1),
    (MISTRAL_NAMED, "[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}", "", 1),
    # What is no call is content, as it was written.
    (HERMES, "a < b and <tool_cal> too \n", "a < b and <tool_cal> too \n", 0),
    (HERMES, "ends with <tool_c", "ends with <tool_c", 0),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', None, 0),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, 0),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, 0),
    (HERMES, '<tool_call>{"name": "add", "arguments": "no"}</tool_call>', None, 0),
    (HERMES, '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>', None, 0),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, 0),
    (HERMES, '<tool_call>{"what": "add"}</tool_call>', None, 0),
    (HERMES, "x <tool_call>add(1)</tool_call>", None, 0),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', None, 0),
    (HERMES, "<tool_call>", None, 0),
    (LLAMA3, '{"city": "Rome"} is JSON', None, 0),
    (LLAMA3, 'It is {"name": "add", "parameters": {}}', None, 0),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {}} {', None, 1),
    (MISTRAL, "[TOOL_CALLS] nothing", None, 0),
    (MISTRAL, "[TOOL_CALLS] [", None, 0),
    (MISTRAL_NAMED, "[TOOL_CALLS]rm[ARGS]{}", None, 0),
    (MISTRAL_NAMED, "[TOOL_CALLS]" + "a" * 300 + "[ARGS]{}", None, 0),
    (MISTRAL_NAMED, "[TOOL_CALLS]add", None, 0),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_what_is_a_call_and_what_is_content(
    form: CallFormat, text: str, content: str | None, calls: int
) -> None:
    """`content` None: the whole text, where there is no call."""
    for seed in range(30):
        found = collected(parsed(parser(form), text, random.Random(seed) if seed else None))
        assert len(found.calls) == calls
        if content is not None:
            assert found.content == content
        elif not calls:
            assert found.content == text


def test_a_call_behind_one_that_is_none() -> None:
    text = '<tool_call>{"nam": 1}</tool_call>\n' + written(HERMES, ADD)
    found = collected(parsed(parser(HERMES), text))
    assert found.content == '<tool_call>{"nam": 1}</tool_call>'
    assert [(call.name, call.arguments) for call in found.calls] == [ADD]


def test_random_texts_lose_nothing() -> None:
    """Without a whole call in it, the content is the text."""
    words = [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "add"',
        '"arguments"',
        "{",
        "}",
        "\n",
        " ",
        "\\",
        '"',
    ]
    for seed in range(400):
        draw = random.Random(seed)
        text = "".join(draw.choice(words) for _ in range(draw.randint(0, 12)))
        found = collected(parsed(parser(HERMES), text, draw))
        assert found.calls or found.content == text, text


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED], ids=lambda form: form.name)
def test_a_call_that_is_cut(form: CallFormat) -> None:
    """At `length` a call whose arguments have begun is given as far as it came; what is less is content."""
    whole = written(form, ADD)
    for end in range(len(whole)):
        text = whole[:end]
        found = collected(parsed(parser(form), text, cut=True))
        if found.calls:
            assert found.content == ""
            assert found.calls[0].name == "add"
            assert ADD[1].startswith(found.calls[0].arguments)
        else:
            assert found.content.strip() == text.strip()
            assert '{"a' not in text
        stopped = collected(parsed(parser(form), text))
        assert not stopped.calls or stopped.calls[0].arguments == ADD[1]
    cut = collected(parsed(parser(form), whole[: whole.index(', "b"')], cut=True))
    assert [(call.name, call.arguments) for call in cut.calls] == [("add", '{"a": 1')]


def test_a_call_that_a_grammar_holds_comes_piece_by_piece() -> None:
    one = parser(HERMES, held_to_calls=True)
    pushed = [one.push(character) for character in written(HERMES, ADD)]
    pieces = [part for parts in pushed for part in parts]
    assert pieces[0] == CallBegun(0, "call-0", "add")
    assert all(isinstance(part, CallArguments) and len(part.text) == 1 for part in pieces[1:])
    assert collected(pieces).calls[0].arguments == ADD[1]


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (THINKS, "<think>\nhm, 1 < 2\n\n</think>\n\nYes.\n", "hm, 1 < 2", "Yes.\n"),
        (THINKS, "\n<think></think>Yes.", "", "Yes."),
        (THINKS, "No <think>thought</think>.", "", "No <think>thought</think>."),
        (THINKS, " plain\n", "", " plain\n"),
        (THINKS, "<thin", "", "<thin"),
        (THINKS, "<think>\nonly </thin", "only </thin", ""),
        (OPENED, "hm\n</think>\n\nYes </think>", "hm", "Yes </think>"),
        (OPENED, "\ncut", "cut", ""),
        (None, "<think>x</think>", "", "<think>x</think>"),
    ],
)
def test_thinking(thinking: Thinking | None, text: str, reasoning: str, content: str) -> None:
    for form, seed in itertools.product((None, HERMES), range(20)):
        found = collected(parsed(parser(form, thinking), text, random.Random(seed) if seed else None))
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, ())


def test_thinking_before_a_call() -> None:
    for form in (HERMES, LLAMA3):
        text = "<think>\nI add: <tool_call> {\n</think>\n\n" + written(form, ADD)
        for seed in range(20):
            parts = parsed(parser(form, THINKS), text, random.Random(seed))
            assert parts[0] == Reasoning("I add: <tool_call> {")
            assert parts[1:] == [CallBegun(0, "call-0", "add"), CallArguments(0, ADD[1])]


def test_marks_that_are_control_tokens_come_as_such_only() -> None:
    """Text that spells them is text."""
    form = AnswerFormat(
        calls=MISTRAL, thinking=THINKS, control_marks={1: "[TOOL_CALLS]", 2: "<think>", 3: "</think>"}
    )
    one = AnswerParser(form, names=NAMES, new_id=lambda: "id")
    text = "<think>" + written(MISTRAL, ADD)
    assert parsed(one, text) == [Content(text)]
    one = AnswerParser(form, names=NAMES, new_id=lambda: "id")
    parts = [*one.mark("<think>"), *one.push("hm</think>\n"), *one.mark("</think>"), *one.push("\nI see. ")]
    parts += [
        *one.mark("[TOOL_CALLS]"),
        *one.push('[{"name": "add", "arguments": {}}]'),
        *one.finish(cut=False),
    ]
    assert list(joined(parts)) == [
        Reasoning("hm</think>"), Content("I see."), CallBegun(0, "id", "add"), CallArguments(0, "{}"),
    ]  # fmt: skip


def test_a_long_answer_takes_time_for_its_new_text_only() -> None:
    """Four times the text, about four times the time: in single characters, in a call and out of it."""

    def seconds(count: int, prefix: str, filler: str, suffix: str) -> float:
        one = parser(HERMES, THINKS)
        began = time.thread_time()
        for character in prefix:
            one.push(character)
        for _ in range(count):
            one.push(filler)
        for character in suffix:
            one.push(character)
        one.finish(cut=False)
        return time.thread_time() - began

    call = '<tool_call>{"name": "add", "arguments": {"a": "'
    for prefix, filler, suffix in (("", "x", ""), (call, "x", '"}}'), ("", "\n", ""), ("<think>", "\n", "")):
        few = min(seconds(10_000, prefix, filler, suffix) for _ in range(3))
        many = min(seconds(40_000, prefix, filler, suffix) for _ in range(3))
        assert many < 10 * few, (prefix, filler)
