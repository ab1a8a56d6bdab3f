"""Conversations to token ids, as the model's tokenizer and chat template have them, and answers back to their
parts."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcommons.errors import ContextLengthExceeded, InvalidInput
from kvcommons.model.chat import ChatTemplate, Options
from kvcommons.model.tokenizer import Tokenizer
from services.router.answer.formats import AnswerFormat, CallFormat, call_format
from services.router.answer.parser import AnswerParser
from services.router.answer.tool_prompt import describe_tools
from services.router.sessions.conversation import Message, joined, leading_system
from services.router.turn.tools import NO_TOOLS, ToolOffer

# Longer texts, and more messages, are rendered and tokenized on a thread: they would hold up everybody's
# streams.
_INLINE_CHARS_MAX = 8192
_INLINE_MESSAGES_MAX = 256
# Texts of more characters a token of the window are likely too long, which is found out on their first part:
# to tokenize megabytes takes seconds, and a hundred times their size in memory.
_CHARS_PER_TOKEN = 8
# What the cut of a text may change in its number of tokens.
_CUT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The tokenizer and chat template of the model that is served. `calls`: how it writes calls of tools."""

    tokenizer: Tokenizer
    template: ChatTemplate
    calls: CallFormat
    answers: AnswerFormat

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate, *, tool_format: str = "auto") -> Text:
        """`tool_format`: as the setting. Raises InvalidInput for one that is none."""
        calls = call_format(template, tool_format)
        answers = AnswerFormat.of(tokenizer, thinking=template.thinking, calls=calls)
        return cls(tokenizer=tokenizer, template=template, calls=calls, answers=answers)

    def parser(self, tools: ToolOffer, options: Options | None = None) -> AnswerParser:
        """Of one answer of a chat."""
        return AnswerParser(
            self.answer_format(options),
            names=tools.callable_names,
            new_id=self._new_call_id,
            held_to_calls=tools.held,
            only_calls=tools.forced,
            text_names=tools.callable_names & tools.texts.keys(),
        )

    def answer_format(self, options: Options | None = None) -> AnswerFormat:
        """`options`: of the template."""
        if not options:
            return self.answers
        thinking = self.template.thinking_with(options)
        return AnswerFormat.of(self.tokenizer, thinking=thinking, calls=self.calls)

    async def chat(
        self,
        history: Sequence[Message],
        history_tokens: Sequence[int],
        new: Sequence[Message],
        *,
        tools: ToolOffer = NO_TOOLS,
        options: Options | None = None,
        window: int,
    ) -> list[int]:
        """Ids to append to `history_tokens`; of the whole prompt where there is no history. `tools`: that the
        conversation has from its beginning on. `options`: of the template.

        Raises ContextLengthExceeded for texts that are far longer than `window` tokens.
        """
        texts = [text for message in new for text in message.texts]
        if not history_tokens:
            texts += [json.dumps(tool) for tool in tools.definitions]
        await self._check_length("\n".join(texts), window, "messages")
        stored = self._shown(history, tools, begins=bool(history))
        added = self._shown(new, tools, begins=not history)
        shown, options = self._given(tools), options or {}
        chars = sum(len(text) for message in history for text in message.texts) + sum(map(len, texts))
        if chars <= _INLINE_CHARS_MAX and len(stored) + len(added) <= _INLINE_MESSAGES_MAX:
            return self.template.turn(stored, history_tokens, added, shown, options)
        return await asyncio.to_thread(self.template.turn, stored, history_tokens, added, shown, options)

    async def document(
        self,
        history: Sequence[Message],
        history_tokens: Sequence[int],
        content: str,
        role: str | None,
        *,
        tools: ToolOffer = NO_TOOLS,
        window: int,
    ) -> tuple[list[int], list[Message]]:
        """Ids to append to `history_tokens` for a document, and the messages that it is.

        As "system" it is a message that nobody answers; as "user" one with an empty answer, for many
        templates refuse two questions in a row. Without a role: "system" where a session begins and the
        template takes it, else "user". Raises InvalidInput, and ContextLengthExceeded as `chat` does.
        """
        await self._check_length(content, window, "content")
        stored, shown = self._shown(history, tools, begins=True), self._given(tools)
        if role == "system" or (role is None and not history_tokens):
            alone = Message(role="system", content=content)
            try:
                new = await asyncio.to_thread(
                    self.template.unanswered, stored, history_tokens, alone.as_dict(), shown
                )
                return new, [alone]
            except InvalidInput:
                if role is not None:
                    raise
        asked = Message(role="user", content=content)
        new = await asyncio.to_thread(self.template.turn, stored, history_tokens, [asked.as_dict()], shown)
        return new, [asked, Message(role="assistant", content="")]

    async def head_tokens(
        self,
        messages: Sequence[Message],
        tokens: Sequence[int],
        block_tokens: int,
        tools: ToolOffer = NO_TOOLS,
    ) -> int:
        """Where the system prompt of a session, and its tools, end among its `tokens`, to the end of its last
        block; 0 without either."""
        system = self._shown(messages[: leading_system(messages)], tools, begins=True)
        if not system and not tools.definitions:
            return 0
        rendered = await asyncio.to_thread(self._opening, system, self._given(tools))
        common = 0
        while common < min(len(rendered), len(tokens)) and rendered[common] == tokens[common]:
            common += 1
        return -(-common // block_tokens) * block_tokens

    def _opening(self, system: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        if system and not tools:
            try:
                return self.template.messages(system)
            except InvalidInput:  # the template wants a question
                pass
        # Some templates show tools with the first question.
        return self.template.messages([*system, {"role": "user", "content": "?"}], tools)

    def _shown(self, messages: Sequence[Message], tools: ToolOffer, *, begins: bool) -> list[dict[str, Any]]:
        """As the template reads them. `begins`: they are the first of the conversation."""
        messages = joined(messages)
        if self.calls.described:
            messages = describe_tools(
                messages, tools.definitions, begins=begins, takes_system=self.template.takes_system
            )
        return [message.as_dict() for message in messages]

    def _given(self, tools: ToolOffer) -> Sequence[dict[str, Any]]:
        """What the template itself is given of them."""
        return () if self.calls.described else tools.definitions

    def _new_call_id(self) -> str:
        if self.calls.id_chars:
            return secrets.token_hex(self.calls.id_chars)[: self.calls.id_chars]
        return f"call_{secrets.token_hex(12)}"

    async def completion(self, text: str, *, window: int) -> list[int]:
        """Raises ContextLengthExceeded for a text that is far longer than `window` tokens."""
        await self._check_length(text, window, "prompt")
        return await self._encoded(self.tokenizer.encode_prompt, text)

    async def prediction(self, text: str, *, window: int, vocab_size: int) -> list[int]:
        """Of what an answer may be, without tokens that the model does not have. Raises ContextLengthExceeded
        for one of more than `window` tokens."""
        param = "prediction.content"
        await self._check_length(text, window, param)
        tokens = await self._encoded(self.tokenizer.encode_text, text)
        if len(tokens) > window:
            raise ContextLengthExceeded.of(
                window,
                f"{param} has {len(tokens)} tokens, and no answer is as long: shorten it, or leave "
                "prediction out",
                param=param,
            )
        return [token for token in tokens if token < vocab_size]

    async def _encoded(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """On a thread if it takes long."""
        return encode(text) if len(text) <= _INLINE_CHARS_MAX else await asyncio.to_thread(encode, text)

    async def _check_length(self, text: str, window: int, param: str) -> None:
        chars = window * _CHARS_PER_TOKEN
        while len(text) > chars:
            tokens = len(await asyncio.to_thread(self.tokenizer.encode_text, text[:chars]))
            if tokens > window + _CUT_TOKENS:
                raise ContextLengthExceeded.of(
                    window,
                    f"the first {chars} of {len(text)} characters have {tokens} tokens already: shorten the "
                    f"{param}",
                    param=param,
                )
            chars *= 2
