"""A prefill instance from start to drain: what it is made of, in the order in which the parts come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.metrics import SaverCollector
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.calibration import calibrated
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock, CoreLockCollector
from kvcommons.engine.executor import Composer, Executor, Inline
from kvcommons.engine.history import Condemner, Histories
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.load_or_compute import AlwaysLoad
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompt_engine import prompt_engine
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.scheduler import Scheduler
from kvcommons.pb import ledger_pb2, prefill_pb2_grpc
from kvcommons.prefill.metrics import PrefillMetrics
from kvcommons.prefill.role import PrefillRole
from kvcommons.prefill.service import PrefillService
from kvcommons.rpc.directory import Directory, Heartbeat
from kvcommons.rpc.process import Process
from kvcommons.stages.division import standing_division
from kvcommons.stages.executor import Pipelined
from kvcommons.stages.formation import Formation, StageShare
from kvcommons.stages.group import StageGroup
from kvcommons.stages.history import StagedHistories
from kvcommons.stages.iteration import StageIteration
from kvcommons.stages.metrics import StageMetrics
from kvcommons.stages.ranks import RankGroup
from kvcommons.stages.service import load_share
from kvcommons.telemetry.metrics import LoadMetrics
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.metrics import DataMetrics
from services.prefill.config import PrefillConfig
from services.prefill.stage import serve_prefill_stage, stage_share

STOP_S = 1.0  # for threads to end, once nothing is under way


class PrefillParts:
    """The engine and what it stands on, for a core that is loaded. Made on the event loop."""

    def __init__(
        self,
        config: PrefillConfig,
        core: Core,
        share: StageShare,
        ranks: RankGroup | None,
        predictor: Predictor,
        process: Process,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called, on any thread, when its stages have come together, or apart."""
        self.core = core
        telemetry = process.telemetry
        dialer = process.dialer(DataMetrics(telemetry.registry, "client"))
        self.condemner = Condemner(dialer)
        self.loader = BlockLoader(self.condemner, name="prefill-load", dialer=dialer)
        self.saver = BlockSaver(telemetry.instance_id, buffer_bytes=config.save_buffer_bytes, dialer=dialer)
        telemetry.registry.register(SaverCollector(self.saver))
        self.keeper = BlockKeeper(core, self.saver)
        scheduler = Scheduler(max_queue=config.max_queue, max_prompts=config.max_running)
        core_lock = self._core_lock = CoreLock(Path(config.core_lock)) if config.core_lock else None
        telemetry.registry.register(CoreLockCollector(core_lock))
        histories = Histories(core, self.loader)
        stage_metrics = StageMetrics(telemetry.registry)
        self.group: StageGroup | None = None
        if not share.alone:
            self.group = StageGroup(
                core,
                share.division,
                metrics=stage_metrics,
                saver=self.saver,
                condemner=self.condemner,
                iteration_s=config.shape.stage_deadline_s,
                instance_id=telemetry.instance_id,
                changed=changed,
                ranks=ranks,
                dialer=dialer,
            )
            histories = StagedHistories(histories, self.group.load)
        stages = len(share.ranges)
        compute_s = partial(predictor.prompt_seconds, chunk_tokens=config.chunk_tokens, stages=stages)
        prompts = Prompts(
            core,
            scheduler,
            chunk_tokens=config.chunk_tokens,
            keeper=self.keeper,
            histories=histories,
            read_buffer=ReadBuffer(
                layers=len(core.layers),
                bytes_max=config.read_buffer_bytes,
                whole_first=self.group is not None,
            ),
            predictor=predictor,
            cost=AlwaysLoad(compute_s) if config.loads == "always" else None,
            stages=stages,
            tracer=telemetry.tracer,
            core_lock=core_lock,
        )
        self.engine = prompt_engine(core, scheduler, prompts, self.keeper, core_lock, self._executor)
        if self.group is not None:
            self.group.attach(self.engine)
        self.role = PrefillRole(
            core,
            self.engine,
            prompts,
            keeper=self.keeper,
            condemner=self.condemner,
            chunk_tokens=config.chunk_tokens,
            push_deadline_s=config.push_deadline_s,
            dialer=dialer,
            stages=self.group,
        )
        LoadMetrics(
            telemetry.registry,
            core.info.name,
            running=lambda: self.engine.computing,
            waiting=lambda: self.engine.waiting,
            kv_cache_usage=lambda: core.allocator.in_use / core.allocator.total,
            prediction_error=lambda: self.engine.predictor.error,
        )
        self.engine.start()

    def _executor(self, composer: Composer) -> Executor:
        if self.group is None:
            return Inline(composer)
        return Pipelined(self.core, composer, self.group)

    @property
    def together(self) -> bool:
        """All its stages are there."""
        return self.group is None or self.group.formed

    async def close(self) -> None:
        """Saves that are pending get a moment to reach the store."""
        await asyncio.to_thread(self._close)
        await self.condemner.close()

    def _close(self) -> None:
        self.engine.stop(STOP_S)
        if self.group is not None:
            self.group.close()
        if self._core_lock is not None:
            self._core_lock.close()
        self.role.close()
        self.loader.close()
        self.keeper.close()
        self.saver.close(Deadline.after(STOP_S))


