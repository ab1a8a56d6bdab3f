"""The ledger's gRPC face. No method waits for etcd."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from kvcommons.config import TABLES
from kvcommons.errors import InvalidInput, Loading, UntrustedPeer
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rblock.heads import HeadPart
from kvcommons.rpc.callers import names_shown
from kvcommons.security.roles import own_name
from services.ledger.candidates import LENDERS, Candidates
from services.ledger.debts import DebtLedger
from services.ledger.feed import Feed
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry
from services.ledger.settlement_reports import SettlementReports

log = logging.getLogger(__name__)

ID_BYTES_MAX = 256
INSTANCE_BYTES_MAX = 256 << 10  # loans to a thousand debtors are some 70 KB
MODELS_MAX = 64  # whose last warning is known
# What has a table of settings; and pipeline stages that take no requests.
SERVICES = frozenset(TABLES) - {"up"} | {"prefill_stage", "decode_stage"}


class LedgerService(rpc.LedgerServicer):
    def __init__(
        self,
        registry: Registry,
        mirror: Mirror,
        feed: Feed,
        candidates: Candidates,
        debts: DebtLedger,
        reports: SettlementReports,
        *,
        heartbeat_ms: int,
        lease_s: float,
    ) -> None:
        self._registry = registry
        self._mirror = mirror
        self._feed = feed
        self._candidates = candidates
        self._debts = debts
        self._reports = reports
        self._heartbeat_ms = heartbeat_ms
        self._shortfalls: dict[bytes, str] = {}  # of head groups, that were logged last, by model
        # By then every living instance that knows this replica alone has been heard again.
        self._complete_at = time.monotonic() + lease_s

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        instance = request.instance
        _check(instance)
        _check_sender(instance, names_shown(context))
        _check_same(instance, self._registry.find(instance.id))
        now = time.monotonic()
        if request.leaving:
            log.info("left", extra={"peer": instance.id})
            self._registry.left(instance, now)
        else:
            self._registry.heartbeat(instance, now)
            self._candidates.heartbeat(instance)
            if instance.service in LENDERS:
                self._debts.heartbeat(instance.id, instance.load.loans)
        self._feed.touch()
        self._mirror.wake()
        return pb.HeartbeatReply(heartbeat_ms=self._heartbeat_ms)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.View]:
        # An empty or partial view would replace the fuller one that the watcher has kept.
        if not self._has_view():
            raise Loading("the ledger has not heard from etcd yet", retry_after_ms=500)
        async for view in self._feed.views():
            yield view

    async def Candidates(self, request: pb.CandidatesRequest, context: Any) -> pb.CandidatesReply:
        if not request.model:
            raise InvalidInput("model: the fingerprint of the debtor's model is needed", param="model")
        creditors = self._candidates.choose(request, time.monotonic())
        shortfall = self._candidates.shortfall(request.model)
        self._warn(request.model, shortfall)
        if not creditors:
            shortfall = shortfall or self._candidates.strangers(request.model)
        return pb.CandidatesReply(creditors=creditors, shortfall=shortfall)

    async def ReportRefusal(self, request: pb.ReportRefusalRequest, context: Any) -> pb.ReportRefusalReply:
        report = self._candidates.slow if request.slow else self._candidates.refused
        report(request.creditor, time.monotonic())
        return pb.ReportRefusalReply()

    async def Settlements(self, request: pb.SettlementsRequest, context: Any) -> pb.SettlementsReply:
        return pb.SettlementsReply(settlements=self._reports.messages())

    def _warn(self, model: bytes, shortfall: str) -> None:
        """Once for each that is new: debtors ask again and again."""
        before = self._shortfalls.pop(model, "")
        if shortfall:
            if shortfall != before:
                log.warning(shortfall)
            self._shortfalls[model] = shortfall
            if len(self._shortfalls) > MODELS_MAX:
                del self._shortfalls[next(iter(self._shortfalls))]

    def _has_view(self) -> bool:
        return self._mirror.has_listed or time.monotonic() >= self._complete_at


def _check(instance: pb.Instance) -> None:
    if not instance.id or len(instance.id.encode()) > ID_BYTES_MAX:
        raise InvalidInput(f"instance.id: 1 to {ID_BYTES_MAX} bytes are needed", param="instance.id")
    if instance.service not in SERVICES:
        raise InvalidInput(
            f"instance.service: {instance.service!r} is none of {', '.join(sorted(SERVICES))}",
            param="instance.service",
        )
    if not instance.control_address:
        raise InvalidInput("instance.control_address: others need it", param="instance.control_address")
    if instance.HasField("heads"):  # whose missing parts are counted
        try:
            HeadPart(number=instance.heads.number, parts=instance.heads.parts)
        except InvalidInput as error:
            raise InvalidInput(error.message, param="instance.heads") from None
    # What one says of itself is sent to all, twice a second and more.
    if instance.ByteSize() > INSTANCE_BYTES_MAX:
        raise InvalidInput(
            f"an instance of {instance.ByteSize()} bytes: at most {INSTANCE_BYTES_MAX} are told to others",
            param="instance",
        )


def _check_sender(instance: pb.Instance, names: frozenset[str]) -> None:
    """Where services know each other by certificates, one of another kind can say nothing in its name: not
    that it leaves, nor that its memory is elsewhere."""
    service = instance.service.removesuffix("_stage")
    if names and own_name(service) not in names:
        raise UntrustedPeer(f"instance.service: the caller's certificate is not that of a {service} service")


def _check_same(instance: pb.Instance, known: pb.Instance | None) -> None:
    """By these its sessions are found: nobody says others in its name while it lives."""
    for name in ("service", "folder", "records"):
        if known is not None and getattr(instance, name) != getattr(known, name):
            raise InvalidInput(
                f"instance.{name}: {instance.id} has another one while it is heard; where it begins anew "
                "with other settings, it is taken when its lease is over",
                param=f"instance.{name}",
            )
