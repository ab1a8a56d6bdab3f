"""Routers that hear the tokens of all of their sequences in one call: a message an iteration, whatever the
batch. In calls of their own each token of a sequence would cost both sides a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from kvcommons.errors import Conflict, InvalidInput
from kvcommons.pb import common_pb2
from kvcommons.pb import decode_pb2 as pb


class TokenListener:
    """One Listen call. Belongs to the event loop. Tokens that pile up while the router is slow leave in one
    message; there are never more than its sequences may have."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[common_pb2.SampledToken]] = {}  # of sequences, by their requests' ids
        self._news = asyncio.Event()
        self._ends = False

    def tell(self, request_id: str, tokens: Sequence[common_pb2.SampledToken]) -> None:
        if not tokens:
            return
        self._tokens.setdefault(request_id, []).extend(tokens)
        self._news.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self._ends = True
        self._news.set()

    async def messages(self) -> AsyncIterator[pb.IterationTokens]:
        """Until it is ended."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._tokens:
                tokens, self._tokens = self._tokens, {}
                yield pb.IterationTokens(
                    sequences=[
                        pb.SequenceTokens(request_id=request_id, tokens=some)
                        for request_id, some in tokens.items()
                    ]
                )
            if self._ends and not self._tokens:
                return


class TokenListeners:
    """Those whose calls are open, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, TokenListener] = {}
        self._ended = False

    def find(self, name: str) -> TokenListener | None:
        return None if self._ended else self._by_name.get(name)

    @contextmanager
    def listening(self, name: str) -> Iterator[TokenListener]:
        """Until it is left. Raises InvalidInput without a name, Conflict where somebody has it."""
        if not name:
            raise InvalidInput("listener must be set: a name that nobody else has", param="listener")
        if name in self._by_name:
            raise Conflict("listener: somebody has this name; each call has its own", param="listener")
        listener = self._by_name[name] = TokenListener()
        if self._ended:
            listener.end()
        try:
            yield listener
        finally:
            del self._by_name[name]

    def end(self) -> None:
        """No sequence is left, and none will come."""
        self._ended = True
        for listener in self._by_name.values():
            listener.end()
