"""The commons' books at one replica: debts, and who settles them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvcommons.rpc.process import Process
from services.ledger.config import LedgerConfig
from services.ledger.debt_keeper import DebtKeeper
from services.ledger.debtors import Debtors
from services.ledger.debts import DebtLedger
from services.ledger.election import Election
from services.ledger.etcd import Etcd
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry
from services.ledger.settlement_reports import SettlementReports
from services.ledger.settler import SettlementCounts, Settler

# A participant that hears no leader for so long goes on alone: longer than a new leader takes to be there.
SETTLEMENT_LEASE_MS = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Commons:
    debts: DebtLedger
    election: Election
    keeper: DebtKeeper
    settler: Settler
    reports: SettlementReports
    counts: SettlementCounts = field(default_factory=SettlementCounts)

    def leads(self) -> bool:
        return self.election.term() is not None

    def run(self) -> list[Coroutine[Any, Any, None]]:
        """What is to run beside each other, until cancelled."""
        return [self.election.run(), self.keeper.run(), self.settler.run()]


def open_commons(
    config: LedgerConfig,
    process: Process,
    etcd: Callable[[], Etcd],
    registry: Registry,
    mirror: Mirror,
) -> Commons:
    """Connections of their own to etcd, which `etcd` makes: none of these waits for another."""
    prefix = config.etcd_prefix
    election = Election(etcd(), prefix=prefix, instance_id=process.instance_id, lease_s=config.lease_s)
    debts, counts, reports = DebtLedger(), SettlementCounts(), SettlementReports()
    keeper = DebtKeeper(
        etcd(),
        debts,
        prefix=prefix,
        living=lambda: registry.instances if mirror.connected else None,
        leads=lambda: election.term() is not None,
    )
    settler = Settler(
        etcd(),
        debts,
        Debtors(
            registry.find,
            lease_ms=SETTLEMENT_LEASE_MS,
            connect=partial(process.dialer().channel, role="decode"),
        ),
        counts,
        reports,
        prefix=prefix,
        # Who is there is not known for certain while etcd is away.
        term=lambda: election.term() if mirror.connected else None,
        instances=lambda: registry.instances,
        threshold_blocks=config.settle_threshold_blocks,
        round_blocks=config.settle_round_blocks,
        every_s=config.settle_every_s,
    )
    return Commons(
        debts=debts, election=election, keeper=keeper, settler=settler, reports=reports, counts=counts
    )
