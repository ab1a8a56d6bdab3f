"""The shell around what the queue looks ahead to. It asks the store where the prefixes of waiting requests
lie, and sends the store hints of what the queue will need next.

Neither holds up the queue: both run beside it, bounded in number, size and time, and requests start in the
order that the last answers give. A store that does not answer costs the order its knowledge, never a request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from kvcommons.errors import KVCommonsError
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.ledger_pb2 import Instance
from services.router.admission.hints import StoreHints, WaitingRequest
from services.router.admission.prefixes import DeviceBlocks, common, distance_of
from services.router.admission.queue import QueuedRequest, RequestQueue
from services.router.fleet.fleet import Fleet

log = logging.getLogger(__name__)

_INTERVAL_S = 0.1
_MATCHES_MAX = 8  # calls at once
_FRESH_S = 1.0  # how long an answer counts before it is asked again
_HINT_S = 0.5
_HINT_TTL_S = 5.0
_CALL_S = 1.0
_BACKOFF_S = 1.0  # after a call failed


class _Lookup:
    """What the store said of a request's blocks, and when."""

    __slots__ = ("at_s", "number", "tiers")

    def __init__(self, number: int) -> None:
        self.number = number  # of the request, for hints
        self.at_s = float("-inf")
        self.tiers: Sequence[int] = ()

    def learn(self, own: Sequence[bytes], ids: Sequence[bytes], tiers: Sequence[int], at_s: float) -> None:
        """From what the store said of a prompt that begins alike."""
        alike = common(own, ids)
        rest = self.tiers[alike:] if len(tiers) >= alike else ()
        self.tiers = (*tiers[:alike], *rest)
        if _answers(ids, own):
            self.at_s = at_s


def _answers(asked: Sequence[bytes], own: Sequence[bytes]) -> bool:
    """What the store says of one prompt is as good as an answer of another's own where most blocks are the
    same."""
    return asked[0] == own[0] and 2 * common(asked, own) >= len(own)


