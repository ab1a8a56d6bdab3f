"""A process of an instance beside the first: it computes what it is planned, in the blocks that it is told,
and decides nothing.

Its memory has the same physical blocks as the first stage's, in its own layers. Who has which of them only
the first stage knows, so that nothing has to be agreed on; here all of them are in use all the time, and a
block has more than one reference while it is on its way to decode or to the kvstore.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from kvcommons.backend.memory import byte_view
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core
from kvcommons.engine.executor import Composer
from kvcommons.engine.history import Condemner, Histories
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.scheduler import Scheduler
from kvcommons.errors import (
    InvalidInput,
    KVCommonsError,
    Overloaded,
    StaleEpoch,
    Unavailable,
    UnsupportedParameter,
)
from kvcommons.holder.budget import AttentionBudget
from kvcommons.pb import data_pb2 as pb
from kvcommons.prefill.push import Pusher
from kvcommons.rblock.heads import HeadPart
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.stages.followed import EpochParts, FollowedEpoch
from kvcommons.stages.ranks import RankGroup
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange

REPORT_S = 0.5  # between two reports, at most: each end notices that the other one is gone
REPORT_SEND_S = 5.0
LOOK_S = 0.005  # between looks whether blocks are on their way still
QUIET_S = 15.0  # until nothing of the epoch before is under way any more
RESERVED_S = 2.0  # a write waits so long for the plan that says whose blocks it is for
ITERATION_S = 1.0  # nobody asks: a stage attends for no one else


class Follower:
    """A DataServer's handler. Of one epoch at a time: whoever asks it to join ends the one before."""

    def __init__(
        self,
        core: Core,
        number: int,
        *,
        keeper: BlockKeeper,
        saver: BlockSaver,
        histories: Histories,
        condemner: Condemner,
        push_deadline_s: float,
        attend_deadline_s: float,
        telemetry: Telemetry,
        ranks: RankGroup | None = None,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`number`: which stage it is. A layer waits `attend_deadline_s` for other holders. `ranks`: its own
        among several."""
        self.core = core
        self._number = number
        self._ranks = ranks
        self._keeper = keeper
        self._saver = saver
        prompts = Prompts(
            core,
            Scheduler(),  # that is the first stage's business
            chunk_tokens=1,
            keeper=keeper,
            histories=histories,
            read_buffer=ReadBuffer(layers=len(core.layers), bytes_max=0),
            tracer=telemetry.tracer,
        )
        remote = RemoteAttention(core.layout, core.backend, AttentionBudget(ITERATION_S))
        self._parts = EpochParts(
            core=core,
            number=number,
            keeper=keeper,
            pusher=Pusher(
                core.memory,
                core.allocator,
                call_deadline_s=push_deadline_s,
                dialer=dialer,
                heads=core.heads,
            ),
            histories=histories,
            condemner=condemner,
            prompts=prompts,
            whole=WholePrompt(core, prompts),
            attend_deadline_s=attend_deadline_s,
            composer=Composer(core, remote, attend_deadline_s=attend_deadline_s),
            ranks=ranks,
            dialer=dialer,
        )
        self._blocks = core.allocator.allocate(core.allocator.total)
        self._lock = threading.Lock()
        self._epoch: FollowedEpoch | None = None
        self._joining = threading.Lock()  # by one at a time

    @property
    def sequences(self) -> int:
        """That it computes."""
        epoch = self._epoch
        return epoch.held if epoch is not None else 0

    def __call__(self, request: pb.DataRequest, exchange: Exchange) -> None:
        op = request.WhichOneof("op")
        if op == "join_stages":
            self._join(request.join_stages, exchange)
        elif op == "stage_plan":
            self._take(request.stage_plan, exchange)
        elif op == "write_blocks":
            self._write(request.write_blocks, exchange)
        elif op == "join_ranks" and self._ranks is not None:
            self._ranks.welcome(request.join_ranks, exchange)
        else:
            raise UnsupportedParameter(f"a pipeline stage does not answer {op}", param="op")

    def close(self) -> None:
        """Ends the epoch: the first stage hears of it as its reports end."""
        with self._lock:
            epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end(Unavailable("this stage is stopping"))
        self._parts.pusher.stop()

    def _join(self, join: pb.JoinStages, exchange: Exchange) -> None:
        self._check(join)
        with self._joining:
            with self._lock:
                before, self._epoch = self._epoch, None
            if before is not None:
                before.end(Unavailable("the stages were put together anew"))
            self._await_quiet(before)
            self._saver.writer = join.writer
            epoch = FollowedEpoch(self._parts, join)
            with self._lock:
                self._epoch = epoch
        epoch.start()
        try:
            while True:
                exchange.deadline = Deadline.after(REPORT_SEND_S)
                exchange.reply(pb.DataReply(stage_report=epoch.report()))
                epoch.await_report(REPORT_S)
        finally:
            epoch.end(Unavailable("the first stage is gone"))

    def _check(self, join: pb.JoinStages) -> None:
        core = self.core
        if join.model != core.info.fingerprint:
            raise InvalidInput(
                "the first stage has another model: start all stages with one model, dtype and block_tokens",
                param="model",
            )
        rank, last = core.model.rank, core.layers.stop == core.model.spec.layers
        mine = (join.number, join.rank, len(join.above)) == (
            self._number,
            rank.number,
            rank.ranks - 1 - rank.number,
        )
        if not mine or (not rank.number and bool(join.next_address) == last):
            raise InvalidInput(
                f"this is rank {rank.number} of {rank.ranks} of stage {self._number}, of layers "
                f"{core.layers.start} … {core.layers[-1]}, and was taken for rank {join.rank} of stage "
                f"{join.number}: start all with the same stages, stage_layers and tensor",
                param="number",
            )
        if join.blocks > core.allocator.total:
            raise InvalidInput(
                f"the first stage has {join.blocks} blocks, and this one {core.allocator.total}: start all "
                "stages with one capacity_tokens",
                param="capacity_tokens",
            )

    def _await_quiet(self, before: FollowedEpoch | None) -> None:
        """Nothing reads or writes the blocks any more, which are whoever's from here on. Raises
        Overloaded."""
        deadline = Deadline.after(QUIET_S)
        while (before is not None and before.computes) or not self.core.allocator.held_once(self._blocks):
            self._keeper.make_room()
            if deadline.passed():
                raise Overloaded(
                    "blocks of the epoch before are still on their way: retry", retry_after_ms=500
                )
            time.sleep(LOOK_S)

    def _take(self, plan: pb.StagePlan, exchange: Exchange) -> None:
        exchange.one_way = True
        with self._lock:
            epoch = self._epoch
        if epoch is None or epoch.number != plan.epoch:
            return  # of one that has ended: whoever sent it knows, or will hear
        try:
            rows, total = sum(span.tokens or 1 for span in plan.spans), self.core.allocator.total
            if rows > total * self.core.block_tokens:
                raise InvalidInput(f"a plan has {rows} rows, more than there are tokens of memory here")
            hidden: Tensor | None = None
            if rows:
                hidden = torch.empty((rows, self.core.model.spec.hidden), dtype=self.core.model.dtype)
                exchange.receive_payload([byte_view(hidden)])
            epoch.put(plan, hidden)
        except KVCommonsError as error:
            epoch.end(error)
            raise

    def _write(self, write: pb.WriteBlocks, exchange: Exchange) -> None:
        """A layer of a prompt that was computed elsewhere."""
        memory = self.core.memory
        part = HeadPart.of(write.heads) if write.HasField("heads") else None
        own = memory.layout if part is None else part.layout(memory.layout)
        if write.layer not in self.core.layers:
            raise InvalidInput(
                f"layer {write.layer}, and this stage has {self.core.layers.start} … {self.core.layers[-1]}",
                param="layer",
            )
        with self._lock:
            epoch = self._epoch
        if epoch is None or epoch.number != write.epoch:
            raise StaleEpoch("the stages have been put together anew since the blocks were reserved")
        with epoch.writable(write, exchange.deadline.within(RESERVED_S)) as blocks:
            due = len(blocks) * own.object_bytes
            if exchange.payload_bytes != due:
                raise InvalidInput(
                    f"{len(blocks)} blocks came with {exchange.payload_bytes} bytes, not {due}"
                )
            with memory.write_buffers(write.layer, blocks, part) as buffers:
                exchange.receive_payload(buffers)
        exchange.reply(pb.DataReply(done=pb.Done()))
