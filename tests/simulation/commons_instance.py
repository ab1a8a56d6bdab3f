"""An instance of the simulated commons: the classes that serve (the holder and its service, loans, moves and
the part in settlements), put together as decode does it. Simulated are the channels between instances, the
event loop and the engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kvcommons.engine.core import Core
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.sequence import LocalRun
from kvcommons.errors import CapacityExhausted, DeadlineExceeded, InvalidInput, Unavailable
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.segment import Segment
from kvcommons.holder.segments import SegmentRef
from kvcommons.holder.server import HolderService
from kvcommons.pb import common_pb2, holder_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.placement.auto import Costs
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rpc.dialer import UNSECURED
from kvcommons.security.roles import Role
from services.decode.arrival.growth import Growth
from services.decode.arrival.growth_queue import GrowthQueue
from services.decode.borrowing.creditors import Debtor
from services.decode.borrowing.ledger_client import LedgerClient
from services.decode.borrowing.loans import Loans
from services.decode.borrowing.slowness import Slowness
from services.decode.metrics import DecodeMetrics
from services.decode.moving.mover import Mover
from services.decode.settlement.participant import DebtorService, SettlementParticipant
from tests.simulation.commons_engine import (
    BLOCK_TOKENS,
    LAYOUT,
    MODEL,
    Buffer,
    Content,
    Memory,
    SimulatedEngine,
    Writes,
)
from tests.simulation.commons_world import Context, Proc, World
from tests.simulation.machine import require

LEASE_S = 10.0
READ_S = 5.0  # blocks of a move
GROW_S = 6.0  # that a prompt waits for memory in the middle

METRICS = DecodeMetrics(CollectorRegistry())


class SimulatedDialer:
    """A Dialer whose channels are the world's."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.client = UNSECURED.client  # of a data plane that nobody calls

    def channel(self, address: str, role: Role) -> Any:
        return self._instance.connect(address)


class SimulatedHolder(RemoteHolder):
    """A creditor whose channel and data plane are the world's."""

    def __init__(self, instance: Instance, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "dialer": SimulatedDialer(instance)})
        self._instance = instance

    async def grow(self, ref: SegmentRef, blocks: int, *, timeout_s: float) -> None:
        """Takes down to which size the segment may have grown unheard."""
        unheard = self._instance.unheard
        try:
            await super().grow(ref, blocks, timeout_s=timeout_s)
        except (Unavailable, DeadlineExceeded):
            unheard[ref] = max(blocks, unheard.get(ref, 0))
            raise
        if unheard.get(ref, 0) <= blocks:
            unheard.pop(ref, None)

    def read_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, into: Sequence[Any], deadline: Any
    ) -> None:
        thread = self._instance.loop.thread
        assert thread is not None, "blocks are read on a thread"
        count = len(into)
        contents = thread.ask(self.data_address, "ReadBlocks", ref, first_block, count, timeout_s=READ_S)
        for buffer, content in zip(cast(Sequence[Buffer], into), contents, strict=True):
            buffer.write(content)


