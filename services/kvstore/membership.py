"""This kvstore among those of its stack: whether its records are the stack's, and who else has blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc.aio

from kvcommons.errors import KVCommonsError
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import kvstore_pb2_grpc as rpc
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.rpc.directory import Directory
from services.kvstore.place import RecordsPlace

log = logging.getLogger(__name__)

FORGET_S = 2.0
FORGETS_MAX = 100  # calls under way


class Membership:
    """`records` is where this kvstore's lie; `place` remembers where the stack's do. On the event loop's
    thread."""

    def __init__(
        self,
        directory: Directory,
        *,
        instance_id: str,
        records: str,
        place: RecordsPlace,
        dialer: Dialer = UNSECURED,
    ) -> None:
        self._place = place
        self._dialer = dialer
        self._directory = directory
        self._instance_id = instance_id
        self.records = records
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    @property
    def decided(self) -> bool:
        """Whether it is known where the stack's records lie. What were written before would look empty if
        another place were chosen."""
        return bool(self._stack)

    @property
    def refusal(self) -> str:
        """Why no session is served here; empty where they are."""
        stack = self._stack
        if stack == self.records:
            return ""
        if not stack:
            return (
                "where the session records of this stack lie is not decided yet, which a ledger does within "
                "moments once it reaches etcd: no session is served until then"
            )
        return (
            f"this kvstore keeps session records in the {self.records}, and those of this stack are in the "
            f"{stack}: it serves nothing. Set records in [kvstore] of all kvstores to the same database "
            '("postgresql://…"), or stop this one; where the other place is gone for good, name it in '
            "lost_records of [ledger]"
        )

    async def remember(self) -> None:
        """Where the stack's records lie, for the next start."""
        place = self._directory.records
        if place not in ("", self._place.known):
            await asyncio.to_thread(self._place.note, place)

    @property
    def _stack(self) -> str:
        return self._directory.records or self._place.known

    def forget(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        """Tells the others that no session names these blocks any more. Whoever does not hear it evicts them
        as it evicts any block."""
        request = pb.ForgetRequest(model=model, block_ids=block_ids)
        for one in self._directory.instances("kvstore"):
            if one.id != self._instance_id and len(self._forgetting) < FORGETS_MAX:
                task = asyncio.create_task(self._forget(one.control_address, request))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)

    async def close(self) -> None:
        for task in self._forgetting:
            task.cancel()
        await asyncio.gather(*self._forgetting, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)

    async def _forget(self, address: str, request: pb.ForgetRequest) -> None:
        if address not in self._channels:
            self._channels[address] = self._dialer.channel(address, "kvstore")
        try:
            await rpc.BlocksStub(self._channels[address]).Forget(request, timeout=FORGET_S)
        except KVCommonsError as error:
            log.debug("another kvstore was not told which blocks nobody names: %s", error.message)
