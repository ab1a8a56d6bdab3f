"""Moves the session records of a stack's folders to a database, or to another folder."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from services.kvstore.records.destination import Destination, goes_on_from
from services.kvstore.records.source import Source, SourceSession

AT_ONCE = 8  # sessions, each with a transaction of its own


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a move came to. `kept`: sessions of which something else is there than the folders have, and was
    left; `disputed`: those of whose newest state the folders had two."""

    sessions: int = 0
    tokens: int = 0
    moved: int = 0
    sessions_there: int = 0
    tokens_there: int = 0
    kept: list[tuple[str, str]] = field(default_factory=list)
    disputed: list[tuple[str, str]] = field(default_factory=list)


async def move(source: Source, destination: Destination, progress: Callable[[Tally], None]) -> Tally:
    """Each session is read again once it is there. `progress` hears of every few of them. Raises what the
    destination does; what was moved before that stays."""
    tally = Tally()
    sessions = source.sessions()
    while batch := list(itertools.islice(sessions, AT_ONCE)):
        moved = await asyncio.gather(
            *(_move_one(one, destination, tally) for one in batch), return_exceptions=True
        )
        for outcome in moved:
            if isinstance(outcome, BaseException):
                raise outcome
        progress(tally)
    return tally


async def _move_one(one: SourceSession, destination: Destination, tally: Tally) -> None:
    record = one.record
    name = record.tenant, record.session_id
    tally.sessions += 1
    tally.tokens += len(record.tokens)
    moved = await destination.put(record)
    tally.moved += moved
    there = await destination.get(*name)
    if there is not None:
        tally.sessions_there += 1
        tally.tokens_there += len(there.tokens)
    if there is None or not goes_on_from(there, record):
        tally.kept.append(name)
    if one.disputed:
        tally.disputed.append(name)
