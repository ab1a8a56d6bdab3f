"""History on its way from a kvstore into an engine's memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc.aio

from kvcommons.blockstore.loader import BlockLoader, CorruptObject, LayerLoad
from kvcommons.engine.core import Core
from kvcommons.errors import DeadlineExceeded, KVCommonsError
from kvcommons.pb import kvstore_pb2, kvstore_pb2_grpc
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

CONDEMN_TIMEOUT_S = 2.0


class Load:
    """Blocks of one sequence under way. They belong to it until it has ended or was cancelled."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes
        self._layers: LayerLoad | None = None
        self._started_s = time.monotonic()
        self._last_s = self._started_s

    @property
    def seconds(self) -> float:
        """From its start to the latest layer's arrival, without the time in which it was held back."""
        assert self._layers is not None
        return max(0.0, self._last_s - self._started_s - self._layers.held_s)

    @property
    def pace_s(self) -> float:
        """What a layer has taken so far, the wait for the one under way included; 0 where none has come."""
        assert self._layers is not None
        arrived = self._layers.layers_arrived
        return (time.monotonic() - self._started_s - self._layers.held_s) / arrived if arrived else 0.0

    @property
    def layers_arrived(self) -> int:
        assert self._layers is not None
        return self._layers.layers_arrived

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        assert self._layers is not None
        return self._layers.ended

    def release(self) -> None:
        """The layers that were held back may come."""
        assert self._layers is not None
        self._layers.release()

    def narrow(self, blocks: int) -> None:
        """Goes on with the first `blocks` alone. When this returns nothing is written to the others any
        more."""
        assert self._layers is not None
        self._layers.narrow(blocks)

    def wait(self, layer: int, deadline: Deadline) -> int:
        """Leading blocks that are there up to this layer; 0 when the deadline comes first."""
        assert self._layers is not None
        try:
            return self._layers.wait(layer, deadline)
        except DeadlineExceeded:
            return 0

    def arrived(self, layer: int, within_s: float = 0.0) -> bool:
        """Whether `wait` would return at once, now or in a moment."""
        assert self._layers is not None
        try:
            self._layers.wait(layer, Deadline.after(within_s))
        except DeadlineExceeded:
            return False
        return True

    def cancel(self) -> None:
        """When this returns nothing is written to the blocks any more."""
        assert self._layers is not None
        self._layers.cancel()

    def _begin(self, layers: LayerLoad) -> None:
        self._layers = layers

    def _landed(self) -> None:
        self._last_s = time.monotonic()


class Condemner:
    """Tells kvstores about objects that failed their checksum. Made on the event loop, called from any
    thread."""

    def __init__(self, dialer: Dialer = UNSECURED) -> None:
        self._dialer = dialer
        self._loop = asyncio.get_running_loop()
        self._control: dict[str, str] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    def know(self, *, data_address: str, control_address: str) -> None:
        """Sets where the store behind a data address takes calls about its blocks."""
        self._control[data_address] = control_address

    def control_of(self, data_address: str) -> str:
        """Empty where it is not known."""
        return self._control.get(data_address, "")

    def __call__(self, corrupt: CorruptObject) -> None:
        asyncio.run_coroutine_threadsafe(self._tell(corrupt), self._loop)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def _tell(self, corrupt: CorruptObject) -> None:
        control = self._control.get(corrupt.address)
        if not control:
            return
        if control not in self._channels:
            self._channels[control] = self._dialer.channel(control, "kvstore")
        request = kvstore_pb2.CondemnRequest(
            model=corrupt.model, block_id=corrupt.block_id, generation=corrupt.generation
        )
        try:
            stub = kvstore_pb2_grpc.BlocksStub(self._channels[control])
            await stub.Condemn(request, timeout=CONDEMN_TIMEOUT_S)
        except KVCommonsError as error:
            log.warning("a corrupt block could not be condemned: %s", error.message)


class Histories:
    """Loads runs of blocks into a core's memory."""

    def __init__(self, core: Core, loader: BlockLoader) -> None:
        self._core = core
        self._loader = loader

    def load(
        self,
        *,
        store: str,
        ids: Sequence[bytes],
        blocks: Sequence[int],
        deadline: Deadline,
        ahead: int | None = None,
    ) -> Load:
        """Begins to read blocks `ids` from the store's data address to physical `blocks`, the layers after
        the first `ahead` once it is released. Raises Unavailable when the loader is closed; what the store
        does shows in `Load.wait`."""
        core = self._core
        load = Load(len(blocks) * core.block_bytes)

        @contextmanager
        def destination(layer: int, first: int, count: int) -> Iterator[Sequence[Buffer]]:
            with core.memory.write_buffers(layer, blocks[first : first + count]) as buffers:
                yield buffers
            load._landed()

        load._begin(
            self._loader.load(
                store,
                core.info.fingerprint,
                core.layout,
                ids,
                destination,
                deadline,
                ahead=ahead,
                layers=core.layers,
                heads=core.heads,
            )
        )
        return load
