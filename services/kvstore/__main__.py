"""`python -m services.kvstore --config FILE`: wiring."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.pb import kvstore_pb2_grpc as rpc
from kvcommons.pb import ledger_pb2, shards_pb2_grpc
from kvcommons.rpc.directory import Directory, Heartbeat
from kvcommons.rpc.process import Process, run
from kvcommons.rpc.server import RpcServer
from kvcommons.transport.metrics import DataMetrics
from kvcommons.transport.server import DataServer
from services.kvstore.ballast import Ballast, DiskReserve, reserve_bytes
from services.kvstore.blocks import BlockStore, BlockStoreSettings
from services.kvstore.clock import SystemClock
from services.kvstore.config import KVStoreConfig
from services.kvstore.data import DataHandler
from services.kvstore.database import DamagedDatabase
from services.kvstore.families import META
from services.kvstore.folder import DataFolder
from services.kvstore.integrity import CHECKED_FAMILIES, open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.medium import Medium
from services.kvstore.metrics import RecordsMetrics, SessionMetrics, StoreCollector
from services.kvstore.policies.floors import Floors
from services.kvstore.records.interface import Records
from services.kvstore.server import BlocksServicer, SessionsServicer
from services.kvstore.sessions import open_sessions
from services.kvstore.shard import ReplicasServicer, Shard, ShardRecords, folder_name
from services.kvstore.shard_sessions import ShardSessions
from services.kvstore.upkeep import Upkeep

log = logging.getLogger(__name__)

_MARK_S = 1.0
_REACH_S = 1.0  # between looks for a database that is away
# What opening the databases writes: new logs, and what the old ones held.
START_BYTES = 16 << 20
RPC_THREADS = 4  # RocksDB holds the GIL: more would only wait for each other


async def serve(config: KVStoreConfig, process: Process) -> None:
    """Opens the data folder, serves until a signal to stop, and leaves everything on disk."""
    folder = await asyncio.to_thread(DataFolder, config.data)
    try:
        size_bytes = reserve_bytes(config.data, config.disk_reserve_bytes)
        ballast = Ballast(folder.ballast, size_bytes)
        await asyncio.to_thread(folder.make_room, ballast, min(START_BYTES, ballast.size_bytes))
        store = await asyncio.to_thread(_open_blocks, folder, config, DiskReserve(size_bytes, ballast))
        try:
            kept = (
                _in_database(config, process, store)
                if config.records
                else _in_folder(config, process, store, folder, ballast)
            )
            async with kept as records:
                await _serve(config, process, store, records)
        finally:
            await asyncio.to_thread(store.close, config.node.drain_s / 4)
    finally:
        folder.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Records, and where they lie; `shard` is set where that is this kvstore's own folder."""

    records: Records
    place: str
    shard: Shard | None = None
    sessions: ShardSessions | None = None


@asynccontextmanager
async def _in_database(config: KVStoreConfig, process: Process, store: BlockStore) -> AsyncIterator[_Kept]:
    try:
        from services.kvstore.records.address import conninfo_of, place_of
        from services.kvstore.records.sql import SqlRecords
    except ImportError as error:
        raise InvalidInput(
            f"records is set, and psycopg cannot be imported ({error}): install kvcommons[kvstore,postgres]",
            param="records",
        ) from error
    conninfo = conninfo_of(config.records, config.records_password_file)
    records = SqlRecords(
        conninfo,
        default_ttl_s=config.session_ttl_s,
        clock=SystemClock(),
        unnamed=store.forget,
        connections=config.records_connections,
        call_s=config.records_timeout_s,
        observer=RecordsMetrics(process.telemetry.registry),
    )
    try:
        yield _Kept(records=records, place=f"the database {place_of(conninfo)} (records in [kvstore])")
    finally:
        await records.close()


@asynccontextmanager
async def _in_folder(
    config: KVStoreConfig, process: Process, store: BlockStore, folder: DataFolder, ballast: Ballast
) -> AsyncIterator[_Kept]:
    mark = Mark(folder.mark)
    sessions = await asyncio.to_thread(_open_sessions, folder, config, store, mark, ballast)
    executor = ThreadPoolExecutor(RPC_THREADS, thread_name_prefix="kvstore-rpc")
    shard = Shard(sessions, executor, Directory(config.ledger, process.instance_id))
    records = ShardRecords(sessions, executor, shard)
    marking = asyncio.create_task(_keep(mark), name="mark")
    try:
        yield _Kept(records=records, place=str(folder.sessions), shard=shard, sessions=sessions)
    finally:
        marking.cancel()
        await records.close()
        executor.shutdown(wait=True)
        mark.close()


