"""The creditors that this instance knows: holders, and head groups of several that are one creditor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvcommons.errors import UnsupportedParameter
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.head_group import Creditor, HeadGroup
from kvcommons.holder.head_store import WholeStore
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.tensor_rank import ALONE, TensorRank
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.dialer import UNSECURED, Dialer
from services.decode.periodic import PeriodicTask

log = logging.getLogger(__name__)

Waited = Callable[[str, float, bool], None]
Lost = Callable[[Creditor, Sequence[SegmentRef]], None]

LOOK_S = 15.0  # how often it is seen who is not needed any more
# Longer by a look than any call to a creditor takes: nothing is under way there any more.
QUIET_S = 30.0
FORGET_S = 300.0  # since a ledger named the creditor last


@dataclass(slots=True, kw_only=True)
class _KnownCreditor:
    holder: Creditor
    instance_id: str
    control_addresses: frozenset[str]
    members: list[str] = field(default_factory=list)  # of a head group, instance ids
    named_s: float = 0.0  # when a ledger named it last
    needed_s: float = 0.0  # when it was last seen to have a segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Debtor:
    """Who borrows, and for which model."""

    instance_id: str
    model: bytes
    block_tokens: int
    store: WholeStore | None = None  # None: nothing is borrowed of head groups
    rank: TensorRank = ALONE  # the one that borrows

    def attends_at(self, instance: ledger_pb2.Instance) -> bool:
        """Whether each of its ranks finds holders there that have its heads and no others."""
        ranks = self.rank.ranks
        return ranks == 1 or (bool(instance.members) and not len(instance.members) % ranks)

    @property
    def shortfall(self) -> str:
        """Why others than ledgers know may lend nothing; it is appended to error messages."""
        ranks = self.rank.ranks
        return (
            f"; {ranks} ranks attend at head groups only, of {ranks} parts or a multiple" if ranks > 1 else ""
        )


class Creditors:
    """By their addresses. Belongs to the event loop."""

    def __init__(
        self,
        debtor: Debtor,
        *,
        lease_s: float,
        lost: Lost,
        waited: Waited,
        used: Callable[[], set[Creditor]] = set,
        dialer: Dialer = UNSECURED,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[..., RemoteHolder] = RemoteHolder,
    ) -> None:
        """`lost` is called with the segments that a creditor has no more, `waited` with a creditor's data
        address, how long an iteration waited for it, and whether it answered. Creditors that `used` returns
        are kept, and those from which segments are borrowed. `connect` makes the client of a holder."""
        self._debtor = debtor
        self._lease_s = lease_s
        self._lost = lost
        self._waited = waited
        self._used = used
        self._dialer = dialer
        self._clock = clock
        self._connect = connect
        self._task = PeriodicTask("creditors", LOOK_S, self.forget)
        self._known: dict[tuple[tuple[str, str], ...], _KnownCreditor] = {}  # by control and data addresses

    async def close(self) -> None:
        await self._task.close()
        await asyncio.gather(*(known.holder.close() for known in self._known.values()))

    def of(self, instance: ledger_pb2.Instance) -> Creditor:
        """As the ledger names it. Raises UnsupportedParameter for a head group where there are none."""
        members = list(instance.members) or [instance]
        places = tuple((one.control_address, one.data_address) for one in members)
        known = self._known.get(places)
        if known is None:
            holder = self._group(places) if instance.members else self._single(*places[0])
            holder.waited = partial(self._waited, holder.data_address)
            holder.start()
            controls = frozenset(control for control, _ in places)
            known = _KnownCreditor(holder=holder, instance_id=instance.id, control_addresses=controls)
            self._known[places] = known
            self._task.start()
        known.named_s = self._clock()
        known.instance_id = instance.id  # another life of it, maybe
        known.members = [one.id for one in instance.members]
        return known.holder

    def names(self) -> dict[Creditor, str]:
        """Instance ids; a head group goes by its first part's."""
        return {known.holder: known.instance_id for known in self._known.values()}

    def find(self, instance_id: str) -> Creditor | None:
        """The one, or the head group of the one; None where nothing was ever borrowed from it."""
        for known in reversed(self._known.values()):  # of a group whose parts changed, as it is now
            if instance_id in (known.instance_id, *known.members):
                return known.holder
        return None

    async def forget(self) -> None:
        """Closes those that nothing was seen to use for a while, and that nobody names any more: a ledger
        has not for long, or has named another one since with a part of the same address (a head group in
        which a part was started again elsewhere)."""
        now, used = self._clock(), self._used()
        gone = []
        for places, known in list(self._known.items()):
            if known.holder.borrowed or known.holder in used:
                known.needed_s = now
            quiet_s, unnamed_s = now - max(known.needed_s, known.named_s), now - known.named_s
            if quiet_s >= QUIET_S and (unnamed_s >= FORGET_S or self._succeeded(known)):
                gone.append(self._known.pop(places))
        for known in gone:
            log.info("a creditor is forgotten", extra={"creditor": known.instance_id})
        await asyncio.gather(*(known.holder.close() for known in gone))

    def _succeeded(self, known: _KnownCreditor) -> bool:
        return any(
            other.named_s > known.named_s and other.control_addresses & known.control_addresses
            for other in self._known.values()
        )

    def _single(self, control_address: str, data_address: str) -> RemoteHolder:
        holder: RemoteHolder = self._connect(
            control_address,
            data_address,
            owner=self._debtor.instance_id,
            model=self._debtor.model,
            lost=lambda refs: self._lost(holder, refs),
            lease_s=self._lease_s,
            dialer=self._dialer,
        )
        return holder

    def _group(self, places: Sequence[tuple[str, str]]) -> HeadGroup:
        store = self._debtor.store
        if store is None:
            raise UnsupportedParameter("this instance borrows nothing of head groups", param="heads")
        group = HeadGroup(
            places,
            store.layout,
            owner=self._debtor.instance_id,
            model=self._debtor.model,
            store=store,
            lost=lambda refs: self._lost(group, refs),
            lease_s=self._lease_s,
            dialer=self._dialer,
            heads=self._debtor.rank.kv_part(store.layout.kv_heads),
        )
        return group


def devices(instance: ledger_pb2.Instance) -> int:
    """That attend at the same time over what lies there."""
    return max(1, len(instance.members))
