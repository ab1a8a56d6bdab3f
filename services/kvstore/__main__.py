"""`python -m services.kvstore --config FILE`: wiring."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.pb import kvstore_pb2_grpc as rpc
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.directory import Directory, Heartbeat
from kvcommons.rpc.process import Process, run
from kvcommons.rpc.server import RpcServer
from kvcommons.transport.metrics import DataMetrics
from kvcommons.transport.server import DataServer
from services.kvstore.ballast import Ballast, DiskReserve, reserve_bytes
from services.kvstore.blocks import BlockStore, BlockStoreSettings
from services.kvstore.clock import KEPT_EVERY_S, Clock, SteadyClock
from services.kvstore.config import KVStoreConfig
from services.kvstore.data import DataHandler
from services.kvstore.database import DamagedDatabase
from services.kvstore.folder import DataFolder, folder_name
from services.kvstore.integrity import open_integrity_table
from services.kvstore.mark import Mark
from services.kvstore.medium import Medium
from services.kvstore.membership import Membership
from services.kvstore.metrics import RecordsMetrics, SessionMetrics, StoreCollector
from services.kvstore.place import RecordsPlace
from services.kvstore.policies.floors import Ceilings, Floors
from services.kvstore.records.damaged import DamagedRecords
from services.kvstore.records.embedded import EmbeddedRecords
from services.kvstore.records.interface import Records
from services.kvstore.server import BlocksServicer, SessionsServicer
from services.kvstore.sessions import Sessions, open_sessions
from services.kvstore.upkeep import Upkeep

log = logging.getLogger(__name__)

_MARK_S = 1.0
_REACH_S = 1.0  # between looks for a database that is away
_DECIDED_S = 0.5  # for the place of the records, besides the view's changes: a stack that starts waits for it
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
        gc.freeze()  # the blocks that were found: no collection goes over them while a request waits
        try:
            name = folder_name(config.data, config.folder)
            directory = Directory(config.ledger, process.instance_id, process.dialer())
            clock = SteadyClock(folder.clock)
            place = await asyncio.to_thread(RecordsPlace, folder.place)
            opened = (
                _in_database(config, process, store, directory, clock, place)
                if config.records
                else _in_folder(config, process, store, directory, folder, name, ballast, clock, place)
            )
            async with opened as kept:
                keeping = asyncio.create_task(_keep_time(clock), name="clock")
                try:
                    await _serve(config, process, store, directory, kept, name)
                finally:
                    keeping.cancel()
        finally:
            await asyncio.to_thread(store.close, config.node.drain_s / 4)
    finally:
        folder.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Session records. `count` says how many there are; None: whoever asks has to wait."""

    records: Records
    membership: Membership
    count: Callable[[], int] | None = None


@asynccontextmanager
async def _in_database(
    config: KVStoreConfig,
    process: Process,
    store: BlockStore,
    directory: Directory,
    clock: Clock,
    known: RecordsPlace,
) -> AsyncIterator[_Kept]:
    try:
        from services.kvstore.records.address import conninfo_of, place_of
        from services.kvstore.records.sql import SqlRecords
    except ImportError as error:
        raise InvalidInput(
            f"records is set, and psycopg cannot be imported ({error}): install kvcommons[kvstore,postgres]",
            param="records",
        ) from error
    conninfo = conninfo_of(config.records, config.records_password_file)
    place = f"database {place_of(conninfo)}"
    membership = Membership(
        directory, instance_id=process.instance_id, records=place, place=known, dialer=process.dialer()
    )

    def unnamed(model: bytes, block_ids: Sequence[bytes]) -> None:
        store.forget(model, block_ids)
        membership.forget(model, block_ids)

    observer = RecordsMetrics(process.telemetry.registry)
    records = SqlRecords(
        conninfo,
        default_ttl_s=config.session_ttl_s,
        clock=clock,
        unnamed=unnamed,
        connections=config.records_connections,
        call_s=config.records_timeout_s,
        observer=observer,
        damaged=DamagedRecords(observer.damaged),
    )
    try:
        yield _Kept(records=records, membership=membership)
    finally:
        await records.close()
        await membership.close()


@asynccontextmanager
async def _in_folder(
    config: KVStoreConfig,
    process: Process,
    store: BlockStore,
    directory: Directory,
    folder: DataFolder,
    name: str,
    ballast: Ballast,
    clock: Clock,
    known: RecordsPlace,
) -> AsyncIterator[_Kept]:
    membership = Membership(
        directory,
        instance_id=process.instance_id,
        records=f"folder {name}",
        place=known,
        dialer=process.dialer(),
    )
    mark = Mark(folder.mark)
    observer = RecordsMetrics(process.telemetry.registry)
    damaged = DamagedRecords(observer.damaged)
    sessions = await asyncio.to_thread(_open_sessions, folder, config, store, mark, ballast, damaged, clock)
    executor = ThreadPoolExecutor(RPC_THREADS, thread_name_prefix="kvstore-rpc")
    records = EmbeddedRecords(sessions, executor, observer)
    marking = asyncio.create_task(_keep(mark), name="mark")
    try:
        yield _Kept(records=records, membership=membership, count=lambda: sessions.count)
    finally:
        marking.cancel()
        await records.close()
        executor.shutdown(wait=True)
        mark.close()


