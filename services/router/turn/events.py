"""What a turn hears (events) and what it asks for (actions). Values only; turn.py and choice.py decide.

`choice` is the index of a choice of the request, `attempt` counts the pairs of instances it was tried on:
what an attempt that was given up still sends is known by its number and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2 as pb
from services.router.answer.parts import Part
from services.router.answer.text import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    choice: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Event):
    """The decode `instance` has room; prefill is to push the blocks from this one on, unless decode
    `computes` the prompt itself. `holders`: instances that lend it memory for the sequence from the start."""

    push_from_block: int
    computes: bool = False
    instance: str = ""
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed(Event):
    """The sequence's KV lies on these `holders`, too."""

    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing(Event):
    """Decode could not fetch its part of the history, or does not compute the prompt after all: prefill is to
    push the blocks from this one on."""

    push_from_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted(Event):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class First(Event):
    """The sampled token of the `instance` that computed the prompt, and where the KV of its prompt came from
    (tokens; microseconds). Of the cached tokens, `device_tokens` were in its own memory, the rest in the
    kvstore's tiers."""

    token: pb.SampledToken
    cached_tokens: int
    device_tokens: int
    dram_tokens: int = 0
    disk_tokens: int = 0
    instance: str = ""
    queue_us: int
    compute_us: int
    load_wait_us: int
    prompt_logprobs: tuple[pb.PromptLogprobs, ...] = ()  # where the job asked for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    tokens: tuple[pb.SampledToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """Decode ended the sequence: "stop" or "length"."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFailed(Event):
    error: KVCommonsError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFailed(Event):
    """Decode's stream broke, or no attempt could be made (no instance is ready)."""

    error: KVCommonsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Event):
    """The attempt waits in the capacity queue. The client gets `error` if its time runs out meanwhile."""

    error: KVCommonsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """Decode had no room. The choice keeps its place in the capacity queue, where the next attempt waits."""

    error: KVCommonsError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDue(Event):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    choice: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Action):
    """Match, place, and open decode's stream for the prompt and what was generated so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Action):
    """Have this attempt's prefill compute; an earlier Compute of the attempt is over."""

    push_from_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Action):
    """Cancel the calls of this attempt. Instances on which it failed are better avoided for now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linger(Action):
    """The answer is complete: let decode's stream end by itself (it hands its last blocks to the store)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Action):
    """Send RetryDue after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Action):
    """Parts of the answer for the client, and the tokens whose text was released (for logprobs); either may
    be empty, for the text of some tokens is no part."""

    parts: tuple[Part, ...]
    tokens: tuple[Shown, ...]
