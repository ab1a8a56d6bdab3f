"""The grammar of a whole answer: the model's thinking, and then what the answer is held to. Pure.

    an answer = [thinking] (content | calls)

Calls are written as the model's family writes them, their arguments by the tools' schemas. Marks that are
control tokens of the model stand in a grammar as tokens, all others as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvcommons.grammar import sources
from services.router.answer.formats import AnswerFormat, CallFormat

CALLS_MAX = 128  # of one answer; as many as a message may have that is sent back
_CONTENT = "content"  # the name of the grammar that content is held to
_ANY = "(?s:.*)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCalls:
    """Calls that a grammar holds. `arguments`: the grammar's text of each function's arguments, by its name;
    of those in `texts` they are text as it is, which ends with the answer, for whatever follows could be a
    part of it. `forced`: the answer is nothing but calls. `parallel`: there may be several."""

    arguments: Mapping[str, str]
    forced: bool
    parallel: bool
    texts: frozenset[str] = frozenset()


def grammar_of_answer(form: AnswerFormat, *, content: str, calls: HeldCalls | None) -> str:
    """`content`: the text of the grammar that the answer's content keeps to, empty where it is free."""
    if calls is None and (not content or form.thinking is None):
        return content
    rules = _Rules(form)
    answers: list[str] = []
    parts: dict[str, str] = {}
    if content and (calls is None or not calls.forced):
        parts[_CONTENT] = content
        answers.append(f"@{_CONTENT}")
    if calls is not None:
        assert form.calls is not None
        names = {name: f"arguments_{at}" for at, name in enumerate(calls.arguments)}
        parts |= {part: calls.arguments[name] for name, part in names.items()}
        answers += rules.calls(form.calls, names, calls, free=not calls.forced and not content)
    return sources.composed(rules.text(" | ".join(answers)), parts)


class _Rules:
    """In Lark's syntax, as the library reads it: an upper-case name is of a terminal."""

    def __init__(self, form: AnswerFormat) -> None:
        self._thinking = form.thinking
        self._control = {name: f"<[{token}]>" for token, name in form.control_marks.items()}
        self._rules: list[str] = []

    def text(self, answer: str) -> str:
        """Of the whole grammar."""
        start = f"({answer})"
        if self._thinking is not None:
            begin, end = self._thinking.marks
            thinking = f"{self._thoughts(end)} BLANKS"
            start = (
                f"{thinking} {start}"
                if self._thinking.opened
                else (f"({self._mark(begin)} {thinking})? {start}")
            )
            self._rules.append(r"BLANKS: /[ \n]{0,8}/")
        return "\n".join((f"start: {start}", *self._rules)) + "\n"

    def calls(self, form: CallFormat, parts: Mapping[str, str], calls: HeldCalls, *, free: bool) -> list[str]:
        """What an answer with calls may be. `parts`: the grammars of each function's arguments. `free`: it
        may be text, or begin with it."""
        opening = self._mark(form.opening)
        if form.listed:
            again = '", "'
        elif form.bare:
            again = f'"{form.separator} "'
        else:
            again = opening if form.before_arguments else f'"\\n" {opening}'
        several: list[str] = []
        if whole := [self._call(form, *one) for one in parts.items() if one[0] not in calls.texts]:
            self._rules.append("call: " + " | ".join(whole))
            repeated = f"call ({again} call){{0,{CALLS_MAX - 1}}}" if calls.parallel else "call"
            several.append(f'{repeated} "]"' if form.listed else repeated)
        if texts := [self._text_call(form, *one) for one in parts.items() if one[0] in calls.texts]:
            self._rules.append("text_call: " + " | ".join(texts))
            before = f"(call {again}){{0,{CALLS_MAX - 1}}} " if whole and calls.parallel else ""
            several.append(f"{before}text_call")
        listed = '" [" ' if form.listed else ""
        self._rules.append(f"calls: {listed}({' | '.join(several)})")
        marked = f"{opening} calls"
        if calls.forced:
            return ["calls" if form.bare else marked]
        if not free:  # JSON without a mark could be either
            return [marked]
        return [*self._with_words(form), *(("calls",) if form.bare else ())]

    def _call(self, form: CallFormat, name: str, part: str) -> str:
        """Of one function, behind the mark that opens a call."""
        if form.before_arguments:
            return f"{json.dumps(name)} {self._mark(form.before_arguments)} @{part}"
        line = "\n" if form.closing else ""
        key = json.dumps(form.arguments_key)
        before = json.dumps(f'{line}{{"name": {json.dumps(name)}, {key}: ')
        closing = f" {self._mark(form.closing)}" if form.closing else ""
        return f"{before} @{part} {json.dumps('}' + line)}{closing}"

    def _text_call(self, form: CallFormat, name: str, part: str) -> str:
        """The same of a function whose arguments are text."""
        before = f"{json.dumps(form.before_text(name))} @{part}"
        if form.before_arguments:
            return f"{json.dumps(name)} {self._mark(form.before_arguments)} {before}"
        return before

    def _with_words(self, form: CallFormat) -> list[str]:
        """Text alone, and text with calls behind it. A call without a mark is what begins with a brace."""
        any_text = r"([^{\s]" + _ANY + ")?" if form.bare else _ANY
        opening, unlike = self._mark(form.opening), self._unlike_thoughts()
        if form.opening in self._control:
            self._rules.append(f"WORDS: /{any_text}/{unlike}")
            return ["WORDS", f"WORDS {opening} calls"]
        mark = _escaped(form.opening)
        self._rules += [
            f"WORDS: /{any_text}/ & ~/{_ANY}{mark}{_ANY}/{unlike}",
            f"BEFORE: /{any_text}{mark}/{unlike}",
            "before[lazy]: BEFORE",
        ]
        return ["WORDS", "before calls"]

    def _thoughts(self, end: str) -> str:
        """Any text, and the mark where it comes first."""
        if end in self._control:
            return f"/{_ANY}/ {self._control[end]}"
        self._rules.append(f"thoughts[lazy]: /{_ANY}{_escaped(end)}/")
        return "thoughts"

    def _unlike_thoughts(self) -> str:
        """Where thoughts may come first, words do not begin as they do: an answer would be read as either."""
        thinking = self._thinking
        if thinking is None or thinking.opened or thinking.begin in self._control:
            return ""
        return f" & ~/{_escaped(thinking.begin)}{_ANY}/"

    def _mark(self, mark: str) -> str:
        return self._control.get(mark) or json.dumps(mark, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
