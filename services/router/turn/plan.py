"""From a validated request to a turn: tokens, room in the context window, choices."""

from __future__ import annotations

from collections.abc import Sequence

from kvcommons.errors import ContextLengthExceeded, InvalidInput
from kvcommons.model.chat import Options
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.answer.text import AnswerText
from services.router.api.schemas.requests import COMPLETION_TOKENS, ChatRequest, CompletionRequest
from services.router.sessions.conversation import Message, ToolCall
from services.router.turn.choice import Choice, Patience
from services.router.turn.prompt_logprobs import LogprobsOfPrompt
from services.router.turn.rendering import Text
from services.router.turn.sampling import prompt_logprobs_of, sampling_of, stops_of
from services.router.turn.tools import NO_TOOLS, ToolOffer
from services.router.turn.turn import Turn


def messages_of(request: ChatRequest) -> list[Message]:
    """ "developer" is what newer clients call "system"; templates know the latter."""
    return [
        Message(
            role="system" if message.role == "developer" else message.role,
            content=message.text,
            name=message.name or "",
            reasoning=message.reasoning_content or "",
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in message.tool_calls or ()
            ),
            tool_call_id=message.tool_call_id or "",
        )
        for message in request.messages
    ]


def given_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """As texts or as token ids, one after another."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


async def prompts_of(
    request: CompletionRequest, text: Text, model: ModelInfo, *, choices_max: int
) -> list[list[int]]:
    """Token ids of each prompt. Raises InvalidInput for an empty one, for too many, and for ids that the
    model does not have."""
    given = given_prompts(request)
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
    capacity_tokens: int | None = None,
    grammar: str = "",
    tools: ToolOffer = NO_TOOLS,
    options: Options | None = None,
) -> Turn:
    """A turn of `n` choices for each prompt, all by the same grammar, with the same tools and template
    options. `capacity_tokens`: of the longest sequence that the memory of all instances holds, None where
    nobody has said. Raises ContextLengthExceeded where a prompt or its answer does not fit."""
    n = request.n or 1
    check_choices(len(prompts), n, choices_max)
    stop_ids = text.template.stop_ids if isinstance(request, ChatRequest) else text.tokenizer.eos_ids
    stops, top = stops_of(request), prompt_logprobs_of(request)
    planned: list[list[Choice]] = []
    for at, prompt in enumerate(prompts):
        last = _max_position(request, len(prompt), model, capacity_tokens)
        _check_min_tokens(request, last - len(prompt))
        choices: list[Choice] = []
        prompt_logprobs = None if top is None else LogprobsOfPrompt(top=top)
        for choice in range(n):
            sampling = sampling_of(
                request,
                seed=seed,
                choice=choice,
                stop_ids=stop_ids,
                vocab_size=model.vocab_size,
                grammar=grammar,
            )
            answer = AnswerText(
                text.tokenizer,
                stops=stops,
                stop_ids=sampling.stop_token_ids,
                min_tokens=sampling.min_tokens,
                parser=text.parser(tools, options) if isinstance(request, ChatRequest) else None,
                called=tools.finish_reason,
                # Who counts a completion's logprobs, as evaluation harnesses do, counts all of its tokens.
                shows_end=isinstance(request, CompletionRequest) and sampling.logprobs,
            )
            choices.append(
                Choice(
                    index=at * n + choice,
                    prompt=prompt,
                    max_position=last,
                    sampling=sampling,
                    text=answer,
                    patience=patience,
                    prompt_logprobs=prompt_logprobs,
                )
            )
        planned.append(choices)
    return Turn(planned)


def max_tokens_of(request: ChatRequest | CompletionRequest) -> int | None:
    """As the request bounds its answer."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def _check_min_tokens(request: ChatRequest | CompletionRequest, tokens_left: int) -> None:
    """Raises InvalidInput where the answer cannot have as many."""
    if request.min_tokens is not None and request.min_tokens > tokens_left:
        raise InvalidInput(
            f"min_tokens is {request.min_tokens}, and the answer has at most {tokens_left} tokens",
            param="min_tokens",
        )


def _check_says_something(request: ChatRequest | CompletionRequest) -> None:
    """Raises InvalidInput where an answer of no tokens would not even say something of the prompt."""
    if isinstance(request, CompletionRequest) and (request.echo or request.prompt_logprobs is not None):
        return
    raise InvalidInput(
        "max_tokens: 0 generates nothing, which is of use with echo or prompt_logprobs: ask for one of "
        "them, or for at least 1",
        param="max_tokens",
    )


def _max_position(
    request: ChatRequest | CompletionRequest,
    prompt_tokens: int,
    model: ModelInfo,
    capacity_tokens: int | None,
) -> int:
    """The sequence's length at which the answer ends, in tokens. Where the request does not say, it is
    bounded by what fits; what it says has to fit. A prompt that memory does not hold is left to each attempt:
    capacity may come until then."""
    window = model.context_window
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    wanted = max_tokens_of(request)
    if wanted == 0:
        _check_says_something(request)
    if prompt_tokens > window or (prompt_tokens == window and wanted != 0):
        raise ContextLengthExceeded.of(
            window,
            f"your {param} resulted in {prompt_tokens} tokens, the "
            f"conversation so far included. Please reduce the length of the {param}, or begin a new session",
            param=param,
        )
    name = "max_tokens" if wanted == request.max_tokens else "max_completion_tokens"
    fits = window
    if capacity_tokens is not None and prompt_tokens < capacity_tokens < window:
        fits = capacity_tokens
    if wanted is None:
        chat = isinstance(request, ChatRequest)
        return fits if chat else min(prompt_tokens + COMPLETION_TOKENS, fits)
    if prompt_tokens + wanted > fits:
        why = "" if fits == window else ", and decode and all who lend to it have no memory for more"
        more = "" if fits == window else ", or raise capacity_tokens"
        raise ContextLengthExceeded.of(
            fits,
            f"you requested {prompt_tokens + wanted} tokens "
            f"({prompt_tokens} in the {param}, {wanted} in the completion){why}. Please reduce the length of "
            f"the {param}, or ask for at most {fits - prompt_tokens} new tokens ({name}){more}",
            param=name,
        )
    return prompt_tokens + wanted
