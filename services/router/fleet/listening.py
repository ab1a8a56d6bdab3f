"""The tokens of this router's sequences, as decode makes them: those of all at one instance come in one call,
an iteration's in a message. What else is to be known of a sequence comes in the call that asked for it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvcommons.errors import Internal, KVCommonsError, Unavailable
from kvcommons.pb.common_pb2 import SampledToken
from kvcommons.pb.decode_pb2 import ListenRequest

if TYPE_CHECKING:
    from kvcommons.pb.decode_pb2_grpc import DecodeAsyncStub

log = logging.getLogger(__name__)

# A call is used by requests whose deadline comes before its own, so one serves all for so long.
_LONGER_S = 600.0
_NAME_BYTES = 16  # nobody guesses it


class Heard:
    """What is heard of one sequence."""

    def __init__(
        self,
        listener: str,
        came: Callable[[Sequence[SampledToken]], None],
        lost: Callable[[KVCommonsError], None],
    ) -> None:
        self.listener = listener  # the name under which decode sends them
        self.lost = lost
        self.tokens = 0  # so many have come
        self._came = came
        self._news = asyncio.Event()

    def take(self, tokens: Sequence[SampledToken]) -> None:
        """Of either call."""
        self.tokens += len(tokens)
        self._news.set()
        self._came(tokens)

    async def all(self, tokens: int, timeout_s: float) -> None:
        """Returns once so many have come, which decode has sent. Raises Unavailable where they do not."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.tokens < tokens:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            missing = tokens - self.tokens
            raise Unavailable(f"decode has ended, and {missing} of its tokens did not come") from None


class Listening:
    """Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: dict[str, _Call] = {}  # the newest to each address

    @contextmanager
    def hear(
        self,
        decode: DecodeAsyncStub,
        address: str,
        request_id: str,
        *,
        until_s: float,
        came: Callable[[Sequence[SampledToken]], None],
        lost: Callable[[KVCommonsError], None],
    ) -> Iterator[Heard]:
        """Of the sequence with this id, at the decode there: `came` gets its tokens until this is left, at
        `until_s` on the clock at the latest; or `lost` is told, once, why they come no more."""
        call = self._calls.get(address)
        if call is None or call.until_s < until_s:
            if call is not None and not call.sequences:
                call.cancel()
            call = self._call(decode, address, until_s + _LONGER_S)
        heard = call.sequences[request_id] = Heard(call.name, came, lost)
        try:
            yield heard
        finally:
            del call.sequences[request_id]
            if not call.sequences and self._calls.get(address) is not call:
                call.cancel()

    async def close(self) -> None:
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)

    def _call(self, decode: DecodeAsyncStub, address: str, until_s: float) -> _Call:
        call = self._calls[address] = _Call(decode, until_s, until_s - self._clock())

        def over(_: asyncio.Task[None]) -> None:
            if self._calls.get(address) is call:
                del self._calls[address]

        call.task.add_done_callback(over)
        return call


class _Call:
    """One call of Listen."""

    def __init__(self, decode: DecodeAsyncStub, until_s: float, timeout_s: float) -> None:
        self.name = secrets.token_hex(_NAME_BYTES)
        self.until_s = until_s
        self.sequences: dict[str, Heard] = {}  # by their requests' ids
        # It belongs to none of the requests, whose ids and spans calls carry otherwise.
        nobody = Context()
        self._call = nobody.run(decode.Listen, ListenRequest(listener=self.name), timeout=timeout_s)
        self.task = asyncio.create_task(self._run(), name="listen", context=nobody)

    def cancel(self) -> None:
        self._call.cancel()
        self.task.cancel()

    async def _run(self) -> None:
        error: KVCommonsError = Unavailable("decode ended its stream of tokens")
        try:
            async for message in self._call:
                for some in message.sequences:
                    heard = self.sequences.get(some.request_id)
                    if heard is not None:
                        heard.take(some.tokens)
        except KVCommonsError as broken:
            if _is_older(broken):
                return
            error = broken
        except Exception:
            log.exception("listening failed unexpectedly")
            error = Internal("the router failed unexpectedly; its log says why")
        for heard in list(self.sequences.values()):
            heard.lost(error)


def _is_older(error: KVCommonsError) -> bool:
    """The instance knows no such call: it sends a sequence's tokens in its own."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED
