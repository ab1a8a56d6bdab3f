"""What the kvstore promises its peers, asked of a real process over gRPC and the data plane."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kvcommons.blockstore.loader import BlockLoader, CorruptObject
from kvcommons.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    SessionNotFound,
    StoreUnavailable,
    TurnInProgress,
    UnsupportedParameter,
)
from kvcommons.pb import data_pb2 as data
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.rblock.layout import Layout
from kvcommons.transport.base import Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import pack
from services.kvstore.tier import BlockShape
from tests.contract.kvstore_process import KvstoreProcess
from tests.contract.postgres_server import PostgresServer
from tests.machine import scaled
from tests.unit.kvstore.samples import MIB, OTHER, SHAPE, block_ids
from tests.waiting import wait_until

IDS = block_ids(12)
MODEL = SHAPE.model


# Where session records lie; as it comes, in the kvstore's own folder.
on_both = pytest.mark.parametrize("records", ["embedded", "sql"], indirect=True)


@pytest.fixture
def records(request: pytest.FixtureRequest) -> dict[str, object]:
    """Settings."""
    if getattr(request, "param", "embedded") == "embedded":
        return {}
    return {"records": request.getfixturevalue("postgres").new_url()}


@pytest.fixture
def store(socket_folder: Path, tmp_path: Path, records: dict[str, object]) -> Iterator[KvstoreProcess]:
    process = KvstoreProcess(socket_folder, tmp_path / "data", **records).wait_ready()
    yield process
    if process.process.poll() is None:
        assert process.terminate() == 0, process.errors


def tiers(store: KvstoreProcess, ids: list[bytes], model: bytes = MODEL) -> list[int]:
    return list(store.blocks.Match(pb.MatchRequest(model=model, block_ids=ids), timeout=scaled(20)).tiers)


def begin(
    store: KvstoreProcess, turn_id: str, session_id: str = "s", known_turn_id: str = ""
) -> pb.BeginTurnReply:
    request = pb.BeginTurnRequest(
        tenant="alice", session_id=session_id, turn_id=turn_id, owner="router", lease_ms=scaled(20_000),
        known_turn_id=known_turn_id,
    )  # fmt: skip
    return store.sessions.BeginTurn(request, timeout=scaled(20))


def commit(
    store: KvstoreProcess, turn_id: str, begun: pb.BeginTurnReply, ids: list[bytes], wait_ms: int
) -> pb.CommitTurnReply:
    request = pb.CommitTurnRequest(
        tenant="alice",
        session_id="s",
        turn_id=turn_id,
        fencing=begun.fencing,
        expected_version=begun.record.version,
        model=MODEL,
        model_name="demo",
        new_tokens=[1, 2, 3],
        new_messages=[pb.Message(role="user", content="Hi")],
        block_ids=ids,
        durable_wait_ms=wait_ms,
    )
    return store.sessions.CommitTurn(request, timeout=scaled(20))


def test_blocks_go_in_and_come_out(store: KvstoreProcess) -> None:
    assert store.put_layer(IDS, 0, count=2) == []
    assert tiers(store, IDS) == []
    assert store.get_blocks(IDS)[0] == 0
    assert store.put_layer(IDS, 2) == []
    assert tiers(store, [*IDS, b"x" * 32]) == [pb.TIER_DRAM] * len(IDS)
    assert store.get_blocks(IDS)[0] == len(IDS)
    assert store.put_layer(IDS[:3], 0, writer="another") == [0, 1, 2]
    stats = store.wait_written()
    assert (stats.dram_blocks, stats.disk_blocks, stats.pending_writes) == (12, 12, 0)
    assert stats.block_hits == 12
    assert stats.block_misses == len(IDS) + 1
    assert stats.dram_capacity_blocks == 16 * MIB // SHAPE.slot_bytes


@on_both
def test_a_killed_store_finds_what_was_durable(
    store: KvstoreProcess, socket_folder: Path, tmp_path: Path, records: dict[str, object]
) -> None:
    store.put_blocks(IDS)
    store.put_blocks(IDS, shape=OTHER)
    begun = begin(store, "t1")
    reply = commit(store, "t1", begun, IDS, scaled(10_000))
    assert (reply.version, reply.durable_blocks) == (1, len(IDS))
    started = begin(store, "t2")
    store.kill()
    again = KvstoreProcess(socket_folder, tmp_path / "data", **records).wait_ready()
    assert tiers(again, IDS) == [pb.TIER_DISK] * len(IDS)
    assert again.get_blocks(IDS)[0] == len(IDS)
    assert tiers(again, IDS) == [pb.TIER_DRAM] * len(IDS)
    record = again.sessions.Get(pb.GetSessionRequest(tenant="alice", session_id="s"), timeout=scaled(20))
    assert (list(record.tokens), list(record.block_ids), record.version) == ([1, 2, 3], IDS, 1)
    assert commit(again, "t2", started, IDS, 0).version == 2  # the turn went on meanwhile
    assert again.terminate() == 0


@on_both
def test_the_history_of_a_turn_is_read_once_the_turn_begins(
    store: KvstoreProcess, socket_folder: Path, tmp_path: Path, records: dict[str, object]
) -> None:
    """Unless its router has had the session lately: then the KV is likely where it was used last."""
    store.put_blocks(IDS)
    commit(store, "t1", begin(store, "t1"), IDS, scaled(10_000))
    assert store.terminate() == 0
    again = KvstoreProcess(socket_folder, tmp_path / "data", **records).wait_ready()
    peek = pb.MatchRequest(model=MODEL, block_ids=IDS, peek=True)
    begun = begin(again, "t2", known_turn_id="t1")
    assert begun.after_known
    assert commit(again, "t2", begun, IDS, scaled(10_000)).durable_blocks == len(IDS)
    assert list(again.blocks.Match(peek).tiers) == [pb.TIER_DISK] * len(IDS)
    begin(again, "t3")
    wait_until(lambda: list(again.blocks.Match(peek).tiers) == [pb.TIER_DRAM] * len(IDS))
    assert again.terminate() == 0


def test_a_tenant_keeps_its_floor_while_another_fills_both_tiers(socket_folder: Path, tmp_path: Path) -> None:
    """Over a restart, too: whose a block is stands in the index."""
    settings = {"dram_bytes": 4 * MIB, "disk_bytes": 16 * MIB}
    store = KvstoreProcess(socket_folder, tmp_path / "data", **settings).wait_ready()
    try:
        own = block_ids(60, "ann")
        store.put_blocks(own, tenant="ann")
        store.wait_written()
        for again in range(2):
            for round in range(20):  # 24 MB each time
                flood = block_ids(75, f"bob {again} {round}")
                store.put_blocks(flood, tenant="bob")
                store.wait_written()
            assert pb.TIER_DRAM in tiers(store, own) or again
            assert store.get_blocks(own)[0] == len(own)
            if not again:
                store.kill()
                store = KvstoreProcess(socket_folder, tmp_path / "data", **settings).wait_ready()
    finally:
        store.kill()


def test_floors_are_divided_by_the_weights_of_tenants(socket_folder: Path, tmp_path: Path) -> None:
    """Half of the disk is floors, of three tenants that have blocks there. One that counts three times as
    often as each other keeps three fifths of it; one as often as they, a third."""
    kept, halves, each = [], [], 75
    for weight in (3.0, 1.0):
        settings = {"disk_bytes": 16 * MIB, "tenant_weights": json.dumps({"ann": weight})}
        store = KvstoreProcess(socket_folder, tmp_path / f"{weight}", **settings).wait_ready()
        try:
            own = block_ids(400, "ann")
            store.put_blocks(own, tenant="ann")
            store.put_blocks(block_ids(10, "eve"), tenant="eve")
            for round in range(20):
                store.put_blocks(block_ids(each, f"bob {round}"), tenant="bob")
                halves.append((store.wait_written().disk_blocks - each) / 2)
            kept.append(len(tiers(store, own)))
        finally:
            store.kill()
    # The tier makes room before it writes: floors are of what is in it then.
    assert kept == pytest.approx([halves[-1] * 3 / 5, halves[-1] / 3], abs=1)


def test_a_tenant_has_no_more_than_its_ceiling_in_either_tier(socket_folder: Path, tmp_path: Path) -> None:
    """Of its own what was used least goes, though there is room; others have what they like."""
    bounds = {
        "tenant_dram_bytes": json.dumps({"bob": 10 * SHAPE.slot_bytes}),
        "tenant_disk_bytes": json.dumps({"*": 20 * SHAPE.slot_bytes}),
    }
    store = KvstoreProcess(socket_folder, tmp_path / "data", **bounds).wait_ready()
    ann, bob = block_ids(20, "ann"), [block_ids(15, f"bob {number}") for number in range(2)]

    try:
        store.put_blocks(ann, tenant="ann")
        for ids in bob:
            store.put_blocks(ids, tenant="bob")
            store.wait_written()

        def within() -> bool:
            stats = store.wait_written()
            return (stats.dram_blocks, stats.disk_blocks) == (30, 40)

        wait_until(within, "bob has more than he may", within_s=10)
        assert tiers(store, ann) == [pb.TIER_DRAM] * 20
        assert store.get_blocks(bob[1])[0] == 15
        store.kill()
        bounds = {"tenant_disk_bytes": json.dumps({"bob": 5 * SHAPE.slot_bytes})}
        store = KvstoreProcess(socket_folder, tmp_path / "data", **bounds).wait_ready()
        wait_until(lambda: store.wait_written().disk_blocks == 25, "a lower ceiling", within_s=10)
        assert store.get_blocks(ann)[0] == 20
    finally:
        store.kill()


def test_part_of_the_layers_can_be_asked_for(
    store: KvstoreProcess, socket_folder: Path, tmp_path: Path
) -> None:
    store.put_blocks(IDS)
    store.wait_written()
    store.kill()
    again = KvstoreProcess(socket_folder, tmp_path / "data").wait_ready()
    request = data.DataRequest(get_layers=data.GetLayers(model=MODEL, block_ids=IDS, first_layer=2, layers=1))
    reply = again.client.call(request, into=None, deadline=Deadline.after(scaled(20)))
    assert (reply.got_layer.layer, len(reply.got_layer.checksums)) == (2, len(IDS))
    assert again.terminate() == 0


@on_both
def test_a_commit_waits_for_blocks_on_their_way(store: KvstoreProcess) -> None:
    for layer in (0, 1):
        store.put_layer(IDS, layer)
    late = threading.Timer(0.3, store.put_layer, (IDS, 2))
    late.start()
    reply = commit(store, "t1", begin(store, "t1"), IDS, scaled(10_000))
    late.join()
    assert (reply.version, reply.durable_blocks) == (1, len(IDS))


def test_a_commit_waits_no_longer_than_its_request_says(store: KvstoreProcess) -> None:
    store.put_blocks(IDS[:4])
    store.wait_written()
    reply = commit(store, "t1", begin(store, "t1"), IDS, 200)
    assert (reply.version, reply.durable_blocks) == (1, 4)


def test_a_condemned_block_is_gone(store: KvstoreProcess) -> None:
    store.put_blocks(IDS)
    _, generations = store.get_blocks(IDS)
    for generation, left in ((generations[4], len(IDS)), (generations[5], 5)):
        request = pb.CondemnRequest(model=MODEL, block_id=IDS[5], generation=generation)
        store.blocks.Condemn(request, timeout=scaled(20))
        assert len(tiers(store, IDS)) == left
    assert store.blocks.Stats(pb.StatsRequest(), timeout=scaled(20)).corrupt_blocks == 1


@on_both
def test_turns_are_exclusive_and_tenants_apart(store: KvstoreProcess) -> None:
    begun = begin(store, "t1")
    with pytest.raises(TurnInProgress):
        begin(store, "t2")
    renewal = pb.RenewTurnRequest(
        tenant="alice", session_id="s", turn_id="t1", fencing=begun.fencing, lease_ms=1000
    )
    store.sessions.RenewTurn(renewal, timeout=scaled(20))
    abandon = pb.AbandonTurnRequest(tenant="alice", session_id="s", turn_id="t1", fencing=begun.fencing)
    store.sessions.AbandonTurn(abandon, timeout=scaled(20))
    next_turn = begin(store, "t2")
    assert commit(store, "t2", next_turn, [], 0).version == 1
    assert commit(store, "t2", next_turn, [], 0).version == 1  # a repeated commit changes nothing
    with pytest.raises(Conflict):
        commit(store, "t1", begun, [], 0)
    with pytest.raises(SessionNotFound):
        store.sessions.Get(pb.GetSessionRequest(tenant="bob", session_id="s"), timeout=scaled(20))
    fork = store.sessions.Fork(
        pb.ForkSessionRequest(tenant="alice", session_id="s", new_id="s2"), timeout=scaled(20)
    )
    assert (fork.parent, list(fork.tokens)) == ("s", [1, 2, 3])
    with pytest.raises(AlreadyExists):
        store.sessions.Create(pb.CreateSessionRequest(tenant="alice", session_id="s2"), timeout=scaled(20))
    listed = store.sessions.List(pb.ListSessionsRequest(tenant="alice"), timeout=scaled(20))
    assert ([head.session_id for head in listed.sessions], listed.more) == (["s", "s2"], False)
    store.sessions.Delete(pb.DeleteSessionRequest(tenant="alice", session_id="s"), timeout=scaled(20))
    with pytest.raises(SessionNotFound):
        store.sessions.Delete(pb.DeleteSessionRequest(tenant="alice", session_id="s"), timeout=scaled(20))


def test_nothing_of_a_record_that_a_fork_brings_arrives(store: KvstoreProcess) -> None:
    """In field 4, which was once the new session's record: whoever could send one wrote what others said."""
    begun = begin(store, "t1")
    commit(store, "t1", begun, [], 0)
    forged = pb.SessionRecord(tenant="alice", session_id="s2", tokens=[9, 9], parent="x", version=7)
    asked = pb.ForkSessionRequest(tenant="alice", session_id="s", new_id="s2").SerializeToString()
    record = forged.SerializeToString()
    asked += bytes([4 << 3 | 2, len(record)]) + record
    store.sessions.Fork(pb.ForkSessionRequest.FromString(asked), timeout=scaled(20))
    there = store.sessions.Get(pb.GetSessionRequest(tenant="alice", session_id="s2"), timeout=scaled(20))
    assert (there.parent, list(there.tokens)) == ("s", [1, 2, 3])
    with pytest.raises(SessionNotFound):
        store.sessions.Get(pb.GetSessionRequest(tenant="alice", session_id="x"), timeout=scaled(20))


