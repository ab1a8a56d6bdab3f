"""A request's sampling parameters as prefill and decode read them. Pure: the seed is an argument."""

from __future__ import annotations

from collections.abc import Collection

from kvcommons.errors import InvalidInput
from kvcommons.pb import common_pb2 as pb
from services.router.api.schemas.requests import ChatRequest, CompletionRequest

SEED_BITS = 64


def sampling_of(
    request: ChatRequest | CompletionRequest,
    *,
    seed: int,
    choice: int,
    stop_ids: Collection[int],
    vocab_size: int,
    grammar: str = "",
) -> pb.Sampling:
    """`seed`: drawn by the router, taken where the client gave none. Raises InvalidInput for a bias on a
    token that the model does not have."""
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    for token in bias:
        if token >= vocab_size:
            raise InvalidInput(f"logit_bias: the model has no token {token}", param="logit_bias")
    logprobs, top_logprobs = logprobs_of(request)
    return pb.Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=(seed if request.seed is None else request.seed) % (1 << SEED_BITS),
        choice=choice,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        min_tokens=request.min_tokens or 0,
        logit_bias=bias,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        # Some folders name an end that their model is too small to give: it ends nothing.
        stop_token_ids=() if request.ignore_eos else sorted(end for end in stop_ids if end < vocab_size),
        grammar=grammar,
    )


def logprobs_of(request: ChatRequest | CompletionRequest) -> tuple[bool, int]:
    """Whether logprobs are wanted, and how many alternatives of each token."""
    if isinstance(request, CompletionRequest):
        return request.logprobs is not None, request.logprobs or 0
    if request.top_logprobs and not request.logprobs:
        raise InvalidInput("top_logprobs needs logprobs: true", param="top_logprobs")
    return bool(request.logprobs), request.top_logprobs or 0


def prompt_logprobs_of(request: ChatRequest | CompletionRequest) -> int | None:
    """How many alternatives of each of the prompt's own tokens are wanted; None: nothing is said of them.
    Raises InvalidInput where they are to be streamed and cannot be."""
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidInput(
            "prompt_logprobs are not streamed: leave stream out"
            + (", or ask for echo and logprobs" if isinstance(request, CompletionRequest) else ""),
            param="prompt_logprobs",
        )
    asked = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        asked.append(request.logprobs)
    return max((one for one in asked if one is not None), default=None)


def stops_of(request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(dict.fromkeys(request.stop))