async def _serve(config: KVStoreConfig, process: Process, store: BlockStore, kept: _Kept) -> None:
    records, sessions = kept.records, kept.sessions
    upkeep = Upkeep(records, kept.place)
    count = (lambda: upkeep.sessions) if sessions is None else (lambda: sessions.count)
    process.telemetry.registry.register(StoreCollector(store, count))
    server = RpcServer(config.node.listen, process.telemetry, call_deadline_s=config.node.call_deadline_s)
    metrics = SessionMetrics(process.telemetry.registry)
    server.add(rpc.add_BlocksServicer_to_server, BlocksServicer(store, count))
    carry = records.carry if isinstance(records, ShardRecords) else None
    server.add(rpc.add_SessionsServicer_to_server, SessionsServicer(store, records, metrics, carry))
    if kept.shard is not None:
        server.add(shards_pb2_grpc.add_ReplicasServicer_to_server, ReplicasServicer(kept.shard))
    handler = DataHandler(store, process.telemetry)
    data_server = DataServer(
        config.data_plane.data_listen,
        handler,
        name="kvstore",
        observer=DataMetrics(process.telemetry.registry, "server"),
        ring_bytes=config.data_plane.data_ring_bytes,
    )
    store.start()
    data_server.start()
    await server.start()
    describe = _describe(config, process, server, data_server.address, store, sessions)
    heartbeat = Heartbeat(config.ledger, describe)
    if kept.shard is not None:
        kept.shard.start(heartbeat.beat_now)

    async def keep() -> None:
        while True:
            reached = await upkeep.round()
            if config.records and reached != server.ready:
                await server.set_ready(reached)
                heartbeat.beat_now()
            await asyncio.sleep(config.sweep_s if reached else min(_REACH_S, config.sweep_s))

    keeping = asyncio.create_task(keep(), name="upkeep")
    try:
        await server.set_ready(not config.records)
        heartbeat.start()
        facts = {"control": server.address, "data": data_server.address, "records": kept.place}
        log.info("serving", extra=facts)
        await process.stop.wait()
    finally:
        keeping.cancel()
        await heartbeat.stop()
        await server.drain(config.node.drain_s / 4)
        if kept.shard is not None:
            await kept.shard.stop()
        await asyncio.to_thread(data_server.stop, config.node.drain_s / 4)


def _open_blocks(folder: DataFolder, config: KVStoreConfig, reserve: DiskReserve) -> BlockStore:
    """Without what an index that is damaged had named: KV is a cache, and is computed again."""
    try:
        return _blocks(folder, config, reserve)
    except DamagedDatabase as error:
        log.error("%s. It is set aside, and the blocks on disk are given up", error.message)
    folder.set_index_aside()
    return _blocks(folder, config, reserve)


def _blocks(folder: DataFolder, config: KVStoreConfig, reserve: DiskReserve) -> BlockStore:
    settings = BlockStoreSettings(
        dram_bytes=config.dram_bytes,
        disk_bytes=config.disk_bytes,
        policy=config.policy,
        dram_buffer=config.dram_buffer,
        block_ttl_s=config.block_ttl_s,
        floors=Floors(share=config.tenant_floors, weights=config.tenant_weights),
        io_threads=config.io_threads,
        blocks_max=config.blocks_max,
        staging_s=config.staging_s,
        scrub_bytes_per_s=config.scrub_bytes_per_s,
    )
    medium = Medium.local(folder.slabs, folder.index, reserve)
    try:
        return BlockStore(medium, settings)
    except KVCommonsError:
        medium.index.close()
        raise


def _open_sessions(
    folder: DataFolder, config: KVStoreConfig, store: BlockStore, mark: Mark, ballast: Ballast
) -> ShardSessions:
    """Raises DataLoss where what was committed is not all there."""
    name = folder_name(config.data, config.shard)
    table = open_integrity_table(
        open_sessions(folder.sessions, ballast), CHECKED_FAMILIES, meta=META, path=folder.sessions
    )
    try:
        table.begin(mark)
        return ShardSessions(
            table,
            folder=name,
            default_ttl_s=config.session_ttl_s,
            clock=SystemClock(),
            unnamed=store.forget,
        )
    except (KVCommonsError, OSError):
        table.close()
        raise


def _describe(
    config: KVStoreConfig,
    process: Process,
    server: RpcServer,
    data_address: str,
    store: BlockStore,
    sessions: ShardSessions | None,
) -> Callable[[], ledger_pb2.Instance]:
    started_ms = int(time.time() * 1000)

    def describe() -> ledger_pb2.Instance:
        stats = store.stats()
        return ledger_pb2.Instance(
            id=process.instance_id,
            service="kvstore",
            control_address=config.node.advertise_control or server.address,
            data_address=config.data_plane.advertise_data or data_address,
            host=process.host,
            load=ledger_pb2.Load(
                total_blocks=stats.disk_capacity_blocks,
                free_blocks=max(0, stats.disk_capacity_blocks - stats.disk_blocks),
                queued=stats.pending_writes,
                ready=server.ready,
            ),
            started_ms=started_ms,
            shard=sessions.shard() if sessions is not None else None,
        )

    return describe


async def _keep(mark: Mark) -> None:
    """Keeps what it says of how far the sessions have come, over a loss of power too."""
    while True:
        try:
            await asyncio.to_thread(mark.sync)
        except OSError as error:
            log.warning("the mark of the sessions is not up to date: %s", error)
        await asyncio.sleep(_MARK_S)


if __name__ == "__main__":
    sys.exit(run("kvstore", KVStoreConfig, serve))
