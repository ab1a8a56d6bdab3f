"""Whether what clients saw of a session is what one session, changed by one turn after another, could have
shown them (Herlihy and Wing, "Linearizability", 1990). Pure.

A turn appends a token that no other turn appends. So the tokens that are there in the end say in which order
the turns came, and each answer can be held against that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Of a turn. `version`: as it was told; None: nobody heard, so it may have been done, at any time."""

    token: int
    began_s: float
    ended_s: float
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    tokens: Sequence[int]
    began_s: float
    ended_s: float


def violations(commits: Sequence[Commit], reads: Sequence[Read], last: Sequence[int]) -> list[str]:
    """`last`: the session's tokens once all is over."""
    found: list[str] = []
    by_token = {commit.token: commit for commit in commits}
    places = {token: place for place, token in enumerate(last)}
    if len(places) != len(last):
        found.append(f"a turn is there twice: {list(last)}")
    found += [f"nobody committed {token}" for token in last if token not in by_token]
    for commit in commits:
        if commit.version is not None and places.get(commit.token, -1) != commit.version - 1:
            found.append(f"{commit} was acknowledged, and is at {places.get(commit.token)}")
    # When a token was there at the latest, and at the earliest: in between, its turn took effect.
    at_earliest = [by_token[token].began_s if token in by_token else -inf for token in last]
    at_latest = [
        by_token[token].ended_s if token in by_token and by_token[token].version is not None else inf
        for token in last
    ]
    for read in reads:
        length = len(read.tokens)
        if list(read.tokens) != list(last[:length]):
            found.append(f"{read} is no beginning of {list(last)}")
            continue
        if length:
            at_latest[length - 1] = min(at_latest[length - 1], read.ended_s)
        if length < len(last):
            at_earliest[length] = max(at_earliest[length], read.began_s)
    earliest_s = -inf
    for place, token in enumerate(last):
        earliest_s = max(earliest_s, at_earliest[place])
        if min(at_latest[place:]) < earliest_s:
            found.append(
                f"{token} came before a turn or a read that it had to follow, or after one that saw it"
            )
    return found
