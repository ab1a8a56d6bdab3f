"""A link to a kvstore that is only so fast: what a comparison of overlapping needs on a machine whose own
memory is so fast that there is nothing to overlap."""

from __future__ import annotations

import time

from kvcommons.pb import data_pb2
from kvcommons.transport.client import DataClient
from kvcommons.transport.server import DataServer, Exchange


class PacedLink:
    """Listens at `address`, asks the store's data address; both ways at `bytes_per_s` (0: unbound), set at
    any time."""

    def __init__(self, address: str, store: str) -> None:
        self.address = address
        self.bytes_per_s = 0.0
        self._client = DataClient(store)
        self._server = DataServer(address, self._relay, name="paced-link")
        self._server.start()

    def close(self) -> None:
        self._server.stop()
        self._client.close()

    def _relay(self, request: data_pb2.DataRequest, exchange: Exchange) -> None:
        due_s = time.monotonic()
        if not request.HasField("get_layers"):
            payload = bytearray(exchange.payload_bytes)
            exchange.receive_payload([payload])
            self._pause(due_s, len(payload))
            exchange.reply(self._client.call(request, [payload], deadline=exchange.deadline))
            return
        buffer = bytearray()

        def into(reply: data_pb2.DataReply, size: int) -> list[bytearray]:
            nonlocal buffer
            if len(buffer) != size:
                buffer = bytearray(size)
            return [buffer]

        replies = self._client.stream(
            request, into=into, replies=request.get_layers.layers, deadline=exchange.deadline
        )
        for reply in replies:
            due_s = self._pause(due_s, len(buffer))
            exchange.reply(reply, [buffer])

    def _pause(self, due_s: float, size: int) -> float:
        """Until `size` bytes more are through, which began at `due_s`; when that is."""
        if self.bytes_per_s:
            due_s += size / self.bytes_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))
        return due_s