def test_a_put_that_makes_no_sense_is_refused(store: KvstoreProcess) -> None:
    fields: dict[str, object] = {
        "model": MODEL,
        "tenant": "t",
        "writer": "w",
        "layer": 0,
        "layers": 3,
        "block_ids": IDS[:1],
        "checksums": [1],
    }
    wrong: list[tuple[dict[str, object], str]] = [
        ({"layers": 0}, "layers"),
        ({"layer": 3}, "layers 3 to 3 of 3"),
        ({"layer": 2, "count": 2, "checksums": [1, 2]}, "layers 2 to 3 of 3"),
        ({"count": 2}, "checksums"),
        ({"count": 3}, "whole objects"),
        ({"model": b""}, "fingerprint"),
        ({"block_ids": [b"short"]}, "identity"),
        ({"block_ids": IDS[:1] * 2, "checksums": [1, 1]}, "names each block once"),
        ({"checksums": []}, "checksums"),
        ({"writer": ""}, "writer"),
    ]
    for changes, what in wrong:
        request = data.DataRequest(put_layer=data.PutLayer(**(fields | changes)))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=what):
            store.client.call(request, [bytes(5000)], deadline=Deadline.after(scaled(20)))
    odd = data.PutLayer(**(fields | {"block_ids": IDS, "checksums": [0] * 12}))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="whole objects"):
        store.client.call(data.DataRequest(put_layer=odd), [bytes(5000)], deadline=Deadline.after(scaled(20)))
    assert store.put_layer(IDS, 0) == []


