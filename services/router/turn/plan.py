"""From a validated request to a turn: tokens, room in the context window, choices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.errors import ContextLengthExceeded, InvalidInput
from kvcommons.model.chat import ChatTemplate
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.api.schemas.requests import ChatRequest, CompletionRequest
from services.router.sessions.conversation import Message, leading_system
from services.router.turn.answer_text import AnswerText
from services.router.turn.choice import Choice, Patience
from services.router.turn.sampling import sampling_of, stops_of
from services.router.turn.turn import Turn

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
    """The tokenizer and chat template of the model that is served."""

    tokenizer: Tokenizer
    template: ChatTemplate

    async def chat(
        self,
        history: Sequence[Message],
        history_tokens: Sequence[int],
        new: Sequence[Message],
        *,
        window: int,
    ) -> list[int]:
        """Ids to append to `history_tokens`; of the whole prompt where there is no history.

        Raises ContextLengthExceeded for texts that are far longer than `window` tokens.
        """
        await self._check_length("\n".join(message.content for message in new), window, "messages")
        stored = [message.as_dict() for message in history]
        added = [message.as_dict() for message in new]
        chars = sum(len(message.content) for message in (*history, *new))
        if chars <= _INLINE_CHARS_MAX and len(stored) + len(added) <= _INLINE_MESSAGES_MAX:
            return self.template.turn(stored, history_tokens, added)
        return await asyncio.to_thread(self.template.turn, stored, history_tokens, added)

    async def document(
        self,
        history: Sequence[Message],
        history_tokens: Sequence[int],
        content: str,
        role: str | None,
        *,
        window: int,
    ) -> tuple[list[int], list[Message]]:
        """Ids to append to `history_tokens` for a document, and the messages that it is.

        As "system" it is a message that nobody answers; as "user" one with an empty answer, for many
        templates refuse two questions in a row. Without a role: "system" where a session begins and the
        template takes it, else "user". Raises InvalidInput, and ContextLengthExceeded as `chat` does.
        """
        await self._check_length(content, window, "content")
        stored = [message.as_dict() for message in history]
        if role == "system" or (role is None and not history_tokens):
            alone = Message(role="system", content=content)
            try:
                new = await asyncio.to_thread(
                    self.template.unanswered, stored, history_tokens, alone.as_dict()
                )
                return new, [alone]
            except InvalidInput:
                if role is not None:
                    raise
        asked = Message(role="user", content=content)
        new = await asyncio.to_thread(self.template.turn, stored, history_tokens, [asked.as_dict()])
        return new, [asked, Message(role="assistant", content="")]

    async def head_tokens(self, messages: Sequence[Message], tokens: Sequence[int], block_tokens: int) -> int:
        """Where the system prompt of a session ends among its `tokens`, to the end of its last block; 0
        without one."""
        system = [message.as_dict() for message in messages[: leading_system(messages)]]
        if not system:
            return 0
        rendered = await asyncio.to_thread(self._opening, system)
        common = 0
        while common < min(len(rendered), len(tokens)) and rendered[common] == tokens[common]:
            common += 1
        return -(-common // block_tokens) * block_tokens

    def _opening(self, system: list[dict[str, str]]) -> list[int]:
        try:
            return self.template.messages(system)
        except InvalidInput:  # the template wants a question
            return self.template.messages([*system, {"role": "user", "content": "?"}])

    async def completion(self, text: str, *, window: int) -> list[int]:
        """Raises ContextLengthExceeded for a text that is far longer than `window` tokens."""
        await self._check_length(text, window, "prompt")
        if len(text) <= _INLINE_CHARS_MAX:
            return self.tokenizer.encode_prompt(text)
        return await asyncio.to_thread(self.tokenizer.encode_prompt, text)

    async def _check_length(self, text: str, window: int, param: str) -> None:
        chars = window * _CHARS_PER_TOKEN
        while len(text) > chars:
            tokens = len(await asyncio.to_thread(self.tokenizer.encode_text, text[:chars]))
            if tokens > window + _CUT_TOKENS:
                raise ContextLengthExceeded(
                    f"the first {chars} of {len(text)} characters have {tokens} tokens already, and the "
                    f"context window has {window}: shorten the prompt",
                    param=param,
                )
            chars *= 2


def messages_of(request: ChatRequest) -> list[Message]:
    """ "developer" is what newer clients call "system"; templates know the latter."""
    return [
        Message(
            role="system" if message.role == "developer" else message.role,
            content=message.text,
            name=message.name or "",
        )
        for message in request.messages
    ]


async def prompts_of(
    request: CompletionRequest, text: Text, model: ModelInfo, *, choices_max: int
) -> list[list[int]]:
    """Token ids of each prompt. Raises InvalidInput for an empty one, for too many, and for ids that the
    model does not have."""
    prompt = request.prompt
    given: list[str | list[int]]
    if isinstance(prompt, str):
        given = [prompt]
    elif prompt and isinstance(prompt[0], int):
        given = [[token for token in prompt if isinstance(token, int)]]
    else:
        given = [item for item in prompt if not isinstance(item, int)]
    check_choices(len(given), request.n or 1, choices_max)
    prompts = [
        await text.completion(item, window=model.context_window) if isinstance(item, str) else item
        for item in given
    ]
    if not prompts or not all(prompts):
        raise InvalidInput("prompt is empty: send at least one token of text", param="prompt")
    for tokens in prompts:
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise InvalidInput(f"prompt: the model has no token {token}", param="prompt")
    return prompts


def check_choices(prompts: int, n: int, choices_max: int) -> None:
    """Raises InvalidInput for more choices at once than the settings allow."""
    if n * prompts > choices_max:
        raise InvalidInput(
            f"{n * prompts} choices are asked for at once, and {choices_max} are the limit here",
            param="n" if n > 1 else "prompt",
        )


def plan_turn(
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[Sequence[int]],
    *,
    model: ModelInfo,
    text: Text,
    seed: int,
    patience: Patience,
    choices_max: int,
    grammar: str = "",
) -> Turn:
    """A turn of `n` choices for each prompt, all by the same grammar. Raises ContextLengthExceeded where a
    prompt or its answer does not fit."""
    n = request.n or 1
    check_choices(len(prompts), n, choices_max)
    stop_ids = text.template.stop_ids if isinstance(request, ChatRequest) else text.tokenizer.eos_ids
    stops = stops_of(request)
    planned: list[list[Choice]] = []
    for at, prompt in enumerate(prompts):
        last = _max_position(request, len(prompt), model)
        choices: list[Choice] = []
        for choice in range(n):
            sampling = sampling_of(
                request,
                seed=seed,
                choice=choice,
                stop_ids=stop_ids,
                vocab_size=model.vocab_size,
                grammar=grammar,
            )
            answer = AnswerText(text.tokenizer, stops=stops, stop_ids=sampling.stop_token_ids)
            choices.append(
                Choice(
                    index=at * n + choice,
                    prompt=prompt,
                    max_position=last,
                    sampling=sampling,
                    text=answer,
                    patience=patience,
                )
            )
        planned.append(choices)
    return Turn(planned)


def max_tokens_of(request: ChatRequest | CompletionRequest) -> int | None:
    """As the request bounds its answer."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def _max_position(request: ChatRequest | CompletionRequest, prompt_tokens: int, model: ModelInfo) -> int:
    """The sequence's length at which the answer ends, in tokens."""
    window = model.context_window
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    if prompt_tokens >= window:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, the conversation so far included, and the context "
            f"window of {window} tokens has no room for an answer: shorten it, or begin another session",
            param=param,
        )
    wanted = max_tokens_of(request)
    name = "max_tokens" if wanted == request.max_tokens else "max_completion_tokens"
    if wanted is None:
        return window
    if prompt_tokens + wanted > window:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, and with {wanted} new ones ({name}) it does not fit the "
            f"context window of {window}: ask for at most {window - prompt_tokens}, or shorten the prompt",
            param=name,
        )
    return prompt_tokens + wanted
