"""When a sequence may begin: once its history is here and prefill has delivered the rest. Pure.

Decode fetches the blocks before `push_from_block` itself; prefill pushes those from there on, then calls
StartSequence. Where the fetch falls short, prefill is asked to push from an earlier block, and calls again;
a prefill that waits for the fetch itself (AwaitHistory) is not asked. Of several first tokens the one of the
first call counts: it may have reached the client already.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcommons.pb import common_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFrom:
    """Prefill is asked to push from this block on."""

    push_from_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGeneration:
    """The sequence begins with this token."""

    first: pb.SampledToken


class StartBarrier:
    """Events in, at most one action out of each."""

    def __init__(self, *, push_from_block: int, fetching: bool) -> None:
        """`fetching`: decode is about to fetch blocks before `push_from_block`; else they are all here."""
        self._push_from_block = push_from_block
        self._present = None if fetching else push_from_block
        self._awaited = False
        self._pushed_from: int | None = None
        self._first: pb.SampledToken | None = None
        self._started = False

    def awaited(self) -> None:
        """Prefill waits for the fetch, and pushes what it lacks."""
        self._awaited = True

    def fetched(self, blocks: int) -> PushFrom | StartGeneration | None:
        """The fetch has ended: `blocks` leading blocks of the sequence are here."""
        self._present = min(blocks, self._push_from_block)
        if self._pushed_from is None or self._pushed_from > self._present:
            if self._present < self._push_from_block and not self._awaited:
                return PushFrom(push_from_block=self._present)
            return None
        return self._start()

    def started(self, first: pb.SampledToken, pushed_from_block: int) -> StartGeneration | None:
        """Prefill has pushed all blocks from `pushed_from_block` on."""
        self._first = self._first or first
        earlier = self._pushed_from
        self._pushed_from = pushed_from_block if earlier is None else min(earlier, pushed_from_block)
        if self._present is None or self._pushed_from > self._present:
            return None
        return self._start()

    def _start(self) -> StartGeneration | None:
        if self._started or self._first is None:
            return None
        self._started = True
        return StartGeneration(first=self._first)
