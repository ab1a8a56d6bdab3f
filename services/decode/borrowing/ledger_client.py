"""Calls of a debtor to the ledger's replicas: who may lend, and who refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import grpc.aio

from kvcommons.errors import KVCommonsError
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc
from kvcommons.rpc.channel import open_channel

log = logging.getLogger(__name__)

CALL_S = 1.0  # a call


class LedgerClient:
    """Calls the replica that answered last, then the others: one that is paused costs its deadline once, not
    with each call."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        debtor: str,
        host: str,
        model: bytes,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._channels = {address: connect(address) for address in addresses}
        self._debtor = debtor
        self._host = host
        self._model = model
        self.shortfall = ""  # of head groups, from the last answer; it is appended to error messages

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def candidates(self, blocks: int) -> list[pb.Instance]:
        """Creditors that may lend, from the first replica that answers; none where no replica does."""
        request = pb.CandidatesRequest(debtor=self._debtor, host=self._host, model=self._model, blocks=blocks)
        for address, channel in list(self._channels.items()):
            try:
                reply = await ledger_pb2_grpc.LedgerStub(channel).Candidates(request, timeout=CALL_S)
            except KVCommonsError as error:
                log.info("a ledger does not answer: %s", error.message, extra={"ledger": address})
                self._last(address)
                continue
            self.shortfall = f" ({reply.shortfall})" if reply.shortfall else ""
            return list(reply.creditors)
        return []

    async def refused(self, creditor: str, *, slow: bool = False) -> None:
        """A creditor lends nothing just now or, where it is `slow`, answers far too late."""
        request = pb.ReportRefusalRequest(debtor=self._debtor, creditor=creditor, slow=slow)
        for address, channel in list(self._channels.items()):
            try:
                await ledger_pb2_grpc.LedgerStub(channel).ReportRefusal(request, timeout=CALL_S)
            except KVCommonsError:
                self._last(address)
                continue
            if not slow:  # slowness is reported to all replicas, for it lasts
                return

    def _last(self, address: str) -> None:
        """Calls this replica after the others from now on."""
        self._channels[address] = self._channels.pop(address)
