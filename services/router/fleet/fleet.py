"""The instances this router knows, the channels to them, and what it has under way on each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Protocol

import grpc.aio

from kvcommons.errors import ContextLengthExceeded, Loading, ModelNotFound, Overloaded, StoreUnavailable
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.decode_pb2_grpc import DecodeStub
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub, SessionsStub
from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.pb.prefill_pb2_grpc import PrefillStub
from kvcommons.shards import ShardView
from services.router.capacity.occupancy import Rooms, Taken
from services.router.fleet.placement import (
    Pair,
    choose_pair,
    of_model,
    room_blocks,
    served_models,
    unfit_pools,
)
from services.router.shards import home_of, shard_of

if TYPE_CHECKING:
    from kvcommons.pb.decode_pb2_grpc import DecodeAsyncStub
    from kvcommons.pb.kvstore_pb2_grpc import BlocksAsyncStub, SessionsAsyncStub
    from kvcommons.pb.prefill_pb2_grpc import PrefillAsyncStub

# A channel to an address that is in nobody's view any more is closed after so long.
_CHANNEL_IDLE_S = 120.0
# Room that is gone for no longer may come back: an instance that died is started again.
_ROOM_S = 60.0


class View(Protocol):
    """What is asked of `kvcommons.rpc.directory.Directory`."""

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]: ...

    def suspect(self, instance_id: str) -> None: ...

    @property
    def shards(self) -> ShardView | None: ...


class Fleet:
    """All of it on the event loop's thread."""

    def __init__(
        self,
        view: View,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._open_channel = open_channel
        self._clock = clock
        self._channels: dict[str, tuple[grpc.aio.Channel, float]] = {}  # and when it was used last
        self._known: dict[str, ModelInfo] = {}
        self._own: Counter[str] = Counter()
        self.rooms = Rooms()
        self._home = b""  # the key whose home is `store`
        self._rooms: dict[bytes, tuple[int, float]] = {}  # the largest of late by model, and when it was seen

    def models(self) -> list[ModelInfo]:
        """Those that a prefill and a decode are ready to serve; most instances first, a name once."""
        served = served_models(self._view.instances("prefill"), self._view.instances("decode"))
        found: dict[str, ModelInfo] = {}
        for instance in served:
            found.setdefault(instance.model.name, instance.model)
        self._known.update(found)
        return list(found.values())

    def model(self, name: str | None) -> ModelInfo:
        """The model a request means; None means the only one, or the first.

        One that was served before is given though its instances are away: a request waits for them for a
        while. Raises ModelNotFound, or Loading when there has been none at all.
        """
        served = {model.name: model for model in self.models()} or self._known
        if not served:
            raise Loading("no model is ready yet; try again in some seconds", retry_after_ms=2000)
        if name is None:
            return next(iter(served.values()))
        if name not in served and name not in self._known:
            known = ", ".join(sorted(served))
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here; served: {known}", param="model"
            )
        return served.get(name) or self._known[name]

    def place(
        self,
        model: ModelInfo,
        *,
        affinity: str,
        tokens: int,
        failed: Collection[str],
        prefix: Sequence[bytes] = (),
    ) -> Pair | None:
        """The pair to try next for a sequence of `tokens`, and one more. `prefix`: identities of its full
        blocks. Raises what `check` does."""
        self.check(model, tokens)
        decodes = of_model(self.look(), model.fingerprint)
        pools = of_model(self._view.instances("attention_pool"), model.fingerprint)
        shared = {instance.id: self.rooms.shared(instance.id, prefix) for instance in decodes}
        rooms = self.rooms.each(decodes, pools)
        return choose_pair(
            prefills=self._view.instances("prefill"),
            decodes=[self.rooms.now(instance) for instance in decodes],
            rooms={instance_id: room + shared[instance_id] for instance_id, room in rooms.items()},
            shared=shared,
            model=model.fingerprint,
            own=self._own,
            affinity=affinity,
            blocks=blocks_of(model, tokens),
            failed=failed,
        )

    def check(self, model: ModelInfo, tokens: int) -> None:
        """Raises ContextLengthExceeded for a sequence that has room nowhere, however long it waits."""
        blocks = blocks_of(model, tokens)
        room = self._room(model.fingerprint)
        if room is not None and blocks > room:
            unfit = "".join(f"; {pool} lends nothing, for {why}" for pool, why in self.unfit_pools().items())
            raise ContextLengthExceeded(
                f"a sequence of {tokens} tokens needs {blocks} blocks of KV, and decode has {room} in all: "
                f"shorten the prompt, or raise capacity_tokens{unfit}",
                param="messages",
            )

    def unfit_pools(self) -> dict[str, str]:
        """Attention pools that can lend to no decode instance, by id: why not."""
        return unfit_pools(self._view.instances("decode"), self._view.instances("attention_pool"))

    def look(self) -> list[Instance]:
        """Hears what the last heartbeats say; the decode instances. Call it when some have come."""
        decodes = self._view.instances("decode")
        self.rooms.hear(decodes, self._view.instances("attention_pool"))
        return decodes

    def shared(self, model: ModelInfo, prefix: Sequence[bytes]) -> int:
        """Leading blocks of `prefix` that running sequences have, at the instance that has most of them."""
        decodes = of_model(self._view.instances("decode"), model.fingerprint)
        return max((self.rooms.shared(instance.id, prefix) for instance in decodes), default=0)

    def room_now(self, model: ModelInfo) -> int | None:
        """Blocks of the largest sequence that likely has room now; None where no decode is ready."""
        decodes = of_model(self.look(), model.fingerprint)
        pools = of_model(self._view.instances("attention_pool"), model.fingerprint)
        return self.rooms.largest(decodes, pools)

    def _room(self, model: bytes) -> int | None:
        """Of late: None where nobody has said yet."""
        now_s, known = self._clock(), self._rooms.get(model)
        room = room_blocks(self._view.instances("decode"), self._view.instances("attention_pool"), model)
        if known is not None and now_s - known[1] < _ROOM_S and (room is None or room < known[0]):
            return known[0]
        if room is not None:
            self._rooms[model] = room, now_s
        return room

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        return self._view.instances(service, ready=ready)

    def suspect(self, instance_id: str) -> None:
        """A call could not reach it: it is left out until a newer heartbeat."""
        self._view.suspect(instance_id)

    def homed(self, home: bytes) -> Fleet:
        """The same fleet, seen from a key: `store` is the key's home."""
        bound = copy(self)
        bound._home = home
        return bound

    def store(self) -> Instance | None:
        """The kvstore that has what this is about; None while it is not known, or away."""
        return home_of(self._view.shards, self._stores(), self._home)

    def shard(self, name: str) -> Instance | None:
        """A kvstore by its shard's name; "" is one that stands alone."""
        return shard_of(self._stores(), name)

    def stores(self) -> list[Instance]:
        """All kvstores that serve and are there."""
        found = (self.shard(name) for name in self.serving)
        return [store for store in found if store is not None]

    @property
    def serving(self) -> tuple[str, ...]:
        """The names of the shards that serve; of one that stands alone, ""."""
        return self._view.shards.serving if self._view.shards is not None else ("",)

    @property
    def shards(self) -> ShardView | None:
        """Who of the kvstores serves, where a ledger says so."""
        return self._view.shards

    def _stores(self) -> list[Instance]:
        ready = self._view.instances("kvstore")
        known = self._view.instances("kvstore", ready=False)
        return [*ready, *(store for store in known if store not in ready)]

    def decode(self, instance: Instance) -> DecodeAsyncStub:
        return DecodeStub(self._channel(instance.control_address))

    def prefill(self, instance: Instance) -> PrefillAsyncStub:
        return PrefillStub(self._channel(instance.control_address))

    def blocks(self, store: Instance) -> BlocksAsyncStub:
        return BlocksStub(self._channel(store.control_address))

    def sessions(self, store: Instance | None) -> SessionsAsyncStub:
        """Raises StoreUnavailable for None: the store is not known."""
        if store is None:
            raise StoreUnavailable(
                "no session store is there; try again in some seconds", retry_after_ms=1000
            )
        return SessionsStub(self._channel(store.control_address))

    @contextmanager
    def engaged(self, pair: Pair, blocks: int, prefix: Sequence[bytes] = ()) -> Iterator[Taken]:
        """Counts a choice as under way on both instances, and its blocks as taken: tell `rooms` of what
        becomes of them."""
        ids = (pair.prefill.id, pair.decode.id)
        self._own.update(ids)
        taken = self.rooms.take(pair.decode.id, blocks, prefix)
        try:
            yield taken
        except Overloaded:
            if taken.change is None:
                self.rooms.refused(taken, taken.here)
            raise
        finally:
            self.rooms.ended(taken)
            self._own.subtract(ids)
            for instance_id in ids:
                if self._own[instance_id] <= 0:
                    del self._own[instance_id]

    async def close(self) -> None:
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        for channel in channels:
            await channel.close(None)

    async def prune(self) -> None:
        """Closes channels to addresses that are gone. Call it now and then."""
        now_s = self._clock()
        services = ("prefill", "decode", "kvstore")
        alive = {
            instance.control_address
            for service in services
            for instance in self._view.instances(service, ready=False)
        }
        for address, (channel, used_s) in list(self._channels.items()):
            if address not in alive and now_s - used_s > _CHANNEL_IDLE_S:
                del self._channels[address]
                await channel.close(None)

    def _channel(self, address: str) -> grpc.aio.Channel:
        kept = self._channels.get(address)
        channel = kept[0] if kept else self._open_channel(address)
        self._channels[address] = (channel, self._clock())
        return channel


def blocks_of(model: ModelInfo, tokens: int) -> int:
    """Of a sequence of `tokens`, and one more."""
    return -(-(tokens + 1) // model.block_tokens)
