"""A head group from a debtor's side: several holders, each with a share of the KV heads of the same tokens
(Lamina, section 5.2: head-level partition). The debtor sees one creditor.

Heads are attended over independently, so that the parts' partials are put side by side and never merged. A
segment lies on all parts or on none; a part that fails takes the group's segments with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvcommons.errors import (
    CapacityExhausted,
    InvalidInput,
    KVCommonsError,
    StaleEpoch,
    UnsupportedParameter,
)
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.copying import BlockSave, read_request, write_request
from kvcommons.holder.exchange import Recipient, by_heads
from kvcommons.holder.head_store import WholeStore
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.rblock.heads import HeadPart, divided
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_UNDO_S = 2.0  # for what is taken back, of each part
# Of a segment that the group has no more: no holder ever had such an epoch.
_GONE = SegmentRef(handle=0, epoch=0)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Of each generation that its debtor may name: the parts' references."""

    generations: dict[int, tuple[SegmentRef, ...]]


class HeadGroup:
    """One creditor, for one debtor: a Creditor. A segment goes by its reference at the first part, with
    generations of the group's own."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, str]],
        layout: Layout,
        *,
        owner: str,
        model: bytes,
        store: WholeStore | None,
        lost: Callable[[Sequence[SegmentRef]], None],
        lease_s: float = 10.0,
        dialer: Dialer = UNSECURED,
        heads: HeadPart | None = None,
    ) -> None:
        """`addresses`: control and data, of each part in order; the others as at RemoteHolder. `layout`: of
        all heads. `store`: None where this process only attends. `heads`: of which it has queries, a rank's;
        None: all. Raises InvalidInput where the heads cannot be divided over so many."""
        self._shares = divided(len(addresses))
        self._shares[0].layout(layout)
        self._layout, self._store = layout, store
        self._attending = slice(0, len(addresses))  # parts that have keys for these queries
        if heads is not None:
            count, rest = divmod(len(addresses), heads.parts)
            if rest:
                raise InvalidInput(f"a head group of {len(addresses)} parts has none for {heads.parts} ranks")
            self._attending = slice(heads.number * count, (heads.number + 1) * count)
            self._layout = heads.layout(layout)
        self._lost = lost
        self._parts = [
            RemoteHolder(
                control,
                data,
                owner=owner,
                model=share.model(model),
                lost=partial(self._lose, share.number),
                lease_s=lease_s,
                dialer=dialer,
            )
            for share, (control, data) in zip(self._shares, addresses, strict=True)
        ]
        self._data = [dialer.client(data, "holder") for _, data in addresses]
        self.control_address = ", ".join(control for control, _ in addresses)
        self.data_address = ", ".join(data for _, data in addresses)
        self.waited: Callable[[float, bool], None] = lambda seconds, answered: None
        self._segments: dict[SegmentRef, _Segment] = {}
        self._generations = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        for part in self._parts:
            part.start()

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(part.close() for part in self._parts))
        self.close_data()

    def close_data(self) -> None:
        """As at RemoteHolder."""
        for part in self._parts:
            part.close_data()
        for client in self._data:
            client.close()

    def know(self, ref: SegmentRef, parts: Sequence[SegmentRef]) -> None:
        """A segment that another process of this instance has borrowed, until `forget`."""
        self._segments.setdefault(ref, _Segment({ref.generation: tuple(parts)}))

    def forget(self, ref: SegmentRef) -> None:
        self._segments.pop(ref, None)

    @property
    def borrowed(self) -> list[SegmentRef]:
        return list(self._segments)

    def places(self, ref: SegmentRef) -> list[tuple[str, SegmentRef]]:
        """Data address and reference at each part, in order. Raises StaleEpoch."""
        return [(part.data_address, own) for part, own in zip(self._parts, self._refs(ref), strict=True)]

    async def reserve(
        self, sequence: str, blocks: int, *, first_position: int, shift: int = 0, timeout_s: float
    ) -> SegmentRef:
        """On all parts, or on none: what the others gave is taken back where one refuses."""

        async def ask() -> SegmentRef:
            answers = await _all(
                part.reserve(
                    sequence, blocks, first_position=first_position, shift=shift, timeout_s=timeout_s
                )
                for part in self._parts
            )
            given = [one if isinstance(one, SegmentRef) else None for one in answers]
            if None in given:
                await self._take_back(given)
            refs = tuple(_answered(answers))
            self._segments[refs[0]] = _Segment({0: refs})
            return refs[0]

        call = self._spawn(ask())
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(self._unwanted)
            raise

    async def grow(self, ref: SegmentRef, blocks: int, *, timeout_s: float) -> None:
        """Parts that have grown where another could not keep their blocks for the next growth, or for the
        segment's end."""
        refs = self._refs(ref)
        _answered(await self._each(refs, lambda part, own: part.grow(own, blocks, timeout_s=timeout_s)))

    async def release(self, refs: Iterable[SegmentRef], *, timeout_s: float) -> None:
        gone = [segment for ref in refs if (segment := self._segments.pop(ref, None)) is not None]
        if gone:
            # Any generation: a release names segments.
            latest = [next(reversed(segment.generations.values())) for segment in gone]
            _answered(
                await _all(
                    part.release([own[number] for own in latest], timeout_s=timeout_s)
                    for number, part in enumerate(self._parts)
                )
            )

    async def load(
        self,
        ref: SegmentRef,
        store_address: str,
        block_ids: Sequence[bytes],
        *,
        first_block: int,
        store_control: str = "",
        timeout_s: float,
    ) -> int:
        """Through this process: a store's objects have all heads. The loader knows which store to call about
        corrupt ones."""
        deadline = Deadline.after(timeout_s)

        def write(layer: int, first: int, objects: Sequence[Buffer]) -> None:
            self.write_blocks(ref, layer, first_block + first, objects, deadline)

        assert self._store is not None, "this process only attends"
        return await self._store.load(store_address, block_ids, write, deadline)

    async def save(self, ref: SegmentRef, blocks: BlockSave, *, timeout_s: float) -> None:
        """Through this process, too; returns when the blocks wait in its write buffer."""

        def read(layer: int, objects: Sequence[Buffer], deadline: Deadline) -> None:
            self.read_blocks(ref, layer, blocks.first_block, objects, deadline)

        assert self._store is not None, "this process only attends"
        await self._store.save(blocks, read, timeout_s=timeout_s)

    async def freeze(self, ref: SegmentRef, until_block: int, *, timeout_s: float) -> SegmentRef:
        refs = self._refs(ref)
        answers = await self._each(refs, lambda part, own: part.freeze(own, until_block, timeout_s=timeout_s))
        frozen = [one if isinstance(one, SegmentRef) else None for one in answers]
        if None in frozen:
            thawing = zip(self._parts, frozen, strict=True)
            await _all(part.thaw(own, timeout_s=_UNDO_S) for part, own in thawing if own is not None)
        generation = next(self._generations)
        all_frozen = tuple(_answered(answers))
        self._segment(ref).generations[generation] = all_frozen
        return replace(ref, generation=generation)

    async def thaw(self, ref: SegmentRef, *, timeout_s: float) -> None:
        _answered(await self._each(self._refs(ref), lambda part, own: part.thaw(own, timeout_s=timeout_s)))

    async def trim(self, ref: SegmentRef, *, settlement: str = "", timeout_s: float) -> int:
        refs = self._refs(ref)
        counts = _answered(
            await self._each(
                refs, lambda part, own: part.trim(own, settlement=settlement, timeout_s=timeout_s)
            )
        )
        generations = self._segment(ref).generations
        for generation in [one for one in generations if one < ref.generation]:
            del generations[generation]  # all parts refuse it from now on
        return min(counts)

    async def copy_in(
        self,
        into: SegmentRef,
        data_address: str,
        source: SegmentRef,
        *,
        first_block: int,
        source_block: int,
        blocks: int,
        timeout_s: float,
    ) -> None:
        """Raises UnsupportedParameter: another holder's blocks have all heads, or others than a part's."""
        raise UnsupportedParameter(
            f"the head group at {self.data_address} copies no blocks from other holders: bring them home",
            param="data_address",
        )

    def write_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, objects: Sequence[Buffer], deadline: Deadline
    ) -> None:
        """Each part is sent its pieces of the buffers, as they lie."""
        with ExitStack() as under_way:
            calls = []
            for share, client, own in zip(self._shares, self._data, self._refs(ref), strict=True):
                request = write_request(own, layer, first_block, len(objects))
                pieces = share.pieces(objects)
                calls.append(under_way.enter_context(client.begin(request, pieces, deadline=deadline)))
            for call in calls:
                call.finish()

    def read_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, into: Sequence[Buffer], deadline: Deadline
    ) -> None:
        """The other way: each part's pieces are received where they belong."""
        with ExitStack() as under_way:
            calls = []
            for client, own in zip(self._data, self._refs(ref), strict=True):
                request = read_request(own, layer, first_block, len(into))
                calls.append(under_way.enter_context(client.begin(request, deadline=deadline)))
            for share, call in zip(self._shares, calls, strict=True):
                call.finish(share.pieces(into))

    def recipients(self, rows: Sequence[PlanRow]) -> list[Recipient]:
        """Each part that has some of this process's heads, for these. A row whose segment is gone is lost at
        the parts."""
        own = [list[PlanRow]() for _ in self._parts]
        for row in rows:
            segment = self._segments.get(row.ref)
            refs = segment.generations.get(row.generation) if segment is not None else None
            for some, ref in zip(own, refs or [_GONE] * len(own), strict=True):
                some.append(row.at(ref))
        each = list(zip(self._parts, own, strict=True))[self._attending]
        recipients = [one for part, some in each for one in part.recipients(some)]
        return by_heads(self._layout, recipients)

    def _segment(self, ref: SegmentRef) -> _Segment:
        segment = self._segments.get(ref)
        if segment is None:
            raise StaleEpoch(
                f"segment {ref.handle} of the head group at {self.data_address} was released, or a part lost "
                "it: its KV is gone, recompute it"
            )
        return segment

    def _refs(self, ref: SegmentRef) -> tuple[SegmentRef, ...]:
        refs = self._segment(ref).generations.get(ref.generation)
        if refs is None:
            raise StaleEpoch(
                f"segment {ref.handle} has gone on from generation {ref.generation}: its blocks have moved"
            )
        return refs

    async def _each(
        self,
        refs: Sequence[SegmentRef],
        call: Callable[[RemoteHolder, SegmentRef], Coroutine[Any, Any, T]],
    ) -> list[T | BaseException]:
        return await _all(call(part, own) for part, own in zip(self._parts, refs, strict=True))

    def _lose(self, number: int, refs: Sequence[SegmentRef]) -> None:
        """A part has these no more: the others' shares are of no use."""
        lost = set(refs)
        gone = [
            ref
            for ref, segment in self._segments.items()
            if any(own[number] in lost for own in segment.generations.values())
        ]
        for ref in gone:
            kept: list[SegmentRef | None] = list(next(iter(self._segments.pop(ref).generations.values())))
            kept[number] = None
            self._spawn(self._take_back(kept))
        if gone:
            self._lost(gone)

    def _unwanted(self, call: asyncio.Task[SegmentRef]) -> None:
        """Whoever asked has gone away."""
        if not call.cancelled() and call.exception() is None:
            self._spawn(self._quietly(self.release([call.result()], timeout_s=_UNDO_S)))

    async def _take_back(self, refs: Sequence[SegmentRef | None]) -> None:
        """At each part what it gave, if it did. A part that does not hear of it reclaims it when the lease
        runs out."""
        for error in await _all(
            part.release([ref], timeout_s=_UNDO_S)
            for part, ref in zip(self._parts, refs, strict=True)
            if ref is not None
        ):
            if isinstance(error, BaseException):
                _LOG.info("a head group's blocks come free by their lease: %s", error)

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except KVCommonsError as error:
            _LOG.info("a head group's blocks come free by their lease: %s", error.message)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


# What a debtor borrows from. The engine and what moves KV ask for no more than both can do; RemoteHolder says
# what each method does and raises.
Creditor: TypeAlias = RemoteHolder | HeadGroup


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """At once, to the end of each: what it answered or raised."""
    return list(await asyncio.gather(*calls, return_exceptions=True))


def _answered(answers: Sequence[T | BaseException]) -> list[T]:
    """Raises where one did not: rather for one that failed than for one that had no room."""
    errors = [one for one in answers if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, CapacityExhausted)):
        raise error
    return [one for one in answers if not isinstance(one, BaseException)]
