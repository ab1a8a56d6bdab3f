"""Loans of memory, from the debtor's side: found through the ledger, leased, given back.

The contract protocol of Infinite-LLM, section 4.4: up to three candidates, asked in turn; a refusal is
reported. Leases are renewed with the creditors themselves, so that loans outlive an outage of ledger and
etcd.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvcommons.engine.sequence import RemoteRun
from kvcommons.errors import CapacityExhausted, DataLoss, DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.copying import BlockSave
from kvcommons.holder.head_group import Creditor, HeadGroup
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.telemetry.events import Observe, unobserved
from services.decode.borrowing.creditors import Creditors, Debtor, devices
from services.decode.borrowing.ledger_client import LedgerClient
from services.decode.borrowing.saves import RemoteSaves
from services.decode.borrowing.slowness import Slowness

log = logging.getLogger(__name__)

CALL_S = 1.0  # a call to a holder
TRIM_S = 5.0  # a trim: the creditor waits until nobody reads the blocks
TRIM_PAUSE_S = 0.5  # between trims that are not answered
GROW_TRIES = 2  # calls without an answer: the segment may have grown
ATTEMPTS = 2  # answers of the ledger that lead to no loan, until the loan is given up
PAUSE_S = 0.25  # between attempts: heartbeats may bring other candidates


@dataclass(slots=True, kw_only=True)
class _Loan:
    """A segment borrowed for one sequence."""

    key: int  # the sequence's
    blocks: int  # owed
    size: int  # with trimmed ones: where the next block lies in the segment


class Loans:
    """Belongs to the event loop."""

    def __init__(
        self,
        debtor: Debtor,
        ledger: LedgerClient,
        *,
        lease_ms: int,
        lost: Callable[[int, KVCommonsError], None],
        slowness: Slowness,
        dialer: Dialer = UNSECURED,
        observe: Observe = unobserved,
        connect: Callable[..., RemoteHolder] = RemoteHolder,
    ) -> None:
        """`lost` is called with the key of a sequence whose borrowed blocks a creditor has no more.
        `slowness` takes how long iterations waited for each creditor; slow creditors are asked when nobody
        else lends. `observe` records all that is borrowed and given back; `connect` makes the client of a
        holder."""
        self._debtor = debtor
        self._slowness = slowness
        self._observe = observe
        self._lost = lost
        self._ledger = ledger
        self._creditors = Creditors(
            debtor,
            lease_s=lease_ms / 1000,
            lost=self._lose,
            waited=slowness.waited,
            used=lambda: {holder for holder, _ in self._loans},
            dialer=dialer,
            connect=connect,
        )
        self._loans: dict[tuple[Creditor, SegmentRef], _Loan] = {}
        self._reported: set[str] = set()  # the slow ones, by data address
        self._tasks: set[asyncio.Task[None]] = set()
        self._saves = RemoteSaves(timeout_s=CALL_S)

    async def close(self) -> None:
        """Gives back what is left, for a bounded time."""
        left: dict[Creditor, list[SegmentRef]] = {}
        for holder, ref in self._loans:
            left.setdefault(holder, []).append(ref)
            self._record("give_back", ref)
        await asyncio.gather(*self._tasks, *(self._release(holder, refs) for holder, refs in left.items()))
        await self._creditors.close()
        await self._ledger.close()

    def debts(self) -> dict[str, int]:
        """Blocks borrowed, by creditor."""
        owed: dict[str, int] = {}
        names = self._creditors.names()
        for (holder, _), loan in self._loans.items():
            owed[names[holder]] = owed.get(names[holder], 0) + loan.blocks
        return owed

    @property
    def shortfall(self) -> str:
        """Of head groups, by the ledger's last answer; it is appended to error messages."""
        return self._ledger.shortfall + self._debtor.shortfall

    async def borrow(
        self,
        key: int,
        name: str,
        *,
        blocks: int,
        first_block: int,
        avoid: Collection[Creditor] = (),
        balance: bool = False,
    ) -> list[RemoteRun]:
        """Runs that together hold `blocks`, in order, from `first_block` of sequence `key` on: on holders to
        `avoid` only where there are no others, and with `balance` best on one, the one where this instance
        has least. Raises CapacityExhausted, and keeps nothing then."""
        runs: list[RemoteRun] = []
        left = blocks
        lent_blocks: dict[str, int] = {}  # by creditor, those that the ledger does not know of yet
        fruitless = 0
        try:
            while fruitless < ATTEMPTS:
                if fruitless:
                    await asyncio.sleep(PAUSE_S)
                fruitless += 1
                for instance in self._ranked(await self._ledger.candidates(left), left, avoid, balance):
                    lendable = instance.load.lendable_blocks
                    if 0 < lendable <= lent_blocks.get(instance.id, 0):
                        # It has lent all its blocks to this sequence: others are asked until it reports more.
                        await self._report(instance.id, CapacityExhausted("it has lent all that it had"))
                        lent_blocks[instance.id], fruitless = 0, 0
                        continue
                    # What the ledger knows is a heartbeat old: blocks may have come free since.
                    want = left if fruitless > 1 else min(left, max(lendable, 1))
                    run = await self._reserve(key, name, instance, want, first_block + blocks - left)
                    if run is not None:
                        runs.append(run)
                        left -= run.count
                        lent_blocks[instance.id] = lent_blocks.get(instance.id, 0) + run.count
                        fruitless = 0
                    if not left:
                        return runs
        except BaseException:
            self.give_back(runs)
            raise
        self.give_back(runs)
        raise CapacityExhausted(
            f"{blocks} blocks do not fit here and nobody lends them: retry later, or add an attention_pool "
            f"instance{self.shortfall}",
            retry_after_ms=500,
        )

    async def extend(
        self,
        key: int,
        name: str,
        *,
        tail: RemoteRun | None,
        blocks: int,
        first_block: int,
        avoid: Collection[Creditor] = (),
    ) -> RemoteRun:
        """One run of at most `blocks` more, where the sequence's `tail` is if it has room there; on a holder
        to `avoid` only where there is no other. Raises CapacityExhausted."""
        if tail is not None and not self._is_slow(tail.holder):
            for want in dict.fromkeys((blocks, 1)):
                segment_block = await self._grow(tail, want)
                if segment_block is not None:
                    return RemoteRun(
                        first_block=first_block,
                        count=want,
                        holder=tail.holder,
                        ref=tail.ref,
                        segment_block=segment_block,
                    )
        for asked_before in range(ATTEMPTS):
            if asked_before:
                await asyncio.sleep(PAUSE_S)
            for instance in self._ranked(await self._ledger.candidates(blocks), blocks, avoid, False):
                want = min(blocks, max(instance.load.lendable_blocks, 1))
                run = await self._reserve(key, name, instance, want, first_block)
                if run is not None:
                    return run
        raise CapacityExhausted(
            f"nobody lends the sequence another block{self.shortfall}", retry_after_ms=500
        )

    def give_back(self, runs: Sequence[RemoteRun]) -> None:
        """Gives the runs' blocks back, in the background. A creditor that the call does not reach reclaims
        them when the lease runs out."""
        by_holder: dict[Creditor, list[SegmentRef]] = {}
        for run in runs:
            if self._loans.pop((run.holder, run.ref), None) is not None:
                self._record("give_back", run.ref)
                by_holder.setdefault(run.holder, []).append(run.ref)
        for holder, refs in by_holder.items():
            self._spawn(self._release(holder, refs))

    def creditor(self, instance_id: str) -> Creditor | None:
        """By its id; None where nothing was ever borrowed from it."""
        return self._creditors.find(instance_id)

    async def look_for_slow(self) -> list[Creditor]:
        """The creditors that are slow and have blocks of this instance. Reports all slow ones to the
        ledger."""
        owed: Counter[str] = Counter()
        for (holder, _), loan in self._loans.items():
            owed[holder.data_address] += loan.blocks
        slow = set(self._slowness.look(owed))
        found = {one: name for one, name in self._creditors.names().items() if one.data_address in slow}
        for creditor, name in found.items():
            if creditor.data_address not in self._reported:
                log.warning("a creditor is slow", extra={"creditor": name})
            await self._ledger.refused(name, slow=True)
        self._reported = {one.data_address for one in found}
        return [one for one in found if owed[one.data_address]]

    async def elsewhere(
        self, key: int, name: str, *, blocks: int, first_block: int, but: Creditor
    ) -> RemoteRun | None:
        """One run of `blocks` on another holder than `but`, and on none that is slow; None where none has so
        much. What lies on a head group goes to no other, nor does anything go there: nobody copies it."""
        for instance in [] if isinstance(but, HeadGroup) else await self._ledger.candidates(blocks):
            holder = self._creditors.of(instance)
            if holder is but or isinstance(holder, HeadGroup):
                continue
            if self._is_slow(holder) or instance.load.lendable_blocks < blocks:
                continue
            run = await self._reserve(key, name, instance, blocks, first_block)
            if run is not None:
                if run.count == blocks:
                    return run
                self.give_back([run])
        return None

    async def trim(self, run_holder: Creditor, ref: SegmentRef, blocks: int, settlement: str = "") -> None:
        """`blocks` frozen ones have moved and nobody reads them here any more. A creditor that does not
        answer is called again for as long as the segment is borrowed: these blocks are owed by nobody."""
        loan = self._loans.get((run_holder, ref))
        if loan is not None:
            loan.blocks -= blocks
            if loan.blocks <= 0:
                self._loans.pop((run_holder, ref))
                self._record("give_back", ref)
        try:
            await run_holder.trim(ref, settlement=settlement, timeout_s=TRIM_S)
        except (Unavailable, DeadlineExceeded):
            self._spawn(self._trim_again(run_holder, ref, settlement))
            raise
        finally:
            if loan is not None and loan.blocks == 0:
                await self._release(run_holder, [ref])

    async def _trim_again(self, holder: Creditor, ref: SegmentRef, settlement: str) -> None:
        while ref in holder.borrowed:
            try:
                await holder.trim(ref, settlement=settlement, timeout_s=CALL_S)
                return
            except KVCommonsError:
                await asyncio.sleep(TRIM_PAUSE_S)

    def save(self, run: RemoteRun, block: BlockSave) -> None:
        """Has the holder write a full block to a kvstore, in the background. The run may be given back at
        once: it is released when the holder has taken its saves."""
        self._saves.begin(run, block)

    def _ranked(
        self,
        instances: list[ledger_pb2.Instance],
        blocks: int,
        avoid: Collection[Creditor],
        balance: bool,
    ) -> list[ledger_pb2.Instance]:
        """Those that all ranks can attend at, in the ledger's order but for what the sequence's policy wants,
        and for who is slow. Attention takes as long as the device that has most to read, and a head group's
        share it."""
        owed = self.debts() if balance else {}

        def rank(instance: ledger_pb2.Instance) -> tuple[bool, bool, bool, float]:
            partly = balance and instance.load.lendable_blocks < blocks
            holder, owes = self._creditors.of(instance), owed.get(instance.id, 0)
            return self._is_slow(holder), holder in avoid, partly, owes / devices(instance)

        return sorted(filter(self._debtor.attends_at, instances), key=rank)

    async def _reserve(
        self, key: int, name: str, instance: ledger_pb2.Instance, blocks: int, first_block: int
    ) -> RemoteRun | None:
        """At most `blocks`: what the ledger knows of the creditor is a heartbeat old, so that less is asked
        for when it has not that many. None where it refuses altogether."""
        holder = self._creditors.of(instance)
        position = first_block * self._debtor.block_tokens
        while True:
            try:
                ref = await holder.reserve(name, blocks, first_position=position, timeout_s=CALL_S)
                break
            except KVCommonsError as error:
                if blocks == 1 or not isinstance(error, CapacityExhausted):
                    await self._report(instance.id, error)
                    return None
                blocks //= 2
        self._loans[holder, ref] = _Loan(key=key, blocks=blocks, size=blocks)
        self._record("borrow", ref, count=blocks)
        return RemoteRun(first_block=first_block, count=blocks, holder=holder, ref=ref)

    async def _grow(self, tail: RemoteRun, blocks: int) -> int | None:
        """So many more blocks for the tail's segment: at which of its blocks they begin. None where there
        are none. What is asked for is a size, so that a growth that was not heard of is not made twice: the
        next one takes it up."""
        loan = self._loans.get((tail.holder, tail.ref))
        if loan is None:
            return None
        segment_block = loan.size
        for _ in range(GROW_TRIES):
            try:
                await tail.holder.grow(tail.ref, segment_block + blocks, timeout_s=CALL_S)
            except (Unavailable, DeadlineExceeded):
                continue
            except KVCommonsError:
                return None
            loan.size = segment_block + blocks
            loan.blocks += blocks
            self._record("borrow_more", tail.ref, count=blocks)
            return segment_block
        return None

    async def _report(self, creditor: str, reason: KVCommonsError) -> None:
        log.info("a creditor refused: %s", reason.message, extra={"creditor": creditor})
        await self._ledger.refused(creditor)

    def _record(self, event: str, ref: SegmentRef, **facts: object) -> None:
        self._observe(event, handle=ref.handle, epoch=ref.epoch, **facts)

    async def _release(self, holder: Creditor, refs: Sequence[SegmentRef]) -> None:
        await self._saves.ended(holder, refs, CALL_S)
        try:
            await holder.release(refs, timeout_s=CALL_S)
        except KVCommonsError as error:
            log.info(
                "blocks come free by their lease: %s",
                error.message,
                extra={"creditor": holder.control_address},
            )

    def _lose(self, holder: Creditor, refs: Sequence[SegmentRef]) -> None:
        for ref in refs:
            loan = self._loans.pop((holder, ref), None)
            if loan is not None:
                self._record("lose", ref)
                error = DataLoss(
                    f"the holder at {holder.control_address} has the sequence's blocks no more: "
                    "compute them again"
                )
                self._lost(loan.key, error)

    def _is_slow(self, holder: Creditor) -> bool:
        return self._slowness.slow(holder.data_address)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