def test_a_run_that_names_a_block_twice_is_refused(store: KvstoreProcess) -> None:
    """In the end a policy learned from blocks that it did not know."""
    assert store.put_layer(IDS, 0) == []
    run = [*IDS, IDS[0]]
    hint = pb.HintRequest(router="r", ttl_ms=1000, uses=[pb.ExpectedUse(model=MODEL, block_ids=run)])
    get = data.DataRequest(get_layers=data.GetLayers(model=MODEL, layers=3, block_ids=run))
    for refused in (
        lambda: tiers(store, run),
        lambda: store.blocks.Hint(hint, timeout=scaled(20)),
        lambda: store.client.call(get, deadline=Deadline.after(scaled(20))),
    ):
        with pytest.raises(InvalidInput, match="names each block once"):
            refused()


def test_what_is_for_holders_is_refused(store: KvstoreProcess) -> None:
    request = data.DataRequest(read_blocks=data.ReadBlocks(handle=1))
    with pytest.raises(UnsupportedParameter, match="holders"):
        store.client.call(request, deadline=Deadline.after(scaled(20)))


def test_a_writer_that_dies_in_mid_layer_leaves_no_half_block(store: KvstoreProcess) -> None:
    store.put_layer(IDS, 0)
    request = data.DataRequest(
        deadline_ms=60_000,
        put_layer=data.PutLayer(
            model=MODEL, tenant="t", writer="writer", layer=1, layers=3, block_ids=IDS, checksums=[0] * 12
        ),
    )
    head = request.SerializeToString()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(store.data_address.removeprefix("unix:"))
        peer.sendall(pack(len(head), 12 * 5000, Limits()) + head + b"?" * 30_000)
    assert tiers(store, IDS) == []

    def whole() -> bool:
        # Until its death is noticed, the dead writer's half layer may take what came after it along.
        for layer in range(3):
            store.put_layer(IDS, layer)
        return store.get_blocks(IDS)[0] == len(IDS)

    deadline = Deadline.after(scaled(20))
    while not whole():
        deadline.check()


