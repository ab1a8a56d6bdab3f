"""Chat templates: messages to token ids (sandboxed Jinja2, no torch).

Templates are read as `transformers` reads them: chat_template.jinja, or the entry of tokenizer_config.json.
They come from a folder and are not trusted; what users write is not trusted either (see `Tokenizer`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from kvcommons.errors import InvalidInput
from kvcommons.model.folder import read_json
from kvcommons.model.templating import compile_template
from kvcommons.model.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Options = Mapping[str, Any]  # further variables of a template, as `enable_thinking`

# What a template can raise on messages that it was not written for.
_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


# Of the render itself: no option is one of them.
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_NO_OPTIONS: Options = {}
# With which models mark what they think.
_THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a model marks what it thinks before it answers. `opened`: the prompt ends with `begin`."""

    begin: str
    end: str
    opened: bool

    @property
    def marks(self) -> tuple[str, str]:
        return self.begin, self.end


def template_source(folder: Path) -> str | None:
    """A folder's Jinja template; None where it has none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    return source if source is None else str(source)


class ChatTemplate:
    """A folder's chat template with its tokenizer. Thread-safe."""

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`source`: the Jinja template, None where there is none. `now`: templates may print the date."""
        self._tokenizer = tokenizer
        self._source = source or ""
        self._template: jinja2.Template | None = None
        names: frozenset[str] = frozenset()
        if source is not None:
            self._template, names = compile_template(source, now)
        self.options = names - _RESERVED - tokenizer.named_tokens.keys()  # that requests may set

    @classmethod
    def read(
        cls, folder: Path, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """A folder without a template gives one whose `prompt` raises InvalidInput."""
        return cls(template_source(folder), tokenizer, now=now)

    @cached_property
    def end_of_turn(self) -> int | None:
        """The control token with which the template ends an answer, if it has one."""
        sentinel = "answer" + _nonce([])
        question = [{"role": "user", "content": "question"}, {"role": "assistant", "content": sentinel}]
        try:
            rendered = self._render(question, opened=False)
        except InvalidInput:
            return None
        after = rendered.rpartition(sentinel)[2] if sentinel in rendered else ""
        found = self._tokenizer.control_pattern.match(after.lstrip())
        return self._tokenizer.encode_markup(found[0])[0] if found else None

    @cached_property
    def thinking(self) -> Thinking | None:
        """Of a model whose template knows of it."""
        return self.thinking_with(_NO_OPTIONS)

    def thinking_with(self, options: Options) -> Thinking | None:
        """The same under options, which may have the prompt open the thinking, or close it."""
        for begin, end in _THINKING_MARKS:
            if self.mentions(end):
                question = [{"role": "user", "content": "question"}]
                try:
                    rendered = self._render(question, options=options, opened=True)
                except InvalidInput:
                    return None
                return Thinking(begin=begin, end=end, opened=rendered.rstrip().endswith(begin))
        return None

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system prompt."""
        asked = [{"role": "system", "content": "prompt"}, {"role": "user", "content": "question"}]
        try:
            return "prompt" in self._render(asked, opened=True)
        except InvalidInput:
            return False

    def mentions(self, text: str) -> bool:
        """Whether the template's source does."""
        return text in self._source

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokenizer's eos_ids and the token with which the template ends an answer."""
        return self._tokenizer.eos_ids | ({self.end_of_turn} if self.end_of_turn is not None else set())

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Options = _NO_OPTIONS
    ) -> list[int]:
        """Ids of all messages and the opening of the answer: a stateless call, or a session's first turn.
        `tools`: that may be called. `options`: of `self.options`, by name.

        Raises InvalidInput (param "messages") where the template refuses the messages or there is none.
        """
        return self._encode(messages, tools, options, opened=True)

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the messages alone, without an answer's opening. Raises InvalidInput as `prompt` does."""
        return self._encode(messages, tools, opened=False)

    def turn(
        self,
        history_messages: Sequence[Message],
        history_tokens: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options = _NO_OPTIONS,
    ) -> list[int]:
        """Ids to append to a session's tokens for `new_messages`. `tools`: that the session began with.
        `options`: as `prompt`.

        `history_messages` are the stored ones; with the content of the last one, an answer or what
        `unanswered` gave, the session's tokens `history_tokens` end, which are kept as they are. Empty
        history: the same as `prompt(new_messages)`. What is new is found by rendering a sentinel in place of
        that content, and of the calls behind it, and taking what follows it, from the end-of-turn token on;
        that token is left out where the answer already ended with it, or with another one that ends turns.
        """
        if not history_tokens:
            return self.prompt([*history_messages, *new_messages], tools, options)
        history = list(history_messages)
        sentinel = "answer" + _nonce([*history, *new_messages, *tools, options])
        shielded = self._shield([*_ending_in(sentinel, history), *new_messages], tools, options)
        try:
            rendered = self._render(shielded.messages, shielded.tools, shielded.options, opened=True)
        except InvalidInput:  # results of calls that are not there, to some templates
            if not (history and history[-1].get("tool_calls")):
                raise
            rendered = ""
        if rendered.count(sentinel) == 1:
            tail = rendered.partition(sentinel)[2]
            if self._tokenizer.control_pattern.match(tail.lstrip()):
                tail = tail.lstrip()  # white space that the template puts between answer and end of turn
            new = self._tokenizer.encode_markup(tail, shielded.texts_in(tail))
        else:
            new = self._rest_after_common_prefix(history, new_messages, tools, options)
        if new and self._is_there(new[0], history_tokens[-1]):
            del new[0]
        return new

    def unanswered(
        self,
        history_messages: Sequence[Message],
        history_tokens: Sequence[int],
        message: Message,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Ids to append to a session's tokens for a message that no answer follows: they end with its
        content. `tools`: as in `turn`.

        Raises InvalidInput (param "role") where the template does not leave it in its place: it refuses the
        role here, or shows the message again with later ones.
        """
        history = list(history_messages)
        nonce = _nonce([*history, message, *tools])
        before, end, answer = "before" + nonce, "end" + nonce, "answer" + nonce
        question = {"role": "user", "content": "question"}
        shown = {**message, "content": _joined(message)["content"] + end}
        stored = _ending_in(before, history) if history_tokens else history
        later = [question, {"role": "assistant", "content": answer}, question]
        shielded = self._shield([*stored, shown, *later], tools)
        try:
            rendered = self._render(shielded.messages, shielded.tools, opened=True)
        except InvalidInput as error:
            raise InvalidInput(error.message, param="role") from error
        new, found, rest = rendered.partition(end)
        if history_tokens:
            new = new.partition(before)[2]
            if self._tokenizer.control_pattern.match(new.lstrip()):
                new = new.lstrip()
        if not found or not new or end in rest or answer not in rest:
            raise InvalidInput(
                f"the model's chat template does not keep a message of the role {message['role']!r} in its "
                "place once others follow",
                param="role",
            )
        ids = self._tokenizer.encode_markup(new, shielded.texts_in(new))
        if history_tokens and ids and self._is_there(ids[0], history_tokens[-1]):
            del ids[0]
        return ids

    def _is_there(self, token: int, last: int) -> bool:
        """Whether what begins with `token` continues a session that ends with it, or whose answer ended."""
        if token in self.stop_ids and last in self.stop_ids:
            return True
        return token == last and self._tokenizer.is_control(token)

    def _rest_after_common_prefix(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], options: Options
    ) -> list[int]:
        """For templates that drop or repeat the sentinel: where renderings with and without `new` part."""
        before = self._encode(history, tools, options, opened=False)
        after = self._encode([*history, *new], tools, options, opened=True)
        common = 0
        while common < min(len(before), len(after)) and before[common] == after[common]:
            common += 1
        # The stored tokens lack what closes the last answer: go back to the token that ended it.
        for start in range(common - 1, max(common - 4, -1), -1):
            if after[start] in self.stop_ids:
                return after[start:]
        return after[common:]

    def _encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Options = _NO_OPTIONS,
        *,
        opened: bool,
    ) -> list[int]:
        shielded = self._shield(messages, tools, options)
        rendered = self._render(shielded.messages, shielded.tools, shielded.options, opened=opened)
        return self._tokenizer.encode_markup(rendered, shielded.texts_in(rendered))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options = _NO_OPTIONS,
        *,
        opened: bool,
    ) -> str:
        """`opened`: with the beginning of an answer at the end."""
        if self._template is None:
            raise InvalidInput(
                "this model has no chat template: use /v1/completions with a prompt", param="messages"
            )
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opened,
                **self._tokenizer.named_tokens,
                **options,
            )
        except _RENDER_ERRORS as error:
            raise InvalidInput(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _shield(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options = _NO_OPTIONS
    ) -> _Shielded:
        return _Shielded(messages, tools, options, self._tokenizer.control_pattern)


class _Shielded:
    """Messages, tools and options in which control texts that users typed are replaced by placeholders.

    The placeholders' number is a hash of all of them, so none can contain it.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Options,
        control: re.Pattern[str],
    ) -> None:
        self._control = control
        self._texts: dict[str, str] = {}
        self._nonce = ""
        given = [*map(_joined, messages), *tools, options]
        plain = [self._copy(one) for one in given]
        if self._texts:
            self._nonce = _nonce(given)
            self._texts.clear()
            plain = [self._copy(one) for one in given]
        self.messages: list[dict[str, Any]] = plain[: len(messages)]
        self.tools: list[dict[str, Any]] = plain[len(messages) : -1]
        self.options: dict[str, Any] = plain[-1]

    def texts_in(self, rendered: str) -> dict[str, str]:
        """Placeholder to text, of those that came through the template."""
        return {placeholder: text for placeholder, text in self._texts.items() if placeholder in rendered}

    def _copy(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {self._copy(key): self._copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise InvalidInput(f"messages hold JSON values only, not {type(value).__name__}", param="messages")

    def _replace(self, found: re.Match[str]) -> str:
        index = next((i for i, text in enumerate(self._texts.values()) if text == found[0]), len(self._texts))
        placeholder = f"typed{self._nonce}n{index}n"
        self._texts[placeholder] = found[0]
        return placeholder


def _joined(message: Message) -> Message:
    """Content in parts as one text: parts that only together spell a control token are seen that way."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInput("only parts of type text are understood in a message's content", param="messages")
    return {**message, "content": "\n".join(str(text) for text in texts)}


def _ending_in(sentinel: str, history: Sequence[Message]) -> list[Message]:
    """The stored messages with a sentinel for the content of the last one."""
    last = history[-1]["role"] if history else "assistant"
    return [*history[:-1], {"role": last, "content": sentinel}]


def _nonce(messages: Sequence[Message]) -> str:
    """Letters and digits that cannot occur in `messages`, for they hash them."""
    text = json.dumps(list(messages), sort_keys=True, default=str)
    return hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=16, person=b"kvcommons-chat"
    ).hexdigest()
