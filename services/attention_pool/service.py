"""An attention pool from start to drain: what it is made of, in the order in which the parts come and go."""

from __future__ import annotations

import asyncio
import logging
import time

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.metrics import SaverCollector
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.history import Condemner
from kvcommons.holder.data import HolderData
from kvcommons.holder.server import HolderService
from kvcommons.pb import holder_pb2_grpc, ledger_pb2
from kvcommons.rpc.directory import Heartbeat
from kvcommons.rpc.process import Process
from kvcommons.telemetry.metrics import LoadMetrics
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.metrics import DataMetrics
from kvcommons.transport.server import DataServer
from services.attention_pool.config import AttentionPoolConfig
from services.attention_pool.pool import Pool, head_part, open_pool

log = logging.getLogger(__name__)

_STOP_S = 2.0  # for threads to end, once nothing is under way
_LOOK_S = 0.1  # between looks whether all was given back


class PoolParts:
    """A pool that is open, and what serves it. Made on the event loop."""

    def __init__(self, config: AttentionPoolConfig, pool: Pool, process: Process) -> None:
        telemetry = process.telemetry
        self.pool = pool
        pool.holder.allocator.observe = telemetry.observe
        dialer = process.dialer(DataMetrics(telemetry.registry, "client"))
        self._condemner = Condemner(dialer)
        self._loader = BlockLoader(self._condemner, name="pool-load", dialer=dialer)
        self._saver = BlockSaver(telemetry.instance_id, buffer_bytes=config.save_buffer_bytes, dialer=dialer)
        telemetry.registry.register(SaverCollector(self._saver))
        self.service = HolderService(dialer)
        held = HolderData(pool.holder, tracer=telemetry.tracer)
        self.data_server = DataServer(
            config.data_plane.data_listen,
            held,
            name="attention_pool",
            observer=DataMetrics(telemetry.registry, "server"),
            ring_bytes=config.data_plane.data_ring_bytes,
            credentials=process.credentials,
            ask_s=config.awake_us / 1e6,
            session=held.attention.session,
        )
        allocator = pool.holder.allocator
        LoadMetrics(
            telemetry.registry,
            pool.info.name,
            running=lambda: len(pool.holder.held()),
            waiting=lambda: 0,
            kv_cache_usage=lambda: allocator.in_use / allocator.total,
        )

    def start(self) -> None:
        self.data_server.start()
        self.service.open(self.pool.holder, self._loader, self._saver, self._condemner)

    async def given_back(self, within_s: float) -> bool:
        """Lends no more, and waits until all that is lent has come back."""
        self.pool.holder.stop_lending()
        deadline = Deadline.after(within_s)
        while self.pool.holder.lent_blocks and not deadline.passed():
            await asyncio.sleep(_LOOK_S)
        return not self.pool.holder.lent_blocks

    async def close(self) -> None:
        """Saves that are pending get a moment to reach the store."""
        await asyncio.to_thread(self.data_server.stop, _STOP_S)
        await self.service.close()
        await asyncio.to_thread(self._loader.close)
        await asyncio.to_thread(self._saver.close, Deadline.after(_STOP_S))
        await self._condemner.close()


async def serve(config: AttentionPoolConfig, process: Process) -> None:
    """Serves once its memory is there; at a signal to stop, waits a bounded time for lent blocks to come
    back."""
    part = head_part(config.heads, config.head_group)
    server = process.server(config.node)
    started_ms = int(time.time() * 1000)
    pool = await asyncio.to_thread(open_pool, config.engine, process.instance_id, part)
    parts = PoolParts(config, pool, process)
    server.add(holder_pb2_grpc.add_HolderServicer_to_server, parts.service)

    def describe() -> ledger_pb2.Instance:
        holder = pool.holder
        instance = ledger_pb2.Instance(
            id=process.instance_id,
            service="attention_pool",
            control_address=config.node.advertise_control or server.address,
            data_address=config.data_plane.advertise_data or parts.data_server.address,
            host=process.host,
            model=pool.info,
            load=ledger_pb2.Load(
                total_blocks=holder.allocator.total,
                free_blocks=holder.allocator.free,
                lendable_blocks=holder.lendable_blocks,
                lend_blocks_max=holder.lend_blocks_max,
                running=len(holder.held()),
                # What a head group has lent counts once.
                loans=holder.loans() if part is None or not part.number else {},
                ready=server.ready and not process.stop.is_set(),
            ),
            started_ms=started_ms,
        )
        if part is not None:
            heads = ledger_pb2.HeadPart(group=config.head_group or "", number=part.number, parts=part.parts)
            instance.heads.CopyFrom(heads)
        return instance

    heartbeat = Heartbeat(config.ledger, describe, process.dialer())
    try:
        parts.start()
        await server.start()
        await server.set_ready(True)
        heartbeat.start()
        log.info("serving", extra={"control": server.address, "data": parts.data_server.address})
        await process.stop.wait()
        heartbeat.beat_now()
        if not await parts.given_back(max(config.node.drain_s - 3 * _STOP_S, 0.5)):
            log.warning("ended with %d blocks still lent", pool.holder.lent_blocks)
    finally:
        await heartbeat.stop()
        await server.drain(_STOP_S / 2)
        await parts.close()