def test_a_run_that_is_larger_than_its_memory_is_loaded_from_disk(store: KvstoreProcess) -> None:
    """In pieces: a conversation may have more KV than the store has DRAM."""
    layout = Layout(layers=2, kv_heads=1, block_tokens=8, head_dim=32, kv_dtype="float32", query_heads=1)
    shape = BlockShape(model=b"l" * 32, layers=layout.layers, object_bytes=layout.object_bytes)
    room = 16 * MIB // shape.slot_bytes
    ids = block_ids(2 * room + 100, "long")
    for first in range(0, len(ids), 500):
        store.put_blocks(ids[first : first + 500], shape=shape)
        store.wait_written()
    memory = bytearray(layout.block_bytes * len(ids))

    def into(layer: int, first: int, count: int) -> AbstractContextManager[list[memoryview]]:
        size = layout.object_bytes
        starts = [(layer * len(ids) + first + index) * size for index in range(count)]
        return nullcontext([memoryview(memory)[start : start + size] for start in starts])

    corrupt: list[CorruptObject] = []
    loader = BlockLoader(corrupt.append)
    try:
        deadline = Deadline.after(scaled(30))
        load = loader.load(store.data_address, shape.model, layout, ids, into, deadline)
        assert load.wait_all(deadline) == len(ids)
    finally:
        loader.close()
    assert corrupt == []
    assert store.resident_bytes < 16 * MIB + 150 * MIB


