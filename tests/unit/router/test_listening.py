"""What a router hears of its sequences: in which call, and what becomes of them when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from kvcommons.errors import Internal, KVCommonsError, Unavailable
from kvcommons.pb.common_pb2 import SampledToken
from kvcommons.pb.decode_pb2 import IterationTokens, ListenRequest, SequenceTokens
from services.router.fleet.listening import Heard, Listening


class Call:
    """Of Listen."""

    def __init__(self, request: ListenRequest, timeout: float) -> None:
        self.listener, self.timeout = request.listener, timeout
        self.cancelled = False
        self._said: asyncio.Queue[IterationTokens | KVCommonsError | None] = asyncio.Queue()

    def say(self, **positions: int) -> None:
        self._said.put_nowait(
            IterationTokens(
                sequences=[
                    SequenceTokens(request_id=name, tokens=[SampledToken(token=1, position=position)])
                    for name, position in positions.items()
                ]
            )
        )

    def end(self, error: KVCommonsError | None = None) -> None:
        self._said.put_nowait(error)

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[IterationTokens]:
        while (said := await self._said.get()) is not None:
            if isinstance(said, KVCommonsError):
                raise said
            yield said


class Decode:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def Listen(self, request: ListenRequest, timeout: float) -> Call:
        self.calls.append(Call(request, timeout))
        return self.calls[-1]


class Router:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.decode: Any = Decode()
        self.listening = Listening(lambda: self.now_s)
        self.came: dict[str, list[int]] = {}
        self.lost: dict[str, KVCommonsError] = {}

    def hear(self, name: str, running: ExitStack, *, until_s: float = 160.0, address: str = "here") -> Heard:
        def came(tokens: Sequence[SampledToken]) -> None:
            self.came.setdefault(name, []).extend(token.position for token in tokens)

        def lost(error: KVCommonsError) -> None:
            assert name not in self.lost, "it is told once"
            self.lost[name] = error

        return running.enter_context(
            self.listening.hear(self.decode, address, name, until_s=until_s, came=came, lost=lost)
        )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_call_serves_all_sequences_of_an_instance() -> None:
    router = Router()
    with ExitStack() as running:
        first, second = router.hear("a", running), router.hear("b", running)
        other = router.hear("c", running, address="there")
        assert len(router.decode.calls) == 2
        assert first.listener == second.listener == router.decode.calls[0].listener
        assert other.listener == router.decode.calls[1].listener != first.listener
        router.decode.calls[0].say(a=5, b=9, nobody=1)
        router.decode.calls[0].say(b=10)
        await settle()
        assert router.came == {"a": [5], "b": [9, 10]}
    assert not router.decode.calls[0].cancelled, "the next request uses it"
    with ExitStack() as running:
        assert router.hear("d", running).listener == first.listener
    await router.listening.close()
    assert router.decode.calls[0].cancelled


async def test_tokens_of_either_call_are_waited_for() -> None:
    router = Router()
    with ExitStack() as running:
        heard = router.hear("a", running)
        heard.take([SampledToken(token=1, position=5)])
        waiting = asyncio.create_task(heard.all(3, timeout_s=5))
        router.decode.calls[0].say(a=6)
        await settle()
        assert not waiting.done()
        router.decode.calls[0].say(a=7)
        await waiting
        with pytest.raises(Unavailable, match="1 of its tokens did not come"):
            await heard.all(4, timeout_s=0.01)
    assert router.came == {"a": [5, 6, 7]}
    await router.listening.close()


@pytest.mark.parametrize("error", [None, Unavailable("the connection broke")])
async def test_sequences_hear_that_their_call_broke_and_the_next_have_another(
    error: KVCommonsError | None,
) -> None:
    router = Router()
    with ExitStack() as running:
        router.hear("a", running)
        router.hear("b", running)
        router.decode.calls[0].end(error)
        await settle()
        assert set(router.lost) == {"a", "b"}
        assert all(isinstance(lost, Unavailable) for lost in router.lost.values())
        router.hear("c", running)
        router.decode.calls[1].say(c=3)
        await settle()
        assert router.came == {"c": [3]}
    await router.listening.close()


async def test_an_older_instance_sends_tokens_in_their_own_call() -> None:
    router = Router()
    unknown = Internal("Method not found!")
    unknown.__cause__ = grpc.aio.AioRpcError(
        grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata()
    )
    with ExitStack() as running:
        heard = router.hear("a", running)
        router.decode.calls[0].end(unknown)
        await settle()
        assert not router.lost
        heard.take([SampledToken(token=1, position=5)])
        await heard.all(0, timeout_s=5)  # it does not say how many it has sent
    assert router.came == {"a": [5]}
    await router.listening.close()


async def test_a_call_outlives_every_request_that_uses_it() -> None:
    router = Router()
    with ExitStack() as running:
        router.hear("a", running, until_s=160.0)
        assert router.decode.calls[0].timeout > 60.0
        router.now_s = 500.0
        router.hear("b", running, until_s=560.0)
        assert len(router.decode.calls) == 1
        router.now_s = 740.0
        router.hear("c", running, until_s=800.0)
        assert len(router.decode.calls) == 2
        router.decode.calls[0].say(a=1)
        router.decode.calls[1].say(c=2)
        await settle()
        assert router.came == {"a": [1], "c": [2]}
        assert not router.decode.calls[0].cancelled
    assert router.decode.calls[0].cancelled, "its last sequence has left"
    assert not router.decode.calls[1].cancelled
    await router.listening.close()


async def test_what_a_sequence_does_with_its_tokens_harms_no_other() -> None:
    router = Router()

    def broken(tokens: Sequence[SampledToken]) -> None:
        raise ValueError("a mistake")

    with ExitStack() as running:
        lost: list[KVCommonsError] = []
        running.enter_context(
            router.listening.hear(router.decode, "here", "x", until_s=160.0, came=broken, lost=lost.append)
        )
        router.hear("a", running)
        router.decode.calls[0].say(x=1, a=1)
        await settle()
        assert lost
        assert set(router.lost) == {"a"}, "it is told, and goes on elsewhere"
    await router.listening.close()