async def serve(config: PrefillConfig, process: Process) -> None:
    """Answers health at once, is ready when the model is loaded, and all its stages are there; drains at a
    signal to stop."""
    if config.shape.follows:
        await serve_prefill_stage(config, process)
        return
    server = process.server(config.node, config.tenant_key)
    service = PrefillService(PrefillMetrics(process.telemetry.registry))
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, service)
    await server.start()
    started_ms = int(time.time() * 1000)
    share: StageShare | None = None
    parts: PrefillParts | None = None

    def describe() -> ledger_pb2.Instance:
        instance = ledger_pb2.Instance(
            id=process.instance_id,
            service="prefill",
            control_address=config.node.advertise_control or server.address,
            host=process.host,
            started_ms=started_ms,
        )
        if share is not None and not share.alone:
            instance.stage.CopyFrom(share.message())
        together = parts is not None and parts.together
        return service.describe(instance, ready=server.ready and not process.stop.is_set() and together)

    def changed() -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(regrouped)

    def regrouped() -> None:
        heartbeat.beat_now()
        if formation is not None:
            formation.changed()

    loop = asyncio.get_running_loop()
    heartbeat = Heartbeat(config.ledger, describe, process.dialer())
    directory = Directory(config.ledger, process.instance_id, process.dialer())
    formation: Formation | None = None
    heartbeat.start()
    if config.shape.members > 1:
        directory.start()
    try:
        others = await standing_division(directory, "prefill", config.shape)
        share = await asyncio.to_thread(stage_share, config, others)
        heartbeat.beat_now()  # the other stages load theirs meanwhile
        core, ranks = await asyncio.to_thread(load_share, config.engine, share, process.dialer())
        predictor, kept = await asyncio.to_thread(
            calibrated,
            core,
            config.engine,
            chunk_tokens=config.chunk_tokens,
            generates=False,
            core_lock=config.core_lock,
            share=share.of_iterations,
            iterations=Iteration if share.alone else StageIteration,
        )
        parts = PrefillParts(config, core, share, ranks, predictor, process, changed)
        if parts.group is not None:
            formation = Formation(parts.group, share, core.info.fingerprint, directory)
            formation.start()
        service.open(parts.role.intake)
        await server.set_ready(True)
        heartbeat.beat_now()
        await process.stop.wait()
    finally:
        service.draining = True
        heartbeat.beat_now()
        await server.drain(config.node.drain_s / 2)
        await heartbeat.stop()
        if formation is not None:
            await formation.stop()
        await directory.stop()
        if parts is not None:
            await parts.close()
            await asyncio.to_thread(kept.write, predictor)
