"""A pipeline stage behind the first, from start to drain."""

from __future__ import annotations

import asyncio
import time

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.metrics import SaverCollector
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core, load_core
from kvcommons.engine.history import Condemner, Histories
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.model.layer_ranges import LayerTimes, ranges_of
from kvcommons.model.spec import ModelSpec
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.directory import Heartbeat
from kvcommons.rpc.process import Process
from kvcommons.rpc.server import RpcServer
from kvcommons.stages.follower import Follower
from kvcommons.stages.formation import STAGE_SERVICE, StageShare
from kvcommons.telemetry.metrics import LoadMetrics
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.metrics import DataMetrics
from kvcommons.transport.server import DataServer
from services.prefill.config import PrefillConfig

STOP_S = 1.0  # for threads to end, once nothing is under way
LOOK_S = 0.05  # between looks whether prompts under way have ended


class StageParts:
    """What a stage stands on, for a core that is loaded. Made on the event loop."""

    def __init__(self, config: PrefillConfig, core: Core, process: Process) -> None:
        telemetry = process.telemetry
        asking = DataMetrics(telemetry.registry, "client")
        self._condemner = Condemner()
        self._loader = BlockLoader(self._condemner, name="stage-load", observer=asking)
        self._saver = BlockSaver(
            telemetry.instance_id, buffer_bytes=config.save_buffer_bytes, observer=asking
        )
        telemetry.registry.register(SaverCollector(self._saver))
        self._keeper = BlockKeeper(core, self._saver)
        self.follower = Follower(
            core,
            config.stage,
            keeper=self._keeper,
            saver=self._saver,
            histories=Histories(core, self._loader),
            condemner=self._condemner,
            push_deadline_s=config.push_deadline_s,
            telemetry=telemetry,
            observer=asking,
        )
        assert config.data_listen is not None, "the settings were checked"
        self.server = DataServer(
            config.data_listen,
            self.follower,
            name="stage",
            observer=DataMetrics(telemetry.registry, "server"),
        )
        LoadMetrics(
            telemetry.registry, core.info.name, running=lambda: self.follower.prompts, waiting=lambda: 0
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


async def serve_stage(config: PrefillConfig, process: Process) -> None:
    """Is there for the first stage once its layers are loaded; at a signal to stop, waits a bounded time for
    prompts under way."""
    server = RpcServer(config.node.listen, process.telemetry, call_deadline_s=config.node.call_deadline_s)
    await server.start()
    started_ms = int(time.time() * 1000)
    share: StageShare | None = None
    parts: StageParts | None = None

    def describe() -> ledger_pb2.Instance:
        instance = ledger_pb2.Instance(
            id=process.instance_id,
            service=STAGE_SERVICE,
            control_address=config.node.advertise_control or server.address,
            host=process.host,
            started_ms=started_ms,
        )
        if share is not None and parts is not None:
            core = parts.follower.core
            instance.data_address = config.advertise_data or parts.server.address
            instance.model.CopyFrom(core.info)
            instance.stage.CopyFrom(share.message())
            instance.load.total_blocks = core.allocator.total
            instance.load.running = parts.follower.prompts
            instance.load.ready = server.ready and not process.stop.is_set()
        return instance

    heartbeat = Heartbeat(config.ledger, describe)
    heartbeat.start()
    try:
        share, core = await asyncio.to_thread(load_share, config)
        parts = StageParts(config, core, process)
        await server.set_ready(True)
        heartbeat.beat_now()
        await process.stop.wait()
        heartbeat.beat_now()
        until = time.monotonic() + config.node.drain_s / 2
        while parts.follower.prompts and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
    finally:
        await heartbeat.stop()
        await server.drain(STOP_S / 2)
        if parts is not None:
            await parts.close()


def load_share(config: PrefillConfig) -> tuple[StageShare, Core]:
    """The layers of the stage that the settings name. Raises InvalidInput for more stages than layers."""
    found: list[StageShare] = []

    def layers(spec: ModelSpec) -> range:
        share = StageShare(
            group=config.stage_group,
            number=config.stage,
            ranges=_ranges(config, spec),
        )
        found.append(share)
        return share.layers

    core = load_core(config.engine, layers)
    return found[0], core


def _ranges(config: PrefillConfig, spec: ModelSpec) -> tuple[range, ...]:
    """Of all stages. What it goes by is in the settings and in the model, which all stages have."""
    if config.stage_layers:
        return ranges_of(config.stage_layers, spec.layers)
    times = LayerTimes.estimate(spec, rows=config.chunk_tokens, sampled=1, context=spec.context_window // 2)
    return times.divide(config.stages)
