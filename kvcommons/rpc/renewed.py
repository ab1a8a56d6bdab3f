"""A channel whose certificate is the one that lies on disk: gRPC has no credentials of a client that change,
so a channel of it shows for ever what it was made with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio

from kvcommons.security.certificate import CertificateFiles, ServiceCertificate

# A call that was just made may have to reach its channel still; then it has its own timeout, and none has one
# as long as the second.
SETTLE_S = 1.0
ENDING_S_MAX = 3600.0


class RenewedChannel(grpc.aio.Channel):
    """Each call goes over a channel that was made with the newest files; calls on a former one go on to their
    end, and it is closed then. On the event loop's thread."""

    def __init__(
        self, certificate: ServiceCertificate, connect: Callable[[CertificateFiles], grpc.aio.Channel]
    ) -> None:
        self._certificate = certificate
        self._connect = connect
        self._files = certificate.files()
        self._channel = connect(self._files)
        self._former: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._closed = False

    def unary_unary(self, method: Any, *codec: Any, **options: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            return self._current().unary_unary(method, *codec, **options)(*arguments, **settings)

        return call

    def unary_stream(self, method: Any, *codec: Any, **options: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            return self._current().unary_stream(method, *codec, **options)(*arguments, **settings)

        return call

    def stream_unary(self, method: Any, *codec: Any, **options: Any) -> Any:
        raise AssertionError("no contract of ours streams requests")

    def stream_stream(self, method: Any, *codec: Any, **options: Any) -> Any:
        raise AssertionError("no contract of ours streams requests")

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        former = list(self._former.items())
        for ending, _ in former:
            ending.cancel()
        await asyncio.gather(*(ending for ending, _ in former), return_exceptions=True)
        await asyncio.gather(*(one.close(grace) for one in (self._channel, *(one for _, one in former))))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _current(self) -> grpc.aio.Channel:
        files = self._certificate.files()
        if files is not self._files and not self._closed:
            former, self._channel, self._files = self._channel, self._connect(files), files
            ending = asyncio.get_running_loop().create_task(_end(former), name="former channel")
            self._former[ending] = former
            ending.add_done_callback(lambda ended: self._former.pop(ended, None))
        return self._channel


async def _end(channel: grpc.aio.Channel) -> None:
    await asyncio.sleep(SETTLE_S)
    await channel.close(ENDING_S_MAX)
