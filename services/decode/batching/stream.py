"""The events of one Generate call for the router, in order, until the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvcommons.engine.callbacks import SequenceUpdate
from kvcommons.engine.prompt import FirstToken
from kvcommons.pb import common_pb2
from kvcommons.pb import decode_pb2 as pb
from services.decode.batching.listeners import TokenListener


class EventStream:
    """Belongs to the event loop. Tokens that pile up while the router is slow leave in one message; there are
    never more than the sequence may have."""

    def __init__(
        self, request_id: str = "", listener: Callable[[], TokenListener | None] = lambda: None
    ) -> None:
        """`listener`: who hears the tokens instead, while there is one. The first ones go this way, behind
        what has to be known before them."""
        self._request_id = request_id
        self._listener = listener
        self.sent = 0  # tokens that were sent, whichever way
        self._tokens: list[common_pb2.SampledToken] = []
        self._borrowed: dict[str, int] | None = None
        self._missing: int | None = None
        self._prefilled: FirstToken | None = None
        self._end: SequenceUpdate | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """The engine has let go of the sequence."""
        return self._end is not None

    def step(self, step: SequenceUpdate) -> None:
        """What an iteration made of this sequence."""
        own = not self.sent or self._tokens or step.error is not None  # which must not overtake its tokens
        listener = None if own else self._listener()
        if listener is None:
            self._tokens += step.tokens
        else:
            listener.tell(self._request_id, step.tokens)
            self.sent += len(step.tokens)
        if step.borrowed is not None:
            self._borrowed = step.borrowed  # what it was before is of no interest any more
        if step.reason or step.error:
            self._end = step
        if self._tokens or step.borrowed is not None or self._end is not None:
            self._news.set()

    def missing(self, push_from_block: int) -> None:
        self._missing = push_from_block
        self._news.set()

    def prefilled(self, first: FirstToken) -> None:
        """The prompt was computed here; its first token comes with the next step."""
        self._prefilled = first
        self._news.set()

    async def events(self) -> AsyncIterator[pb.GenerateEvent]:
        """Until the sequence's end; raises the error that it ended with."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._missing is not None:
                missing, self._missing = self._missing, None
                yield pb.GenerateEvent(missing=pb.Missing(push_from_block=missing))
            if self._prefilled is not None:
                first, self._prefilled = self._prefilled, None
                yield pb.GenerateEvent(prefilled=first.message())
            if self._borrowed is not None:
                borrowed, self._borrowed = self._borrowed, None
                holders = [
                    pb.BorrowedBlocks(data_address=address, blocks=blocks)
                    for address, blocks in borrowed.items()
                ]
                yield pb.GenerateEvent(borrowed=pb.Borrowed(holders=holders))
            if self._tokens:
                tokens, self._tokens = self._tokens, []
                self.sent += len(tokens)
                yield pb.GenerateEvent(tokens=pb.Tokens(tokens=tokens))
            if self._end is not None and not self._tokens:
                if self._end.error is not None:
                    raise self._end.error
                finished = pb.Finished(
                    reason=self._end.reason, saved_blocks=self._end.saved_blocks, tokens=self.sent
                )
                yield pb.GenerateEvent(finished=finished)
                return