def test_memory_stays_within_bounds(store: KvstoreProcess) -> None:
    small = BlockShape(model=b"s" * 32, layers=2, object_bytes=2048)
    for number in range(20):
        store.put_blocks(block_ids(500, f"wave {number}"), shape=small)
    assert store.get_blocks(block_ids(500, "wave 3"), shape=small)[0] == 500
    assert store.resident_bytes < 16 * MIB + 150 * MIB


@on_both
def test_the_blocks_of_a_deleted_session_go(store: KvstoreProcess) -> None:
    """But for those that another one names."""
    store.put_blocks(IDS)
    commit(store, "t1", begin(store, "t1"), IDS[:4], scaled(10_000))
    fork = pb.ForkSessionRequest(tenant="alice", session_id="s", new_id="s2")
    store.sessions.Fork(fork, timeout=scaled(20))
    commit(store, "t2", begin(store, "t2"), IDS[:6], scaled(10_000))
    store.sessions.Delete(pb.DeleteSessionRequest(tenant="alice", session_id="s"), timeout=scaled(20))
    assert len(tiers(store, IDS)) == 4


def scraped(store: KvstoreProcess) -> str:
    with socket.socket(socket.AF_UNIX) as scrape:
        scrape.settimeout(scaled(5))
        scrape.connect(str(store.metrics))
        scrape.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        return b"".join(iter(lambda: scrape.recv(1 << 16), b"")).decode()


