"""Completions of random token ids, and when each of their tokens came."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from devstack.rest import RestClient

FIRST_ID, LAST_ID = 100, 2000  # of ids that every model here has


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """`times_s`: when tokens came, on the monotonic clock; `sent_s`: after the first request of all;
    `first_s`, `ended_s`: after it was sent itself."""

    times_s: list[float]
    sent_s: float
    first_s: float
    ended_s: float
    tokens: int

    def gaps_s(self) -> list[float]:
        """Between tokens that came one after the other."""
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


def prompt(seed: int, tokens: int) -> list[int]:
    """The same for the same arguments; others share no beginning with it."""
    dice = random.Random(seed)
    return [dice.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]


def ask(
    client: RestClient,
    ids: Sequence[int],
    answer_tokens: int,
    *,
    began_s: float | None = None,
    structured: Mapping[str, Any] | None = None,
) -> Stream:
    """An answer of exactly so many tokens, or, with `structured` outputs that it is held to, of so many at
    most."""
    sent_s = time.monotonic()
    times_s: list[float] = []
    tokens, reported = 0, False
    held = {"ignore_eos": True} if structured is None else {"structured_outputs": structured}
    events = client.tokens(ids, max_tokens=answer_tokens, temperature=0.0, logprobs=0, **held)
    for event in events:
        now_s = time.monotonic()
        for choice in event.get("choices", []):
            came = len((choice.get("logprobs") or {}).get("tokens") or [])
            reported = reported or came > 0
            if not reported and choice.get("text"):  # a server that never tells them sends one at a time
                came = 1
            times_s += [now_s] * came
            tokens += came
    return Stream(
        times_s=times_s,
        sent_s=sent_s - (sent_s if began_s is None else began_s),
        first_s=times_s[0] - sent_s,
        ended_s=time.monotonic() - sent_s,
        tokens=tokens,
    )


def at_once(client: RestClient, prompts: Sequence[Sequence[int]], answer_tokens: int) -> list[Stream]:
    return arrive(client, [0.0] * len(prompts), prompts, answer_tokens)


def arrive(
    client: RestClient, starts_s: Sequence[float], prompts: Sequence[Sequence[int]], answer_tokens: int
) -> list[Stream]:
    """Each when its time has come, whether the others have ended or not."""
    began_s = time.monotonic()

    def one(start_s: float, ids: Sequence[int]) -> Stream:
        time.sleep(max(began_s + start_s - time.monotonic(), 0.0))
        return ask(client, ids, answer_tokens, began_s=began_s)

    with ThreadPoolExecutor(max_workers=max(len(prompts), 1)) as pool:
        return list(pool.map(one, starts_s, prompts))