class QueueLookAhead:
    """`Admission` reports requests to it, and `run` does the rest. Belongs to the event loop."""

    def __init__(
        self,
        queue: RequestQueue,
        fleet: Fleet,
        *,
        router: str,
        requests_max: int,
        asks_distance: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests_max`: of how many of the next requests the store gets hints; 0: none."""
        self.asks_distance = asks_distance
        self._queue = queue
        self._fleet = fleet
        self._router = router
        self._requests_max = requests_max
        self._clock = clock
        self._device = DeviceBlocks()
        self._lookups: dict[QueuedRequest, _Lookup] = {}  # of the requests that wait
        self._wake = asyncio.Event()
        self._hinted_s = float("-inf")
        self._hinted: set[str] = set()  # stores that remember something of ours
        self._stores: dict[str, StoreHints] = {}
        # A router that restarts under its name does not use a number again that a store remembers.
        self._numbers = itertools.count(time.time_ns())

    def enqueued(self, request: QueuedRequest) -> None:
        """The request waits from now on."""
        ids = request.prefix.block_ids
        if not ids:
            return
        lookup = _Lookup(next(self._numbers))
        known = (other for other in self._lookups if other.prefix.block_ids[0] == ids[0])
        like = next(known, None)
        if like is not None:
            lookup.learn(ids, like.prefix.block_ids, self._lookups[like].tiers, self._lookups[like].at_s)
        self._lookups[request] = lookup
        self._measure(request)
        self._wake.set()

    def started(self, request: QueuedRequest) -> None:
        """Its prefix will be on the device: others that begin alike come nearer, and those whose blocks go
        for it are farther away."""
        self._lookups.pop(request, None)
        ids = request.prefix.block_ids
        if not self.asks_distance or not ids:
            return
        prefills = self._fleet.instances("prefill")
        changed = self._device.used(ids, sum(instance.load.total_blocks for instance in prefills))
        for other in self._lookups:
            if other.prefix.block_ids[0] in changed:
                self._measure(other)

    def dequeued(self, request: QueuedRequest) -> None:
        """The request waits no longer."""
        self._lookups.pop(request, None)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._wake.wait()
            if not self._lookups and not self._hinted:
                self._wake.clear()
                continue
            pause_s = _INTERVAL_S
            try:
                await self._refresh()
                await self._send_hints()
            except KVCommonsError as error:
                log.debug("the store heard nothing of the queue, which is tried again: %s", error)
                if not self._lookups:
                    self._hinted.clear()  # what they remember runs out by itself
                pause_s = _BACKOFF_S
            except Exception:
                log.exception("looking ahead failed")
                pause_s = _BACKOFF_S
            await asyncio.sleep(pause_s)

    async def _refresh(self) -> None:
        if not self.asks_distance:
            return
        before_s = self._clock() - _FRESH_S
        stale = [request for request, lookup in self._lookups.items() if lookup.at_s < before_s]
        stale.sort(key=lambda request: self._lookups[request].at_s)
        asked: list[QueuedRequest] = []
        for request in stale:
            if len(asked) == _MATCHES_MAX:
                break
            if not any(_answers(other.prefix.block_ids, request.prefix.block_ids) for other in asked):
                asked.append(request)
        await asyncio.gather(*(self._match(request) for request in asked))

    async def _match(self, request: QueuedRequest) -> None:
        store = self._fleet.homed(request.prefix.home).store()
        if store is None:
            return
        match = pb.MatchRequest(model=request.prefix.model, block_ids=request.prefix.block_ids, peek=True)
        reply = await self._fleet.blocks(store).Match(match, timeout=_CALL_S)
        self._learn(request.prefix.block_ids, reply.tiers)

    def _learn(self, ids: Sequence[bytes], tiers: Sequence[int]) -> None:
        """An answer holds for all requests that begin alike, as far as they do: one lookup serves many."""
        now_s = self._clock()
        for request, lookup in self._lookups.items():
            if request.prefix.block_ids[0] == ids[0]:
                lookup.learn(request.prefix.block_ids, ids, tiers, now_s)
                self._measure(request)

    async def _send_hints(self) -> None:
        """Sends each store a hint of the requests whose blocks it has. A store that was sent one before and
        has none of them any more gets an empty one."""
        now_s = self._clock()
        if not self._requests_max or (self._lookups and now_s - self._hinted_s < _HINT_S):
            return
        stores = {store.id: store for store in self._fleet.stores()}
        waiting: dict[str, list[WaitingRequest]] = {store_id: [] for store_id in stores}
        for request, starts_in_s in self._queue.look_ahead(self._requests_max, now_s):
            store = self._fleet.homed(request.prefix.home).store()
            lookup = self._lookups.get(request)
            if lookup is not None and store is not None and store.id in waiting:
                waiting[store.id].append(WaitingRequest(lookup.number, request.prefix, starts_in_s))
        self._hinted_s = now_s
        recipients = {store_id for store_id, requests in waiting.items() if requests} | (
            stores.keys() & self._hinted
        )
        self._stores = {store_id: self._stores.get(store_id) or StoreHints() for store_id in recipients}
        calls = (self._send_hint(stores[store_id], waiting[store_id]) for store_id in recipients)
        results = await asyncio.gather(*calls, return_exceptions=True)
        self._hinted = {store_id for store_id, requests in waiting.items() if requests}
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _send_hint(self, store: Instance, requests: Sequence[WaitingRequest]) -> None:
        hints = self._stores[store.id]
        hint = hints.next(self._router, requests, _HINT_TTL_S)
        try:
            reply = await self._fleet.blocks(store).Hint(hint, timeout=_CALL_S)
        except BaseException:
            hints.failed()
            raise
        hints.answered(hint, reply)

    def _measure(self, request: QueuedRequest) -> None:
        ids = request.prefix.block_ids
        request.on_device = self._device.leading(ids)
        request.distance = distance_of(len(ids), request.on_device, self._lookups[request].tiers)