def test_metrics_have_their_names(store: KvstoreProcess) -> None:
    store.put_blocks(IDS)
    tiers(store, IDS)
    text = scraped(store)
    assert 'kvcommons_block_hits_total{tier="dram"} 12.0' in text
    assert 'kvcommons_records_seconds_count{call="sweep"}' in text
    for name in ("kv_cache_usage_perc", "block_evictions_total", "block_pending_writes", "sessions"):
        assert f"kvcommons_{name}" in text


def test_a_data_folder_in_use_is_refused(store: KvstoreProcess, tmp_path: Path) -> None:
    returncode, errors = refused(tmp_path, {})
    assert returncode == 1
    assert "in use by another process" in errors
    store.put_blocks(IDS)
    assert store.get_blocks(IDS)[0] == len(IDS)


# ---- a database of records


def test_what_a_database_of_records_costs_is_measured(
    postgres: PostgresServer, socket_folder: Path, tmp_path: Path
) -> None:
    settings = {"records": postgres.new_url(), "sweep_s": 0.05}
    store = KvstoreProcess(socket_folder, tmp_path / "data", **settings).wait_ready()
    try:
        commit(store, "t1", begin(store, "t1"), [], 0)
        deadline = Deadline.after(scaled(20))
        while "kvcommons_sessions 1.0" not in scraped(store):  # counted now and then
            deadline.check()
        assert store.blocks.Stats(pb.StatsRequest(), timeout=scaled(20)).sessions == 1
        text = scraped(store)
        assert 'kvcommons_records_seconds_count{call="commit"} 1.0' in text
        assert "kvcommons_records_connections " in text
    finally:
        store.kill()


def test_a_kvstore_waits_for_its_database_and_shows_no_password(socket_folder: Path, tmp_path: Path) -> None:
    """It answers what is not about sessions, and says where it looks; it is ready once there is one."""
    server = PostgresServer()
    secret = tmp_path / "secret"
    secret.write_text("not-to-be-seen\n")
    store = KvstoreProcess(
        socket_folder,
        tmp_path / "data",
        records=server.url(),
        records_password_file=secret,
        records_timeout_s=1.0,
    )
    try:
        store.blocks.Stats(pb.StatsRequest(), timeout=scaled(20), wait_for_ready=True)
        with pytest.raises(StoreUnavailable, match="did not answer"):
            begin(store, "t1")
        assert not store.is_ready()
        server.start()
        store.wait_ready()
        assert commit(store, "t1", begin(store, "t1"), [], 0).version == 1
    finally:
        store.kill()
        server.remove()
    assert f"in the database {server.folder}:5432/postgres are out of reach" in store.errors
    assert "see that it runs where the setting records says" in store.errors
    assert "are within reach again" in store.errors
    assert "not-to-be-seen" not in store.errors


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"records": "mysql://u:hush@db/kv"}, "records is no URL that libpq understands"),
        ({"records": "postgresql://u@[::1/kv?hush"}, "records is no URL that libpq understands"),
        ({"records": "postgresql://u:hu/sh@db/kv"}, "records is no URL that libpq understands"),
        ({"records": "postgresql://u:hush@db/kv"}, "records_password_file"),
        ({"records": "postgresql://db/kv?password=hush"}, "records_password_file"),
        ({"records": "postgresql://db/kv", "records_password_file": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_a_database_that_is_named_wrongly_is_refused(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    returncode, errors = refused(tmp_path, settings)
    assert returncode == 2
    assert said in errors
    assert "hush" not in errors
    assert "hu/sh" not in errors


def test_without_psycopg_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "psycopg.py").write_text("raise ImportError('it is not installed')")
    environment = {"PYTHONPATH": str(tmp_path)}
    returncode, errors = refused(tmp_path, {"records": "postgresql://db/kv"}, environment)
    assert returncode == 2
    assert "install kvcommons[kvstore,postgres]" in errors


def refused(
    tmp_path: Path, settings: dict[str, str], environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and log of a kvstore that does not start."""
    command = [sys.executable, "-m", "services.kvstore"]
    for name, value in {
        "listen": f"unix:{tmp_path}/c",
        "data_listen": f"unix:{tmp_path}/d",
        "ledger": f"unix:{tmp_path}/l",
        "data": tmp_path / "data",
        **settings,
    }.items():
        command += ["--set", f"{name}={value}"]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=scaled(20),
        check=False,
        env=os.environ | (environment or {}),
    )
    return ended.returncode, ended.stderr