class SimulatedHolderService(HolderService):
    """Copies blocks in over the world's data plane."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        self._instance = instance

    async def CopyIn(self, request: holder_pb2.CopyInRequest, context: Any) -> holder_pb2.CopyInReply:
        instance, into, source = self._instance, request.into, request.source
        with instance.accessing(SegmentRef(handle=into.handle, epoch=into.epoch)) as segment:
            if segment.owner != request.owner:
                raise InvalidInput("it is not the debtor's", param="owner")
            blocks = instance.holder.blocks(segment, request.first_block, request.blocks, write=True)
            ref = SegmentRef(handle=source.handle, epoch=source.epoch, generation=source.generation)
            asked = ref, request.source_block, request.blocks
            contents = await instance.call(request.data_address, "ReadBlocks", *asked, timeout_s=READ_S)
            for block, content in zip(blocks, contents, strict=True):
                instance.memory.contents[block] = content
        return holder_pb2.CopyInReply()


class WatchedParticipant(SettlementParticipant):
    """Tells the world what became of rounds."""

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance.holder, instance.mover, instance.loans)
        self._instance = instance

    async def switch_home(self, name: str, term: int, lease_s: float, number: int) -> holder_pb2.RoundReply:
        reply = await super().switch_home(name, term, lease_s, number)
        self._instance.world.switched(name, number, self._instance.name)
        return reply

    def _run_out(self, settlement: Any) -> None:
        self._instance.world.excuse(settlement.name, self._instance.name)
        super()._run_out(settlement)


class Instance(Proc):
    def __init__(
        self,
        world: World,
        machine: str,
        life: int,
        *,
        blocks: int,
        lend: int,
        spare: int,
        ledgers: Sequence[str],
    ) -> None:
        """`spare` blocks are left free by sequences, its own and others'."""
        super().__init__(world, f"{machine}.{life}")
        self.machine = machine
        self.life = life
        self.spare = spare
        self.unheard: dict[SegmentRef, int] = {}  # borrowed: to what size they have grown, or have not
        self._accessed: dict[int, Segment] = {}
        self._accesses = itertools.count()
        self.allocator = BlockAllocator(blocks)
        self.allocator.observe = self._observe
        self.memory = Memory(blocks, self._write_to)
        self.holder = Holder(
            cast(Any, self.memory),
            self.allocator,
            HeldModel(fingerprint=MODEL, scale=1.0, windows=(None,)),
            instance_id=self.name,
            lend_blocks_max=lend,
            clock=self.clock,
            epoch=life * 1000 + ord(machine),  # no two lives of any two have the same
        )
        self.engine = SimulatedEngine(self)
        self.loans = Loans(
            Debtor(instance_id=self.name, model=MODEL, block_tokens=BLOCK_TOKENS),
            LedgerClient(ledgers, debtor=self.name, host=machine, model=MODEL, connect=self.connect),
            lease_ms=int(1000 * LEASE_S),
            lost=self.engine.fail,
            slowness=Slowness(layers=1, deadline_s=5.0, clock=self.clock),
            observe=self._observe,
            connect=functools.partial(SimulatedHolder, self),
        )
        core = Core(
            model=cast(Any, None),
            info=common_pb2.ModelInfo(fingerprint=MODEL),
            layout=LAYOUT,
            memory=cast(Any, self.memory),
            allocator=self.allocator,
        )
        self.growth = Growth(
            core,
            GrowthQueue(wait_s=GROW_S, draw=world.dice.random),
            engine=cast(Any, self.engine),
            holder=self.holder,
            loans=self.loans,
            data_address=self.name,
            sequences=lambda: len(self.engine.running),
        )
        self.mover = Mover(
            core, cast(Any, self.engine), self.loans, METRICS, Costs(Predictor(), layers=1, block_bytes=1)
        )
        self.participant = WatchedParticipant(self)
        self._holder_service = SimulatedHolderService(self)
        self._debtor_service = DebtorService()
        self._debtor_service.open(self.participant)
        nothing = cast(Any, None)
        self.loop.run(lambda: self._holder_service.open(self.holder, nothing, nothing, nothing))

    def room(self) -> int:
        """Blocks that a sequence may take."""
        return max(0, self.allocator.free - self.spare)

    # ---- asked by others

    def answer(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        if method in ("Attend", "ReadBlocks"):
            return self._read(*arguments)
        if method == "Reserve" and arguments[0].blocks > self.room():
            raise CapacityExhausted("what is left is for its own")
        service = self._holder_service if hasattr(HolderService, method) else self._debtor_service
        return getattr(service, method)(*arguments, Context(timeout_s))

    @contextmanager
    def accessing(self, ref: SegmentRef) -> Iterator[Segment]:
        """An access over the data plane."""
        with self.holder.pinned([ref]) as (segment,):
            number = next(self._accesses)
            self._accessed[number] = segment
            try:
                yield segment
            finally:
                del self._accessed[number]

    async def _read(
        self, ref: SegmentRef, first: int, count: int, writes: Writes = ()
    ) -> list[Content | None]:
        """Attention over blocks of a segment, or copying them out. Writes first."""
        with self.accessing(ref) as segment:
            require(ref.generation >= segment.oldest, "an access of before a trim gets in after it")
            for index, content in writes:
                require(index >= segment.writable_from, "a block is written that was frozen or given back")
                (block,) = self.holder.blocks(segment, index, 1, write=True)
                self.memory.contents[block] = content
            if not count:
                return []
            blocks = self.holder.blocks(segment, first, count)
            if (draw := self.world.dice.random()) < 0.5:
                await asyncio.sleep(0.3 if draw < 0.05 else 0.01)
            require(set(blocks) <= set(segment.held_blocks), "freed memory is read")
            return [self.memory.contents[block] for block in blocks]

    def _observe(self, event: str, **facts: Any) -> None:
        if event == "freed":  # what it had is forgotten
            for block in facts["blocks"]:
                self.memory.contents[block] = None
        self.world.tell(self.name, event, **facts)

    def _write_to(self, blocks: list[int]) -> None:
        thread = self.loop.thread
        assert thread is not None, "blocks are written by a thread"
        thread.writes = blocks

    # ---- what it says, and what must hold

    def describe(self) -> pb.Instance:
        waiting, self.engine.waiting = self.engine.waiting, 0
        return pb.Instance(
            id=self.name,
            service="decode",
            host=self.machine,
            control_address=self.name,
            data_address=self.name,
            model=common_pb2.ModelInfo(fingerprint=MODEL),
            load=pb.Load(
                total_blocks=self.allocator.total,
                free_blocks=self.allocator.free,
                lendable_blocks=min(self.holder.lendable_blocks, self.room()),
                lend_blocks_max=self.holder.lend_blocks_max,
                queued=waiting,
                debts=self.loans.debts(),
                loans=self.holder.loans(),
                ready=True,
            ),
        )

    @property
    def settlements(self) -> dict[str, Any]:
        """That it takes part in."""
        return self.participant._settlements

    def owned(self) -> list[int]:
        """Every block that something here has, once for each."""
        table, found = self.holder, []
        for segment in table.segments:
            if segment.owner != self.name:  # of its own ones a sequence has the blocks, too
                found += segment.held_blocks
        for segment in {one for one in self._accessed.values() if one.released}:
            found += segment.held_blocks
        for pledge in table.pledges._pledges.values():
            found += pledge.blocks
        for one in self.engine.running.values():
            found += one.sequence.local_blocks()
        for run in self.engine.joining:
            found += run.blocks if isinstance(run, LocalRun) else []
        return found

    def moving(self) -> set[int]:
        """Blocks that are copied to, or were and are not switched to yet."""
        found = {block for thread in self.loop.threads for block in thread.writes}
        for run in self.engine.switching:
            found.update(run.blocks if isinstance(run, LocalRun) else ())
        for settlement in self.settlements.values():
            for part in settlement.round.parts if settlement.round is not None else ():
                found.update(() if part.ended or part.move.switched else part.home)
        return found

    def check(self) -> None:
        """No block with two owners, no owner without a block."""
        owned = self.owned()
        mine, moving = set(owned), self.moving()
        require(len(mine) == len(owned), f"a block of {self.name} has two owners")
        require(not mine & moving, f"KV is copied to a block of {self.name} that has an owner")
        require(
            len(mine) + len(moving) == self.allocator.in_use,
            f"{self.name}: {len(mine)} blocks have owners, {len(moving)} are copied to, "
            f"{self.allocator.in_use} are in use",
        )
        require(
            self.holder.pledges._pledges.keys() <= self.settlements.keys(),
            f"{self.name} keeps blocks aside for a settlement that has ended",
        )
        for one in self.engine.running.values():
            following = 0
            for run in one.sequence.runs:
                require(run.first_block == following, f"{self.name}: a sequence has a gap, or a block twice")
                following += run.count
