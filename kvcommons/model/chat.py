"""Chat templates: messages to token ids (sandboxed Jinja2, no torch).

Templates are read as `transformers` reads them: chat_template.jinja, or the entry of tokenizer_config.json.
They come from a folder and are not trusted; what users write is not trusted either (see `Tokenizer`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
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

# What a template can raise on messages that it was not written for.
_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """A folder's chat template with its tokenizer. Thread-safe."""

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`source`: the Jinja template, None where there is none. `now`: templates may print the date."""
        self._tokenizer = tokenizer
        self._template = compile_template(source, now) if source is not None else None

    @classmethod
    def read(
        cls, folder: Path, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """A folder without a template gives one whose `prompt` raises InvalidInput."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), tokenizer, now=now)
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default", next(iter(named.values()), None))
        return cls(source, tokenizer, now=now)

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
    def stop_ids(self) -> frozenset[int]:
        """The tokenizer's eos_ids and the token with which the template ends an answer."""
        return self._tokenizer.eos_ids | ({self.end_of_turn} if self.end_of_turn is not None else set())

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of all messages and the opening of the answer: a stateless call, or a session's first turn.

        Raises InvalidInput (param "messages") where the template refuses the messages or there is none.
        """
        return self._encode(messages, opened=True)

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages alone, without an answer's opening. Raises InvalidInput as `prompt` does."""
        return self._encode(messages, opened=False)

    def turn(
        self,
        history_messages: Sequence[Message],
        history_tokens: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int]:
        """Ids to append to a session's tokens for `new_messages`.

        `history_messages` are the stored ones; with the content of the last one, an answer or what
        `unanswered` gave, the session's tokens `history_tokens` end, which are kept as they are. Empty
        history: the same as `prompt(new_messages)`. What is new is found by rendering a sentinel in place of
        that content and taking what follows it, from the end-of-turn token on; that token is left out where
        the answer already ended with it.
        """
        if not history_tokens:
            return self.prompt([*history_messages, *new_messages])
        history = list(history_messages)
        sentinel = "answer" + _nonce([*history, *new_messages])
        shielded = self._shield([*_ending_in(sentinel, history), *new_messages])
        rendered = self._render(shielded.messages, opened=True)
        if rendered.count(sentinel) == 1:
            tail = rendered.partition(sentinel)[2]
            if self._tokenizer.control_pattern.match(tail.lstrip()):
                tail = tail.lstrip()  # white space that the template puts between answer and end of turn
            new = self._tokenizer.encode_markup(tail, shielded.texts_in(tail))
        else:
            new = self._rest_after_common_prefix(history, new_messages)
        if new and new[0] == history_tokens[-1] and self._tokenizer.is_control(new[0]):
            del new[0]
        return new

    def unanswered(
        self, history_messages: Sequence[Message], history_tokens: Sequence[int], message: Message
    ) -> list[int]:
        """Ids to append to a session's tokens for a message that no answer follows: they end with its
        content.

        Raises InvalidInput (param "role") where the template does not leave it in its place: it refuses the
        role here, or shows the message again with later ones.
        """
        history = list(history_messages)
        nonce = _nonce([*history, message])
        before, end, answer = "before" + nonce, "end" + nonce, "answer" + nonce
        question = {"role": "user", "content": "question"}
        shown = {**message, "content": _joined(message)["content"] + end}
        stored = _ending_in(before, history) if history_tokens else history
        later = [question, {"role": "assistant", "content": answer}, question]
        shielded = self._shield([*stored, shown, *later])
        try:
            rendered = self._render(shielded.messages, opened=True)
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
        if history_tokens and ids and ids[0] == history_tokens[-1] and self._tokenizer.is_control(ids[0]):
            del ids[0]
        return ids

    def _rest_after_common_prefix(self, history: Sequence[Message], new: Sequence[Message]) -> list[int]:
        """For templates that drop or repeat the sentinel: where renderings with and without `new` part."""
        before = self._encode(history, opened=False)
        after = self._encode([*history, *new], opened=True)
        common = 0
        while common < min(len(before), len(after)) and before[common] == after[common]:
            common += 1
        # The stored tokens lack what closes the last answer: go back to the token that ended it.
        for start in range(common - 1, max(common - 4, -1), -1):
            if after[start] in self.stop_ids:
                return after[start:]
        return after[common:]

    def _encode(self, messages: Sequence[Message], *, opened: bool) -> list[int]:
        shielded = self._shield(messages)
        rendered = self._render(shielded.messages, opened=opened)
        return self._tokenizer.encode_markup(rendered, shielded.texts_in(rendered))

    def _render(self, messages: Sequence[Message], *, opened: bool) -> str:
        """`opened`: with the beginning of an answer at the end."""
        if self._template is None:
            raise InvalidInput(
                "this model has no chat template: use /v1/completions with a prompt", param="messages"
            )
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=opened,
                **self._tokenizer.named_tokens,
            )
        except _RENDER_ERRORS as error:
            raise InvalidInput(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _shield(self, messages: Sequence[Message]) -> _Shielded:
        return _Shielded(messages, self._tokenizer.control_pattern)


class _Shielded:
    """Messages in which control texts that users typed are replaced by placeholders.

    The placeholders' number is a hash of all messages, so no message can contain it.
    """

    def __init__(self, messages: Sequence[Message], control: re.Pattern[str]) -> None:
        self._control = control
        self._texts: dict[str, str] = {}
        self._nonce = ""
        plain = [self._copy(_joined(message)) for message in messages]
        if self._texts:
            self._nonce = _nonce(messages)
            self._texts.clear()
            plain = [self._copy(_joined(message)) for message in messages]
        self.messages: list[dict[str, Any]] = plain

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