async def _serve(
    config: KVStoreConfig,
    process: Process,
    store: BlockStore,
    directory: Directory,
    kept: _Kept,
    name: str,
) -> None:
    membership = kept.membership
    upkeep = Upkeep(kept.records, membership.records)
    count = kept.count or (lambda: upkeep.sessions)
    process.telemetry.registry.register(StoreCollector(store, count))
    server = process.server(config.node, config.tenant_key)
    metrics = SessionMetrics(process.telemetry.registry)
    server.add(rpc.add_BlocksServicer_to_server, BlocksServicer(store, count))
    sessions = SessionsServicer(store, kept.records, metrics, lambda: membership.refusal)
    server.add(rpc.add_SessionsServicer_to_server, sessions)
    handler = DataHandler(store, process.telemetry)
    data_server = DataServer(
        config.data_plane.data_listen,
        handler,
        name="kvstore",
        observer=DataMetrics(process.telemetry.registry, "server"),
        ring_bytes=config.data_plane.data_ring_bytes,
        credentials=process.credentials,
    )
    store.start()
    data_server.start()
    await server.start()
    identity = ledger_pb2.Instance(
        id=process.instance_id,
        service="kvstore",
        control_address=config.node.advertise_control or server.address,
        data_address=config.data_plane.advertise_data or data_server.address,
        host=process.host,
        started_ms=int(time.time() * 1000),
        folder=name,
        records=membership.records,
    )
    heartbeat = Heartbeat(config.ledger, _describe(identity, server, store), process.dialer())
    directory.start()
    await server.set_ready(not config.records and not membership.refusal)
    watching = asyncio.create_task(
        _watch(config, server, directory, membership, upkeep, heartbeat), name="upkeep"
    )
    try:
        heartbeat.start()
        facts = {"control": server.address, "data": data_server.address, "records": membership.records}
        log.info("serving", extra=facts)
        await process.stop.wait()
    finally:
        watching.cancel()
        await heartbeat.stop()
        await server.drain(config.node.drain_s / 4)
        await directory.stop()
        await asyncio.to_thread(data_server.stop, config.node.drain_s / 4)


async def _watch(
    config: KVStoreConfig,
    server: RpcServer,
    directory: Directory,
    membership: Membership,
    upkeep: Upkeep,
    heartbeat: Heartbeat,
) -> None:
    """Has the records kept up. This kvstore is ready while its database is within reach (an own disk is tried
    by each call), and while it is known that its records are the stack's."""
    refusal, reached, due_s = "", not config.records, 0.0
    while True:
        if time.monotonic() >= due_s:
            reached = await upkeep.round() or not config.records
            due_s = time.monotonic() + (config.sweep_s if reached else min(_REACH_S, config.sweep_s))
        if membership.refusal != refusal:
            refusal = membership.refusal
            level = logging.ERROR if refusal and membership.decided else logging.INFO
            log.log(level, "%s", refusal or "the session records of this stack are here: they are served")
        await membership.remember()
        if server.ready != (reached and not refusal):
            await server.set_ready(not server.ready)
            heartbeat.beat_now()
        wait_s = max(due_s - time.monotonic(), 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if membership.decided else min(wait_s, _DECIDED_S)):
                await directory.changed()


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
        touch_memory=config.touch_memory,
        disk_bytes=config.disk_bytes,
        policy=config.policy,
        dram_buffer=config.dram_buffer,
        block_ttl_s=config.block_ttl_s,
        floors=Floors(share=config.tenant_floors, weights=config.tenant_weights),
        ceilings=Ceilings(dram_bytes=config.tenant_dram_bytes, disk_bytes=config.tenant_disk_bytes),
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
    folder: DataFolder,
    config: KVStoreConfig,
    store: BlockStore,
    mark: Mark,
    ballast: Ballast,
    damaged: DamagedRecords,
    clock: Clock,
) -> Sessions:
    """Raises DataLoss where what was committed is not all there."""
    table = open_integrity_table(open_sessions(folder.sessions, ballast), folder.sessions)
    try:
        table.begin(mark)
        return Sessions(
            table,
            default_ttl_s=config.session_ttl_s,
            clock=clock,
            unnamed=store.forget,
            damaged=damaged,
        )
    except (KVCommonsError, OSError):
        table.close()
        raise


def _describe(
    identity: ledger_pb2.Instance, server: RpcServer, store: BlockStore
) -> Callable[[], ledger_pb2.Instance]:
    def describe() -> ledger_pb2.Instance:
        stats = store.stats()
        identity.load.total_blocks = stats.disk_capacity_blocks
        identity.load.free_blocks = max(0, stats.disk_capacity_blocks - stats.disk_blocks)
        identity.load.queued = stats.pending_writes
        identity.load.ready = server.ready
        return identity

    return describe


async def _keep(mark: Mark) -> None:
    """Keeps what it says of how far the sessions have come, over a loss of power too."""
    while True:
        try:
            await asyncio.to_thread(mark.sync)
        except OSError as error:
            log.warning("the mark of the sessions is not up to date: %s", error)
        await asyncio.sleep(_MARK_S)


async def _keep_time(clock: SteadyClock) -> None:
    """By which the next start tells whether the system's clock jumped meanwhile."""
    while True:
        try:
            await asyncio.to_thread(clock.keep)
        except OSError as error:
            log.warning("the time is not kept: %s", error)
        await asyncio.sleep(KEPT_EVERY_S)


if __name__ == "__main__":
    sys.exit(run("kvstore", KVStoreConfig, serve))
