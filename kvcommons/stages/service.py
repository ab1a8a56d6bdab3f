"""A process of an instance beside the first one, a stage or a rank of one, from start to drain, whatever the
instance does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvcommons.backend.choice import choose
from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.metrics import SaverCollector
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.config import Node
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.history import Condemner, Histories
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import InvalidInput, Unavailable
from kvcommons.model.spec import ModelSpec, resolve_folder
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.rpc.directory import Directory, Heartbeat
from kvcommons.rpc.process import Process
from kvcommons.stages.division import LayerDivision, first_stages_division
from kvcommons.stages.follower import Follower
from kvcommons.stages.formation import StageShare
from kvcommons.stages.layer_timing import StageWork
from kvcommons.stages.ranks import RankGroup
from kvcommons.stages.settings import StageSettings
from kvcommons.telemetry.metrics import LoadMetrics
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.metrics import DataMetrics
from kvcommons.transport.server import DataServer

T = TypeVar("T")

STOP_S = 1.0  # for threads to end, once nothing is under way
LOOK_S = 0.05  # between looks whether what is under way has ended


class StageParts:
    """What a stage stands on, for a core that is loaded. Made on the event loop."""

    def __init__(
        self,
        core: Core,
        process: Process,
        *,
        number: int,
        ranks: RankGroup | None,
        data_listen: str,
        save_buffer_bytes: int,
        push_deadline_s: float,
        attend_deadline_s: float,
    ) -> None:
        telemetry = process.telemetry
        dialer = process.dialer(DataMetrics(telemetry.registry, "client"))
        self._condemner = Condemner(dialer)
        self._loader = BlockLoader(self._condemner, name="stage-load", dialer=dialer)
        self._saver = BlockSaver(telemetry.instance_id, buffer_bytes=save_buffer_bytes, dialer=dialer)
        telemetry.registry.register(SaverCollector(self._saver))
        self._keeper = BlockKeeper(core, self._saver)
        self.follower = Follower(
            core,
            number,
            keeper=self._keeper,
            saver=self._saver,
            histories=Histories(core, self._loader),
            condemner=self._condemner,
            push_deadline_s=push_deadline_s,
            attend_deadline_s=attend_deadline_s,
            telemetry=telemetry,
            ranks=ranks,
            dialer=dialer,
        )
        self.server = DataServer(
            data_listen,
            self.follower,
            name="stage",
            observer=DataMetrics(telemetry.registry, "server"),
            credentials=process.credentials,
        )
        LoadMetrics(
            telemetry.registry, core.info.name, running=lambda: self.follower.sequences, waiting=lambda: 0
        )
        self.server.start()

    async def close(self) -> None:
        """Saves that are pending get a moment to reach the store."""
        await asyncio.to_thread(self._close)
        await self._condemner.close()

    def _close(self) -> None:
        self.follower.close()
        self.server.stop(STOP_S)
        self._loader.close()
        self._keeper.close()
        self._saver.close(Deadline.after(STOP_S))


async def serve_stage(
    process: Process,
    engine: EngineSettings,
    shape: StageSettings,
    share_from: Callable[[Sequence[int]], StageShare],
    *,
    node: Node,
    ledger: tuple[str, ...],
    data_listen: str,
    advertise_data: str | None,
    save_buffer_bytes: int,
    push_deadline_s: float,
    attend_deadline_s: float,
) -> None:
    """Is there for the first stage once its layers are loaded, which `share_from` names, given how many each
    stage has; at a signal to stop, waits a bounded time for what is under way. `push_deadline_s`: of one
    write, of prompts that are handed over; `attend_deadline_s`: what a layer of sequences that generate waits
    for other holders. Raises Unavailable, for the process to be started again, once the first stage has
    divided the layers otherwise."""
    server = process.server(node)
    await server.start()
    started_ms = int(time.time() * 1000)
    share: StageShare | None = None
    parts: StageParts | None = None

    def describe() -> ledger_pb2.Instance:
        instance = ledger_pb2.Instance(
            id=process.instance_id,
            service=f"{process.service}_stage",
            control_address=node.advertise_control or server.address,
            host=process.host,
            started_ms=started_ms,
            stage=ledger_pb2.StagePart(
                group=shape.stage_group,
                number=shape.stage,
                stages=shape.stages,
                rank=shape.rank,
                ranks=shape.tensor,
            ),
        )
        if share is not None and parts is not None:
            core = parts.follower.core
            instance.data_address = advertise_data or parts.server.address
            instance.model.CopyFrom(core.info)
            instance.products = core.backend.operators.multiplies
            instance.stage.CopyFrom(share.message())
            instance.load.total_blocks = core.allocator.total
            instance.load.running = parts.follower.sequences
            instance.load.ready = server.ready and not process.stop.is_set()
        return instance

    heartbeat = Heartbeat(ledger, describe, process.dialer())
    directory = Directory(ledger, process.instance_id, process.dialer())
    heartbeat.start()
    directory.start()
    division: Sequence[int] | None = shape.said_layers
    anew: Sequence[int] | None = None
    try:
        if follows := division is None:
            waits = first_stages_division(directory, process.service, shape)
            division = await _unless_stopped(process, waits)
        if division is None:
            return
        share = await asyncio.to_thread(share_from, division)  # a model that is not here is fetched
        core, ranks = await asyncio.to_thread(load_share, engine, share, process.dialer())
        parts = StageParts(
            core,
            process,
            number=share.number,
            ranks=ranks,
            data_listen=data_listen,
            save_buffer_bytes=save_buffer_bytes,
            push_deadline_s=push_deadline_s,
            attend_deadline_s=attend_deadline_s,
        )
        await server.set_ready(True)
        heartbeat.beat_now()
        if follows:
            waits = first_stages_division(directory, process.service, shape, but=division)
            anew = await _unless_stopped(process, waits)
        else:
            await process.stop.wait()
        heartbeat.beat_now()
        until = time.monotonic() + node.drain_s / 2
        while parts.follower.sequences and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
    finally:
        await directory.stop()
        await heartbeat.stop()
        await server.drain(STOP_S / 2)
        if parts is not None:
            await parts.close()
    if anew is not None:
        raise Unavailable(
            f"the first stage of group {shape.stage_group!r} has divided the layers anew, {list(anew)}: this "
            f"stage ends, to load its own of them"
        )


async def _unless_stopped(process: Process, work: Coroutine[Any, Any, T]) -> T | None:
    """What it returns; None where the process is to stop before."""
    stopped, working = asyncio.create_task(process.stop.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopped.cancel()
        working.cancel()


def share_of(
    engine: EngineSettings, shape: StageSettings, service: str, work: StageWork, others: Sequence[int]
) -> StageShare:
    """Which layers, and which heads of them, the process of these settings has. `others`: layers of each
    stage, as others of its group have them; the first stage decides, and the others have these. Raises
    InvalidInput for more stages than layers, and ranks that do not divide the heads."""
    spec = ModelSpec.read(resolve_folder(engine.model))
    rank = TensorRank(number=shape.rank, ranks=shape.tensor)
    rank.check(spec)
    if not shape.follows:
        division = LayerDivision.of(engine, shape, spec, work, others)
    elif sum(counts := others or (spec.layers,)) == spec.layers:
        division = LayerDivision.said(counts, spec.layers)
    else:
        raise InvalidInput(
            f"the stages of group {shape.stage_group!r} divide {sum(counts)} layers, and {engine.model!r} "
            f"has {spec.layers}: start all stages with one model",
            param="model",
        )
    return StageShare(
        service=service, group=shape.stage_group, number=shape.stage, division=division, rank=rank
    )


def load_share(
    engine: EngineSettings, share: StageShare, dialer: Dialer = UNSECURED
) -> tuple[Core, RankGroup | None]:
    """The layers and heads of it; with which others it sums up, where there are any."""
    ranks: RankGroup | None = None
    if share.rank.ranks > 1:
        ranks = RankGroup(share.rank, choose(engine.device).device, dialer)
    return load_core(engine, share.layers, share.rank, None if ranks is None else ranks.sum), ranks
