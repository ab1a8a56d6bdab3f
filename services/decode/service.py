"""A decode instance from start to drain: what it is made of, in the order in which the parts come and go."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.metrics import SaverCollector
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.calibration import calibrated
from kvcommons.engine.core import Core
from kvcommons.engine.core_lock import CoreLock, CoreLockCollector
from kvcommons.engine.drafts.model import DraftModel, load_draft_model
from kvcommons.engine.history import Condemner, Histories
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.scheduler import Scheduler
from kvcommons.errors import DeadlineExceeded
from kvcommons.holder.allowance import new_allowance
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.data import HolderData
from kvcommons.holder.head_store import WholeStore
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.server import HolderService
from kvcommons.pb import common_pb2, data_pb2, decode_pb2_grpc, holder_pb2_grpc, ledger_pb2, prefill_pb2_grpc
from kvcommons.placement.auto import Costs
from kvcommons.placement.choice import placement_of, policy_class
from kvcommons.prefill.metrics import PrefillMetrics
from kvcommons.prefill.role import PrefillRole
from kvcommons.prefill.service import PrefillService
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.directory import Directory, Heartbeat
from kvcommons.rpc.process import Process
from kvcommons.stages.division import standing_division
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
from kvcommons.transport.server import DataServer
from services.decode.arrival.arrivals import Arrivals
from services.decode.arrival.growth import Growth
from services.decode.arrival.growth_queue import GrowthQueue
from services.decode.arrival.local_prefill import LocalPrefill
from services.decode.batching.callbacks import LoopCallbacks
from services.decode.batching.engine import decode_engine
from services.decode.borrowing.creditors import Debtor
from services.decode.borrowing.ledger_client import LedgerClient
from services.decode.borrowing.loans import Loans
from services.decode.borrowing.slowness import Slowness
from services.decode.config import DecodeConfig
from services.decode.metrics import DecodeMetrics
from services.decode.moving.evacuation import Evacuation
from services.decode.moving.mover import Homecoming, Mover
from services.decode.server import DecodeService
from services.decode.settlement.participant import DebtorService, SettlementParticipant
from services.decode.stage import serve_decode_stage, stage_share
from services.decode.staggering.rotation import Rotation

log = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL_PROMPTS_MAX = 256  # that wait to be computed here; more go to prefill
READ_BUFFER_BYTES = 256 << 20  # history of prompts computed here, loaded while they wait
STOP_S = 1.0  # for threads to end, once nothing is under way


class DecodeParts:
    """The engine and what it stands on, for a core that is loaded. Made on the event loop."""

    def __init__(
        self,
        config: DecodeConfig,
        core: Core,
        predictor: Predictor,
        process: Process,
        lending: HolderService,
        prefill_metrics: PrefillMetrics,
        share: StageShare,
        ranks: RankGroup | None,
        changed: Callable[[], None],
        draft_model: DraftModel | None,
    ) -> None:
        """`share`: which stage this is of which. `changed` is called, on any thread, when its stages have
        come together, or apart."""
        self.core, self._lending = core, lending
        instance_id, registry = process.instance_id, process.telemetry.registry
        core.allocator.observe = process.telemetry.observe
        dialer = process.dialer(DataMetrics(registry, "client"))
        self.condemner = Condemner(dialer)
        self.loader = BlockLoader(self.condemner, name="decode-load", dialer=dialer)
        self.saver = BlockSaver(instance_id, buffer_bytes=config.save_buffer_bytes, dialer=dialer)
        registry.register(SaverCollector(self.saver))
        self.keeper = BlockKeeper(core, self.saver)
        model, staged, stage_metrics = core.model, not share.alone, StageMetrics(registry)
        self.group: StageGroup | None = None
        if staged:
            self.group = StageGroup(
                core,
                share.division,
                metrics=stage_metrics,
                saver=self.saver,
                condemner=self.condemner,
                iteration_s=config.shape.stage_deadline_s,
                instance_id=instance_id,
                changed=changed,
                ranks=ranks,
                dialer=dialer,
            )
        self.holder = Holder(
            core.memory,
            core.allocator,
            HeldModel(
                fingerprint=core.info.fingerprint,
                scale=model.scale,
                windows=tuple(model.window(layer) for layer in range(core.layout.layers)),
            ),
            instance_id=instance_id,
            lend_blocks_max=0 if staged else int(core.allocator.total * config.lend_share),
        )
        budget = AttentionBudget(
            config.tbt_objective_s, new_allowance(core.backend.attention.native_exchange)
        )
        costs = Costs(predictor, layers=core.layout.layers, block_bytes=core.layout.block_bytes)
        placement = placement_of(
            config.placement, costs=costs, holder_blocks=max(config.holder_tokens // core.block_tokens, 1)
        )
        self.callbacks = LoopCallbacks(borrow_blocks=config.borrow_blocks)
        metrics = DecodeMetrics(registry)
        self.rotation: Rotation | None = None
        if config.replicas:
            self.rotation = Rotation(
                config.pipelining,
                config.replicas,
                core,
                budget,
                metrics,
                deadline_s=config.slice_deadline_s,
                dialer=dialer,
            )
        core_lock = self._core_lock = CoreLock(Path(config.core_lock)) if config.core_lock else None
        registry.register(CoreLockCollector(core_lock))
        scheduler = Scheduler(
            max_batch=config.max_batch * len(share.ranges),
            max_queue=LOCAL_PROMPTS_MAX,
            max_prompts=config.max_batch,
        )
        histories, prompts = Histories(core, self.loader), None
        if self.group is not None:
            histories = StagedHistories(histories, self.group.load)
        local_tokens = core.info.context_window if config.colocated else config.max_local_prefill_tokens
        if local_tokens:
            prompts = Prompts(
                core,
                scheduler,
                chunk_tokens=config.chunk_tokens,
                keeper=self.keeper,
                histories=histories,
                read_buffer=ReadBuffer(
                    layers=len(core.layers), bytes_max=READ_BUFFER_BYTES, whole_first=staged
                ),
                predictor=predictor,
                stages=len(share.ranges),
                tracer=process.telemetry.tracer,
                tbt_objective_s=config.tbt_objective_s,
                lends=lambda: bool(self.holder.lent_blocks),
                core_lock=core_lock,
            )
        self.engine = decode_engine(
            core,
            scheduler=scheduler,
            prompts=prompts,
            predictor=predictor,
            max_draft_tokens=config.max_draft_tokens,
            draft_model=draft_model,
            tbt_objective_s=config.tbt_objective_s,
            may_borrow=placement.borrows,
            attend_deadline_s=config.attend_deadline_s,
            budget=budget,
            keeper=self.keeper,
            callbacks=self.callbacks,
            metrics=metrics,
            pipelining="off" if core_lock and config.pipelining == "auto" else config.pipelining,
            mini_batches=config.mini_batches,
            rotation=self.rotation,
            core_lock=core_lock,
            stages=self.group,
        )
        if self.group is not None:
            self.group.attach(self.engine)
        # Before there are channels: an address that is taken ends the start here.
        held = HolderData(
            self.holder,
            on_start_sequence=self._started,
            history=self._history,
            places=self._places,
            budget=budget,
            tracer=process.telemetry.tracer,
        )
        self.data = DataServer(
            config.data_plane.data_listen,
            self.rotation.handler(held) if self.rotation else held,
            name="decode",
            observer=DataMetrics(registry, "server"),
            ring_bytes=config.data_plane.data_ring_bytes,
            credentials=process.credentials,
            session=held.attention.session,
        )
        self.data_address = config.data_plane.advertise_data or self.data.address
        self.whole_store = WholeStore(
            model=core.info.fingerprint,
            layout=Layout.of(core.info),
            condemn=self.condemner,
            saver=self.saver,
            dialer=dialer,
        )
        self.loans = Loans(
            Debtor(
                instance_id=instance_id,
                model=core.info.fingerprint,
                block_tokens=core.block_tokens,
                store=self.whole_store,
                rank=model.rank,
            ),
            LedgerClient(
                config.ledger,
                debtor=instance_id,
                host=process.host,
                model=core.info.fingerprint,
                connect=partial(dialer.channel, role="ledger"),
            ),
            lease_ms=config.lease_ms,
            lost=self.engine.fail,
            slowness=Slowness(
                layers=core.layout.layers, deadline_s=config.attend_deadline_s, clock=time.monotonic
            ),
            dialer=dialer,
            observe=process.telemetry.observe,
        )
        self.mover = Mover(core, self.engine, self.loans, metrics, costs)
        self.tasks = [] if staged else [Evacuation(core, self.mover, self.loans, registry).task]
        if config.homecoming and placement.comes_home() and not staged:
            self.tasks.append(Homecoming(core, self.mover, costs).task)
        self.participant = SettlementParticipant(self.holder, self.mover, self.loans)
        if self.rotation:
            metrics.group(self.rotation.peers_well)
        local: LocalPrefill | None = None
        self.prefill: PrefillRole | None = None
        if prompts is not None:
            local = LocalPrefill(core, self.engine, prompts, prefill_metrics, tokens_max=local_tokens)
        if prompts is not None and config.colocated:
            self.prefill = PrefillRole(
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
        self.growth = Growth(
            core,
            GrowthQueue(wait_s=config.grow_wait_s, draw=random.random),
            engine=self.engine,
            holder=self.holder,
            loans=self.loans,
            data_address=self.data_address,
            sequences=lambda: len(self.arrivals),
            joins=not staged,  # prefill would have to write to each stage's further part
        )
        self.arrivals = Arrivals(
            core,
            placement=placement,
            data_address=self.data_address,
            fetch_deadline_s=config.fetch_deadline_s,
            fetch_min_bytes=config.fetch_min_bytes,
            engine=self.engine,
            holder=self.holder,
            histories=histories,
            loans=self.loans,
            growth=self.growth,
            local=local,
            stages=self.group,
        )
        self.callbacks.connect(self.engine, self.arrivals, self.loans)
        self._loop = asyncio.get_running_loop()
        LoadMetrics(
            registry,
            core.info.name,
            running=lambda: self.engine.running,
            waiting=lambda: self.engine.queued,
            kv_cache_usage=lambda: core.allocator.in_use / core.allocator.total,
            prediction_error=lambda: self.engine.predictor.error,
        )

    def start(self) -> None:
        if self.rotation:
            self.rotation.join(self.data_address)
        self.engine.start()
        self.data.start()
        self._lending.open(self.holder, self.loader, self.saver, self.condemner)
        if self.rotation:
            self.rotation.start()
        for task in self.tasks:
            task.start()

    async def close(self) -> None:
        """Saves that are pending get a moment to reach the store."""
        for task in self.tasks:
            await task.close()
        await self.participant.close()
        await asyncio.to_thread(self.engine.stop, STOP_S)
        if self.group is not None:
            await asyncio.to_thread(self.group.close)
        if self.rotation:
            await asyncio.to_thread(self.rotation.close, STOP_S)
        await asyncio.to_thread(self.data.stop, STOP_S)
        await self.loans.close()
        await self._lending.close()
        await asyncio.to_thread(self._close)
        await self.condemner.close()

    def _close(self) -> None:
        if self._core_lock is not None:
            self._core_lock.close()
        if self.prefill is not None:
            self.prefill.close()
        self.whole_store.close(Deadline.after(STOP_S))
        self.loader.close()
        self.arrivals.close()
        self.keeper.close()
        self.saver.close(Deadline.after(STOP_S))

    @property
    def together(self) -> bool:
        """All its stages are there."""
        return self.group is None or self.group.formed

    def describe(self, load: ledger_pb2.Load) -> None:
        allocator = self.core.allocator
        load.total_blocks = allocator.total
        load.free_blocks = allocator.free
        load.lendable_blocks = self.holder.lendable_blocks
        load.lend_blocks_max = self.holder.lend_blocks_max
        load.running = self.engine.running
        load.queued = max(len(self.arrivals) - load.running, 0)
        load.batches = self.rotation.shares if self.rotation else 1
        load.changes = self.arrivals.changes
        load.epoch = self.holder.epoch
        load.promised_blocks = self.growth.promised_blocks
        load.costs.update(self.engine.predictor.costs.by_name)
        load.debts.update(self.loans.debts())
        load.loans.update(self.holder.loans())

    def _started(self, start: data_pb2.StartSequence) -> None:
        """On a data thread."""
        self._loop.call_soon_threadsafe(
            self.arrivals.started, start.handle, start.first, start.pushed_from_block
        )

    def _history(self, wanted: data_pb2.AwaitHistory, deadline: Deadline) -> int:
        """On a data thread."""
        return self._wait_for(self.arrivals.history(wanted.handle), deadline, "the history was not fetched")

    def _places(self, wanted: data_pb2.AwaitPlaces, deadline: Deadline) -> list[common_pb2.SegmentPlace]:
        """On a data thread."""
        places = self.arrivals.places(wanted.handle, known_blocks=wanted.known_blocks, blocks=wanted.blocks)
        return self._wait_for(places, deadline, "no further holder joined")

    def _wait_for(self, work: Coroutine[Any, Any, T], deadline: Deadline, late: str) -> T:
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waiting.result(deadline.left())
        except TimeoutError:
            waiting.cancel()
            raise DeadlineExceeded(f"{late} within the deadline") from None


async def serve(config: DecodeConfig, process: Process) -> None:
    """Answers health at once, is ready when the model is loaded, and all its stages are there; drains at a
    signal to stop."""
    if config.shape.follows:
        await serve_decode_stage(config, process)
        return
    placement = policy_class(config.placement)
    server = process.server(config.node, config.tenant_key)
    service = DecodeService(max_sequences=config.max_sequences)
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, service)
    lending = HolderService(process.dialer())
    server.add(holder_pb2_grpc.add_HolderServicer_to_server, lending)
    debtor = DebtorService()
    server.add(holder_pb2_grpc.add_DebtorServicer_to_server, debtor)
    prefill_metrics = PrefillMetrics(process.telemetry.registry)
    prefill = PrefillService(prefill_metrics) if config.colocated else None
    if prefill is not None:
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
    await server.start()
    started_ms = int(time.time() * 1000)
    share: StageShare | None = None
    parts: DecodeParts | None = None

    def registered(service: str, instance_id: str) -> ledger_pb2.Instance:
        return ledger_pb2.Instance(
            id=instance_id,
            service=service,
            control_address=config.node.advertise_control or server.address,
            host=process.host,
            started_ms=started_ms,
        )

    def describe() -> ledger_pb2.Instance:
        instance = registered("decode", process.instance_id)
        if share is not None and not share.alone:
            instance.stage.CopyFrom(share.message())
        if parts is not None:
            instance.data_address = parts.data_address
            instance.model.CopyFrom(parts.core.info)
            instance.products = parts.core.backend.operators.multiplies
            parts.describe(instance.load)
        together = parts is not None and parts.together
        instance.load.ready = server.ready and not process.stop.is_set() and together
        instance.load.only_here = not placement.borrows
        return instance

    def describe_prefill() -> ledger_pb2.Instance:
        assert prefill is not None
        instance = registered("prefill", f"{process.instance_id}-prefill")
        if share is not None and not share.alone:
            instance.stage.CopyFrom(share.message())
            instance.stage.ClearField("division")  # that is for the stages of a prefill
        together = parts is not None and parts.together
        return prefill.describe(instance, ready=server.ready and not process.stop.is_set() and together)

    def changed() -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(regrouped)

    def regrouped() -> None:
        for heartbeat in heartbeats:
            heartbeat.beat_now()
        if formation is not None:
            formation.changed()

    loop = asyncio.get_running_loop()
    directory = Directory(config.ledger, process.instance_id, process.dialer())
    formation: Formation | None = None
    heartbeats = [Heartbeat(config.ledger, describe, process.dialer())]
    if prefill is not None:
        heartbeats.append(Heartbeat(config.ledger, describe_prefill, process.dialer()))
    for heartbeat in heartbeats:
        heartbeat.start()
    if config.shape.members > 1:
        directory.start()
    try:
        others = await standing_division(directory, "decode", config.shape)
        share = await asyncio.to_thread(stage_share, config, others)
        heartbeats[0].beat_now()  # the other stages load theirs meanwhile
        core, ranks = await asyncio.to_thread(load_share, config.engine, share, process.dialer())
        predictor, kept = await asyncio.to_thread(
            calibrated,
            core,
            config.engine,
            chunk_tokens=config.chunk_tokens,
            generates=True,
            core_lock=config.core_lock,
            share=share.of_iterations,
            iterations=Iteration if share.alone else StageIteration,
        )
        token_s = predictor.seconds(IterationWork(rows=1))
        if token_s > config.tbt_objective_s:
            log.warning(
                "tbt_objective_s = %g is less than a token takes here (%.3g s): chunks of prompts beside "
                "tokens will be of the least size",
                config.tbt_objective_s,
                token_s,
            )
        draft_model = None
        if config.draft_model:
            draft_model = await asyncio.to_thread(
                load_draft_model,
                config.engine,
                core,
                config.draft_model,
                max_draft_tokens=config.max_draft_tokens,
                chunk_tokens=config.chunk_tokens,
                core_lock=config.core_lock,
            )
        parts = DecodeParts(
            config, core, predictor, process, lending, prefill_metrics, share, ranks, changed, draft_model
        )
        parts.start()
        if parts.group is not None:
            formation = Formation(parts.group, share, core.info.fingerprint, directory)
            formation.start()
        service.open(core, parts.arrivals, parts.condemner)
        debtor.open(parts.participant)
        if prefill is not None and parts.prefill is not None:
            prefill.open(parts.prefill.intake)
        await server.set_ready(True)
        for heartbeat in heartbeats:
            heartbeat.beat_now()
        await process.stop.wait()
    finally:
        service.drain()
        if prefill is not None:
            prefill.draining = True
        for heartbeat in heartbeats:
            heartbeat.beat_now()
        if parts is not None:
            parts.holder.stop_lending()
        await server.drain(config.node.drain_s / 2)
        for heartbeat in heartbeats:
            await heartbeat.stop()
        if formation is not None:
            await formation.stop()
        await directory.stop()
        if parts is not None:
            await parts.close()
            await asyncio.to_thread(kept.write, predictor)
