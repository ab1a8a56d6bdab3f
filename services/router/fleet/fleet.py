"""The instances that this router knows, the channels to them, and what it has under way on each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Protocol

import grpc.aio

from kvcommons.engine.iteration_costs import IterationCosts, IterationWork
from kvcommons.errors import ContextLengthExceeded, Loading, ModelNotFound, Overloaded, StoreUnavailable
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.decode_pb2_grpc import DecodeStub
from kvcommons.pb.holder_pb2_grpc import HolderStub
from kvcommons.pb.kvstore_pb2_grpc import BlocksStub, SessionsStub
from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.pb.ledger_pb2_grpc import LedgerStub
from kvcommons.pb.prefill_pb2_grpc import PrefillStub
from kvcommons.security.roles import Role
from services.router.capacity.occupancy import Occupancy, Reservation
from services.router.fleet.listening import Listening
from services.router.fleet.pairing import (
    Pair,
    capacity_blocks,
    choose_pair,
    common_records,
    of_model,
    served_models,
    stores_of,
    unfit_pools,
    why_none_serves,
)

if TYPE_CHECKING:
    from kvcommons.pb.decode_pb2_grpc import DecodeAsyncStub
    from kvcommons.pb.holder_pb2_grpc import HolderAsyncStub
    from kvcommons.pb.kvstore_pb2_grpc import BlocksAsyncStub, SessionsAsyncStub
    from kvcommons.pb.ledger_pb2_grpc import LedgerAsyncStub
    from kvcommons.pb.prefill_pb2_grpc import PrefillAsyncStub

# All kinds, in the order in which they are shown.
SERVICES = (
    "router", "prefill", "prefill_stage", "decode", "decode_stage", "attention_pool", "kvstore", "ledger",
)  # fmt: skip
# A channel to an address that is in nobody's view any more is closed after so long.
_CHANNEL_IDLE_S = 120.0
# Capacity that has been gone for no longer may come back: an instance that died is started again.
_CAPACITY_KEPT_S = 60.0


class View(Protocol):
    """What is asked of `kvcommons.rpc.directory.Directory`."""

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]: ...

    def suspect(self, instance_id: str) -> None: ...

    def silent_s(self, instance_id: str) -> float | None: ...

    @property
    def records(self) -> str: ...


class Fleet:
    """All of it on the event loop's thread."""

    def __init__(
        self,
        view: View,
        open_channel: Callable[[str, Role], grpc.aio.Channel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._open_channel = open_channel
        self._clock = clock
        # By address and role; and when each was used last.
        self._channels: dict[tuple[str, Role], tuple[grpc.aio.Channel, float]] = {}
        self._known: dict[str, ModelInfo] = {}
        self._under_way: Counter[str] = Counter()
        self.listening = Listening(clock)
        self.occupancy = Occupancy()
        self._home = b""  # the key whose home is `store`
        self._largest_capacity: dict[bytes, tuple[int, float]] = {}  # by model, and when it was seen

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
        """The pair to try next for a sequence of `tokens` and one more token. `prefix` has the identities of
        its full blocks. Raises what `check` raises."""
        self.check(model, tokens)
        decodes = of_model(self.update(), model.fingerprint)
        pools = of_model(self._view.instances("attention_pool"), model.fingerprint)
        shared_blocks = {
            instance.id: self.occupancy.shared_blocks(instance.id, prefix) for instance in decodes
        }
        free_blocks = self.occupancy.free_blocks(decodes, pools)
        return choose_pair(
            prefills=self._view.instances("prefill"),
            decodes=[self.occupancy.projected(instance) for instance in decodes],
            free_blocks={name: blocks + shared_blocks[name] for name, blocks in free_blocks.items()},
            shared_blocks=shared_blocks,
            model=model.fingerprint,
            under_way=self._under_way,
            affinity=affinity,
            blocks=blocks_of(model, tokens),
            failed=failed,
        )

    def check(self, model: ModelInfo, tokens: int, param: str = "messages") -> None:
        """Raises ContextLengthExceeded for a sequence that no instance can hold, however long it waits."""
        blocks = blocks_of(model, tokens)
        capacity = self._capacity(model.fingerprint)
        if capacity is not None and blocks > capacity:
            unfit = "".join(f"; {pool} lends nothing, for {why}" for pool, why in self.unfit_pools().items())
            missing = blocks - capacity
            raise ContextLengthExceeded.of(
                capacity * model.block_tokens,
                f"a sequence of {tokens} tokens needs {blocks} blocks of KV, and decode has {capacity} in "
                f"all: {missing} are missing, which is {missing * model.block_tokens} tokens; "
                f"shorten the prompt, or raise capacity_tokens{unfit}",
                param=param,
            )

    def capacity_tokens(self, model: ModelInfo) -> int | None:
        """Of the longest sequence that any instance can hold, with all that is lent to it; None where no
        heartbeat has come yet."""
        capacity = self._capacity(model.fingerprint)
        return None if capacity is None else capacity * model.block_tokens

    def unfit_pools(self) -> dict[str, str]:
        """Attention pools that can lend to no decode instance, by id: why not."""
        return unfit_pools(self._view.instances("decode"), self._view.instances("attention_pool"))

    def update(self) -> list[Instance]:
        """Takes in what the last heartbeats say, and returns the decode instances. Call it when some came."""
        decodes = self._view.instances("decode")
        self.occupancy.update(decodes, self._view.instances("attention_pool"))
        return decodes

    def shared_blocks(self, model: ModelInfo, prefix: Sequence[bytes]) -> int:
        """How many leading blocks of `prefix` running sequences have, at the instance that has most of
        them."""
        decodes = of_model(self._view.instances("decode"), model.fingerprint)
        return max((self.occupancy.shared_blocks(instance.id, prefix) for instance in decodes), default=0)

    def largest_free(self, model: ModelInfo) -> int | None:
        """Blocks of the largest sequence that likely fits now; None where no decode instance is ready."""
        decodes = of_model(self.update(), model.fingerprint)
        pools = of_model(self._view.instances("attention_pool"), model.fingerprint)
        return self.occupancy.largest_free(decodes, pools)

    def _capacity(self, model: bytes) -> int | None:
        """Blocks of the largest sequence that fitted at any time of the last minute; None where no heartbeat
        has come yet."""
        now_s, known = self._clock(), self._largest_capacity.get(model)
        capacity = capacity_blocks(
            self._view.instances("decode"), self._view.instances("attention_pool"), model
        )
        if (
            known is not None
            and now_s - known[1] < _CAPACITY_KEPT_S
            and (capacity is None or capacity < known[0])
        ):
            return known[0]
        if capacity is not None:
            self._largest_capacity[model] = capacity, now_s
        return capacity

    def prompt_seconds(self, model: ModelInfo, positions: range) -> float:
        """What computing these of a prompt takes, by what instances say of themselves, where that is
        quickest; 0 while nobody has measured it."""
        prefills = of_model(self._view.instances("prefill"), model.fingerprint)
        found = [
            IterationCosts.of(one.load.costs).prompt_seconds(
                positions, one.load.chunk_tokens or 1, one.stage.stages or 1
            )
            for one in prefills
        ]
        return min(filter(None, found), default=0.0)

    def token_seconds(self, model: ModelInfo) -> float:
        """What a token of one sequence alone takes at least, where that is quickest; 0 while nobody has
        measured it."""
        decodes = of_model(self._view.instances("decode"), model.fingerprint)
        found = [IterationCosts.of(one.load.costs).seconds(IterationWork(rows=1)) for one in decodes]
        return min(filter(None, found), default=0.0)

    def prefills(self, model: ModelInfo) -> int:
        """How many instances compute prompts of it."""
        return len(of_model(self._view.instances("prefill"), model.fingerprint))

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        return self._view.instances(service, ready=ready)

    def at(self, data_address: str) -> str | None:
        """The id of the holder there, as far as it is known."""
        for service in ("decode", "attention_pool"):
            for instance in self._view.instances(service, ready=False):
                if instance.data_address == data_address:
                    return instance.id
        return None

    def suspect(self, instance_id: str) -> None:
        """A call could not reach it: it is left out until a newer heartbeat."""
        self._view.suspect(instance_id)

    def homed(self, home: bytes) -> Fleet:
        """The same fleet, seen from a key: `stores` begin with the key's home."""
        bound = copy(self)
        bound._home = home
        return bound

    def store(self) -> Instance | None:
        """The kvstore whose blocks are of use here; None while none is there."""
        return next(iter(self.stores()), None)

    def stores(self) -> list[Instance]:
        """All kvstores whose session records are the stack's, in the order in which to ask: those that are
        well before others, and the home before others."""
        ready = {store.id for store in self._view.instances("kvstore")}
        known = self._view.instances("kvstore", ready=False)
        found = stores_of(known, self._view.records, self._home)
        return sorted(found, key=lambda store: store.id not in ready)

    @property
    def records(self) -> str:
        """Where session records lie; empty while that is not known."""
        return self._view.records or common_records(self._view.instances("kvstore", ready=False))

    def decode(self, instance: Instance) -> DecodeAsyncStub:
        return DecodeStub(self._channel(instance.control_address, "decode"))

    def prefill(self, instance: Instance) -> PrefillAsyncStub:
        return PrefillStub(self._channel(instance.control_address, "prefill"))

    def ledger(self, instance: Instance) -> LedgerAsyncStub:
        return LedgerStub(self._channel(instance.control_address, "ledger"))

    def holder(self, instance: Instance) -> HolderAsyncStub:
        return HolderStub(self._channel(instance.control_address, "holder"))

    def silent_s(self, instance_id: str) -> float | None:
        """So old is what the registry says of its load; None: not known."""
        return self._view.silent_s(instance_id)

    def blocks(self, store: Instance) -> BlocksAsyncStub:
        return BlocksStub(self._channel(store.control_address, "kvstore"))

    def sessions(self, store: Instance | None) -> SessionsAsyncStub:
        """Raises StoreUnavailable for None: none serves."""
        if store is None:
            stores = self._view.instances("kvstore", ready=False)
            raise StoreUnavailable(why_none_serves(stores, self._view.records), retry_after_ms=1000)
        return SessionsStub(self._channel(store.control_address, "kvstore"))

    @contextmanager
    def reserve(self, pair: Pair, blocks: int, prefix: Sequence[bytes] = ()) -> Iterator[Reservation]:
        """Counts a choice as under way on both instances, and its blocks as reserved, until it is left. The
        caller reports to `occupancy` what becomes of the reservation meanwhile."""
        ids = (pair.prefill.id, pair.decode.id)
        self._under_way.update(ids)
        reservation = self.occupancy.reserve(pair.decode.id, blocks, prefix)
        try:
            yield reservation
        except Overloaded:
            if reservation.change is None:
                self.occupancy.refuse(reservation, reservation.local)
            raise
        finally:
            self.occupancy.end(reservation)
            self._under_way.subtract(ids)
            for instance_id in ids:
                if self._under_way[instance_id] <= 0:
                    del self._under_way[instance_id]

    async def close(self) -> None:
        await self.listening.close()
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        for channel in channels:
            await channel.close(None)

    async def prune(self) -> None:
        """Closes channels to addresses that are gone. Call it now and then."""
        now_s = self._clock()
        services = ("prefill", "decode", "attention_pool", "kvstore", "ledger")
        alive = {
            instance.control_address
            for service in services
            for instance in self._view.instances(service, ready=False)
        }
        for key, (channel, used_s) in list(self._channels.items()):
            if key[0] not in alive and now_s - used_s > _CHANNEL_IDLE_S:
                del self._channels[key]
                await channel.close(None)

    def _channel(self, address: str, role: Role) -> grpc.aio.Channel:
        kept = self._channels.get((address, role))
        channel = kept[0] if kept else self._open_channel(address, role)
        self._channels[address, role] = (channel, self._clock())
        return channel


def blocks_of(model: ModelInfo, tokens: int) -> int:
    """Of a sequence of `tokens`, and one more."""
    return -(-(tokens + 1) // model.block_tokens)
