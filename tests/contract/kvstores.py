"""Several real kvstores, a real ledger and etcd, and a router's way to them."""

from __future__ import annotations

import contextlib
import itertools
import signal
from pathlib import Path

from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.directory import Directory
from services.kvstore.turn_lease import LEASE_MS_MAX
from services.router.fleet.fleet import Fleet
from services.router.sessions.copies import RecordCopies, grown
from services.router.sessions.store import SessionStore
from tests.contract.kvstore_process import KvstoreProcess
from tests.contract.ledger_process import LedgerProcess
from tests.etcd import RealEtcd
from tests.machine import scaled
from tests.waiting import eventually

TENANT = "tenant"
LEASE_MS = min(scaled(60_000), LEASE_MS_MAX)
PATIENCE_S = scaled(30)
MODEL = b"m" * 32


class Kvstores:
    """Each in a folder of its own, with their session records in a database if `records` names one."""

    def __init__(self, folder: Path, records: str = "") -> None:
        self.folder = folder
        self._records = records
        self.etcd = RealEtcd()
        self.etcd.start()
        self.ledger = LedgerProcess(folder, "l", self.etcd.endpoint)
        self.ledger.start()
        self.processes: dict[str, KvstoreProcess] = {}
        self.directory = Directory([self.ledger.address], "test")
        self.fleet = Fleet(self.directory, open_channel)
        self.store = SessionStore(self.fleet)
        self.copies = RecordCopies()
        self._turns = itertools.count()

    def start(self, name: str, **settings: object) -> KvstoreProcess:
        """Returns before it is ready."""
        sockets = self.folder / name
        sockets.mkdir(exist_ok=True)
        given = {"folder": name, "records": self._records, "dram_bytes": 1 << 20, **settings}
        data = self.folder / f"{name}.data"
        self.processes[name] = KvstoreProcess(sockets, data, ledger=self.ledger.address, **given)
        return self.processes[name]

    async def serve(self, *names: str, within_s: float = 30.0) -> None:
        """Waits until a router knows just these, and that they are ready."""

        def served() -> bool:
            there = {store.folder for store in self.fleet.stores()}
            ready = {store.folder for store in self.fleet.instances("kvstore")}
            return there == ready & there == {*names}

        await eventually(served, f"{names} serve", within_s=within_s)

    def home(self, session_id: str) -> str:
        store = self.fleet.homed(session_key(TENANT, session_id)).store()
        assert store is not None
        return store.folder

    async def begin(
        self, session_id: str, lease_ms: int = LEASE_MS
    ) -> tuple[pb.BeginTurnRequest, pb.BeginTurnReply]:
        """The reply has the whole record, put together as a router does."""
        known = self.copies.get(TENANT, session_id)
        request = pb.BeginTurnRequest(
            tenant=TENANT,
            session_id=session_id,
            turn_id=f"turn {next(self._turns)}",
            owner="test",
            lease_ms=lease_ms,
            known_turn_id=known.last_turn_id,
        )
        reply = await self.store.call(
            lambda stub, timeout_s: stub.BeginTurn(request, timeout=timeout_s),
            tenant=TENANT,
            root=session_id,
            patience_s=PATIENCE_S,
        )
        if reply.after_known:
            reply.record.CopyFrom(grown(known, reply.record, kept_blocks=len(known.block_ids)))
        self.copies.put(reply.record)
        return request, reply

    def committing(
        self,
        begun: tuple[pb.BeginTurnRequest, pb.BeginTurnReply],
        tokens: list[int],
        block_ids: list[bytes] | None = None,
    ) -> pb.CommitTurnRequest:
        request, reply = begun
        return pb.CommitTurnRequest(
            tenant=TENANT,
            session_id=request.session_id,
            turn_id=request.turn_id,
            fencing=reply.fencing,
            expected_version=reply.record.version,
            model=MODEL,
            model_name="demo",
            new_tokens=tokens,
            block_ids=block_ids or [],
        )

    async def commit(self, commit: pb.CommitTurnRequest) -> int:
        reply = await self.store.call(
            lambda stub, timeout_s: stub.CommitTurn(commit, timeout=timeout_s),
            tenant=TENANT,
            root=commit.session_id,
            patience_s=PATIENCE_S,
        )
        return reply.version

    async def turn(self, session_id: str, tokens: list[int]) -> int:
        return await self.commit(self.committing(await self.begin(session_id), tokens))

    async def tokens(self, session_id: str) -> list[int]:
        return list((await self.store.get(TENANT, session_id, patience_s=PATIENCE_S)).tokens)

    async def close(self) -> None:
        await self.directory.stop()
        await self.fleet.close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.process.send_signal(signal.SIGCONT)
            if process.process.poll() is None:
                process.kill()
        self.ledger.close()
        self.etcd.close()
