"""A process of an instance beside the first one, a stage or a rank of one, from start to drain, whatever the
instance does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvcommons.backend.choice import choose
from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.metrics import SaverCollector
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.config import Node
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.history import Condemner, Histories
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.settings import EngineSettings
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.rpc.directory import Heartbeat
from kvcommons.rpc.process import Process
from kvcommons.stages.follower import Follower
from kvcommons.stages.formation import StageShare
from kvcommons.stages.ranks import RankGroup
from kvcommons.stages.settings import StageSettings
from kvcommons.telemetry.metrics import LoadMetrics
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.metrics import DataMetrics
from kvcommons.transport.server import DataServer

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
    load: Callable[[], tuple[StageShare, Core, RankGroup | None]],
    *,
    node: Node,
    ledger: tuple[str, ...],
    data_listen: str,
    advertise_data: str | None,
    save_buffer_bytes: int,
    push_deadline_s: float,
    attend_deadline_s: float,
) -> None:
    """Is there for the first stage once its layers are loaded, which `load` does; at a signal to stop, waits
    a bounded time for what is under way. `push_deadline_s`: of one write, of prompts that are handed over;
    `attend_deadline_s`: what a layer of sequences that generate waits for other holders."""
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
    heartbeat.start()
    try:
        loaded, core, ranks = await asyncio.to_thread(load)
        share = loaded
        parts = StageParts(
            core,
            process,
            number=loaded.number,
            ranks=ranks,
            data_listen=data_listen,
            save_buffer_bytes=save_buffer_bytes,
            push_deadline_s=push_deadline_s,
            attend_deadline_s=attend_deadline_s,
        )
        await server.set_ready(True)
        heartbeat.beat_now()
        await process.stop.wait()
        heartbeat.beat_now()
        until = time.monotonic() + node.drain_s / 2
        while parts.follower.sequences and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
    finally:
        await heartbeat.stop()
        await server.drain(STOP_S / 2)
        if parts is not None:
            await parts.close()


def load_share(
    engine: EngineSettings,
    shape: StageSettings,
    service: str,
    *,
    rows: int,
    sampled: int,
    dialer: Dialer = UNSECURED,
) -> tuple[StageShare, Core, RankGroup | None]:
    """The layers of the stage that the settings name, as StageSettings.ranges divides them, and the rank's
    heads of them; with which others it sums up, where there are any. Raises InvalidInput for more stages than
    layers, and ranks that do not divide the heads."""
    found: list[StageShare] = []
    rank = TensorRank(number=shape.rank, ranks=shape.tensor)
    ranks: RankGroup | None = None
    if shape.tensor > 1:
        ranks = RankGroup(rank, choose(engine.device).device, dialer)

    def layers(spec: ModelSpec) -> range:
        share = StageShare(
            service=service,
            group=shape.stage_group,
            number=shape.stage,
            ranges=shape.ranges(spec, rows=rows, sampled=sampled),
            rank=rank,
        )
        found.append(share)
        return share.layers

    core = load_core(engine, layers, rank, None if ranks is None else ranks.sum)
    return found[0], core, ranks
