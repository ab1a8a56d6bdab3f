"""From an answer's text, as it comes, to its parts. Pure: each character is looked at a bounded number of
times, however long the answer is.

Marks that are control tokens of the model come as such, and no text is taken for them. A call becomes a part
once it is whole, for what turns out to be no call is content, as the model wrote it; where a grammar holds
the answer to whole calls, they come piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum, auto

from services.router.answer.formats import AnswerFormat
from services.router.answer.parts import CallArguments, CallBegun, Content, Part, Reasoning, joined
from services.router.answer.scanner import CallScanner

TEXT_INPUT = "input"  # the one field of the arguments of a call whose input is text
_PLAIN = AnswerFormat()
_LINE_END = "\n"
_NAME_CHARS_MAX = 256  # of a call's name, and what may stand behind it


class _In(Enum):
    """Where in the answer the text is."""

    BEGINNING = auto()  # before thinking, a bare call, or content
    REASONING = auto()
    CONTENT = auto()
    NAME = auto()  # of a call, before its arguments
    LIST = auto()  # between the calls of a list
    CALL = auto()
    BEHIND_CALL = auto()
    TEXT_CALL = auto()  # in the input of a call that is text, to the answer's end


class AnswerParser:
    """`push` its text and `mark` its control tokens in order, then `finish`; each gives the parts that are
    certain by then. `calls`: how many there were."""

    def __init__(
        self,
        form: AnswerFormat = _PLAIN,
        *,
        names: Collection[str] = (),
        new_id: Callable[[], str] = str,
        held_to_calls: bool = False,
        only_calls: bool = False,
        text_names: Collection[str] = (),
    ) -> None:
        """`names`: of the tools that may be called; empty: no calls are looked for. `new_id`: of a call.
        `held_to_calls`: a grammar holds the answer's calls. `only_calls`: and there is nothing else in it.
        `text_names`: of those tools whose input is text, as their grammar has it."""
        self.calls = 0
        self.control_marks = form.control_marks
        self._thinking = form.thinking
        self._format = form.calls if names else None
        self._names = frozenset(names)
        self._new_id = new_id
        self._streams = held_to_calls
        self._only_calls = only_calls
        self._text_names = frozenset(text_names)
        self._in = _In.BEGINNING
        if self._thinking is not None and self._thinking.opened:
            self._in = _In.REASONING
        elif self._thinking is None and self._format is None:
            self._in = _In.CONTENT
        marks = {*(form.thinking.marks if form.thinking else ()), *(form.calls.marks if form.calls else ())}
        self._spelled = marks - {*form.control_marks.values()}
        self._held = ""  # not decided yet; bounded by the longest mark, or name
        self._space: list[str] = []  # white space that is part of the answer only if something follows
        self._begun = False  # some reasoning was given
        self._dropping = False  # white space at the beginning: it stands behind the reasoning
        self._raw: list[str] = []  # of a call, from its opening on
        self._scanner = CallScanner()
        self._shown = False  # the call that is being read was begun
        self._listed = False  # within a list of calls
        self._expects_call = False  # a call has to come next there

    def push(self, text: str) -> list[Part]:
        """The answer's next text."""
        return self._advance(text, at_end=False)

    def mark(self, name: str) -> list[Part]:
        """A control token that marks a part."""
        parts = self._advance("", at_end=True)
        return [*parts, *self._marked(name)]

    def finish(self, *, cut: bool) -> list[Part]:
        """The answer ended; `cut` before the model ended it."""
        parts = self._advance("", at_end=True)
        if self._in is _In.TEXT_CALL:
            arguments = json.dumps({TEXT_INPUT: "".join(self._raw)}, ensure_ascii=False)
            parts.append(CallArguments(self.calls - 1, arguments))
        if self._in in (_In.NAME, _In.LIST, _In.CALL):
            parts += self._unfinished(cut)
        if self._in in (_In.BEGINNING, _In.CONTENT) and self._space:
            parts.append(Content("".join(self._space)))
        if cut and self._streams and (self._only_calls or self.calls):
            # Of a call of which too little came.
            parts = [part for part in parts if not isinstance(part, Content)]
        return list(joined(parts))

    def _advance(self, text: str, *, at_end: bool) -> list[Part]:
        """`at_end`: nothing that begins a mark goes on behind this text."""
        rest, self._held = self._held + text, ""
        parts: list[Part] = []
        while rest:
            match self._in:
                case _In.BEGINNING:
                    rest = self._beginning(rest, at_end)
                case _In.REASONING:
                    rest = self._reasoning(rest, at_end, parts)
                case _In.CONTENT:
                    rest = self._content(rest, at_end, parts)
                case _In.NAME:
                    rest = self._name(rest, at_end, parts)
                case _In.LIST:
                    rest = self._list(rest, parts)
                case _In.CALL:
                    rest = self._call(rest, at_end, parts)
                case _In.BEHIND_CALL:
                    rest = self._behind_call(rest, at_end)
                case _In.TEXT_CALL:
                    self._raw.append(rest)
                    rest = ""
        return list(joined(parts))

    def _marked(self, name: str) -> list[Part]:
        """What is not expected where it stands says nothing, as other control tokens do."""
        parts: list[Part] = []
        thinking, form = self._thinking, self._format
        if thinking is not None and name == thinking.begin and self._in is _In.BEGINNING:
            self._think()
        elif thinking is not None and name == thinking.end and self._in is _In.REASONING:
            self._thought()
        elif form is None or self._in in (_In.REASONING, _In.TEXT_CALL):
            pass
        elif name == form.before_arguments and self._in is _In.NAME:
            self._named(self._held, "", parts)
            self._held = ""
        else:
            if self._in in (_In.NAME, _In.CALL):
                parts += self._malformed()
            if name == form.opening:
                self._open("")
        return parts

    def _beginning(self, text: str, at_end: bool) -> str:
        rest = text.lstrip()
        if not self._dropping:
            self._space.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        begin = self._thinking.begin if self._thinking is not None and not self._dropping else ""
        if begin and begin in self._spelled:
            if rest.startswith(begin):
                self._think()
                return rest[len(begin) :]
            if begin.startswith(rest) and not at_end:
                self._held = rest
                return ""
        if self._format is not None and self._format.bare and rest[0] == "{":
            self._open("".join(self._space))
        else:
            self._in = _In.CONTENT
        return rest

    def _reasoning(self, text: str, at_end: bool, parts: list[Part]) -> str:
        assert self._thinking is not None
        before, found, rest = self._until(self._thinking.end, text, at_end)
        if not self._begun:
            before = before.lstrip(_LINE_END)
        shown = before.rstrip(_LINE_END)
        if shown:
            parts.append(Reasoning("".join(self._space) + shown))
            self._space.clear()
            self._begun = True
        self._space.append(before[len(shown) :])
        if found:
            self._thought()
        return rest

    def _content(self, text: str, at_end: bool, parts: list[Part]) -> str:
        if self._format is None:
            parts.append(Content("".join(self._space) + text))
            self._space.clear()
            return ""
        before, found, rest = self._until(self._format.opening, text, at_end)
        shown = before.rstrip()
        if shown:
            parts.append(Content("".join(self._space) + shown))
            self._space.clear()
        self._space.append(before[len(shown) :])
        if found:
            self._open("".join(self._space) + found)
        return rest

    def _name(self, text: str, at_end: bool, parts: list[Part]) -> str:
        assert self._format is not None
        mark = self._format.before_arguments
        if mark in self._spelled:
            name, found, rest = text.partition(mark)
        else:
            name, found, rest = text, "", ""
        if found:
            self._named(name, found, parts)
            return rest
        if len(name) <= _NAME_CHARS_MAX:
            self._held = name
            return ""
        self._raw.append(name)
        parts += self._malformed()
        return ""

    def _named(self, name: str, mark: str, parts: list[Part]) -> None:
        self._raw += (name, mark)
        # Some write the call's id behind the name.
        known = name.partition("[")[0].strip()
        if known in self._names:
            self._begin_call(known)
        else:
            parts += self._malformed()

    def _list(self, text: str, parts: list[Part]) -> str:
        """Before the list, or between its calls."""
        rest = text.lstrip()
        self._raw.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        if rest[0] == "{" and (self._expects_call or not self._listed):
            self._begin_call()
            return rest
        if rest[0] == ("," if self._listed else "["):
            self._raw.append(rest[0])
            self._listed = self._expects_call = True
            return rest[1:]
        if rest[0] == "]" and self._listed:
            self._in = _In.BEHIND_CALL
            return rest[1:]
        parts += self._malformed()
        return rest

    def _call(self, text: str, at_end: bool, parts: list[Part]) -> str:
        scanner = self._scanner
        for name in self._text_names:
            before, begun = self._before_text(name), scanner.text + text
            if before and before.startswith(begun) and begun != before:
                self._held = "" if at_end else text  # where the answer is cut there, no call has begun
                return ""
            if before and begun.startswith(before):
                self._show(name, parts)
                self._in, self._raw = _In.TEXT_CALL, []
                return begun[len(before) :]
        read = scanner.push(text)
        if scanner.failed:
            parts += self._malformed()
        elif scanner.done:
            self._accept(parts)
        elif self._streams:
            self._show_call(parts)
        return text[read:]

    def _before_text(self, name: str) -> str:
        """What stands before the input of such a call, from where the call's object would begin."""
        assert self._format is not None
        named_before = bool(self._format.before_arguments)
        return "" if named_before and self._scanner.name != name else self._format.before_text(name)

    def _behind_call(self, text: str, at_end: bool) -> str:
        assert self._format is not None
        rest, form = text.lstrip(), self._format
        for mark in (form.closing, form.separator):
            if mark and mark not in self.control_marks.values():
                if rest.startswith(mark):
                    return rest[len(mark) :]
                if mark.startswith(rest):  # where the answer is cut there, it is no content either
                    self._held = "" if at_end else rest
                    return ""
        if rest and form.bare and rest[0] == "{":
            self._open("")
        elif rest:
            self._in = _In.CONTENT
        return rest

    def _until(self, mark: str, text: str, at_end: bool) -> tuple[str, str, str]:
        """What stands before a mark, the mark, and what is behind it; what may become it is held."""
        if mark not in self._spelled:
            return text, "", ""
        before, found, rest = text.partition(mark)
        if found or at_end:
            return before, found, rest
        held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], "", ""

    def _think(self) -> None:
        self._in, self._begun = _In.REASONING, False
        self._space.clear()

    def _thought(self) -> None:
        self._in, self._dropping = _In.BEGINNING, True
        self._space.clear()

    def _open(self, raw: str) -> None:
        """A call, or a list of them, begins. `raw`: what stands for it where it turns out to be none."""
        assert self._format is not None
        self._raw = [raw]
        self._space.clear()
        self._listed = self._expects_call = False
        if self._format.before_arguments:
            self._in = _In.NAME
        elif self._format.listed:
            self._in = _In.LIST
        else:
            self._begin_call()

    def _begin_call(self, name: str | None = None) -> None:
        self._in, self._scanner, self._shown = _In.CALL, CallScanner(name), False

    def _show_call(self, parts: list[Part]) -> None:
        """As far as it is there."""
        scanner = self._scanner
        if not self._shown and scanner.name in self._names and scanner.in_arguments:
            self._show(scanner.name or "", parts)
        if self._shown and (text := scanner.take_arguments()):
            parts.append(CallArguments(self.calls - 1, text))

    def _show(self, name: str, parts: list[Part]) -> None:
        parts.append(CallBegun(self.calls, self._new_id(), name))
        self._shown = True
        self.calls += 1

    def _accept(self, parts: list[Part]) -> None:
        """A call that is whole, if it is one."""
        assert self._format is not None
        if self._shown:
            self._show_call(parts)
        else:
            found = self._scanner.call()
            if found is None or found[0] not in self._names:
                parts += self._malformed()
                return
            self._show(found[0], parts)
            parts.append(CallArguments(self.calls - 1, found[1]))
        self._raw.clear()
        self._expects_call = False
        self._in = _In.LIST if self._listed else _In.BEHIND_CALL

    def _malformed(self) -> list[Part]:
        """What was taken for a call is content."""
        text = "".join(self._raw) + (self._scanner.text if self._in is _In.CALL else "") + self._held
        self._held = ""
        self._in = _In.CONTENT
        return [Content(text)] if text and not self._shown else []

    def _unfinished(self, cut: bool) -> list[Part]:
        """The answer ended in a call."""
        parts: list[Part] = []
        scanner = self._scanner
        if self._in is _In.CALL and cut and scanner.name in self._names and scanner.in_arguments:
            self._show_call(parts)
        elif not (cut and self._streams) and (self._in is not _In.LIST or not self.calls):
            parts += self._malformed()
        return parts
