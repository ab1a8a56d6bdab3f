"""Who may lend: the contract protocol's first step (Infinite-LLM, section 4.4). No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvcommons.pb import ledger_pb2 as pb

LENDERS = frozenset({"decode", "attention_pool"})
CANDIDATES_MAX = 3
# A refusal holds until the creditor's next heartbeat. One that beats at another replica, with nothing
# changed, is not heard here: a heartbeat must have come by this time.
REFUSAL_S = 2.0


class Candidates:
    """Chooses creditors; remembers who refused. `now` is in seconds of one monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._refused_at: dict[str, float] = {}

    def refused(self, creditor: str, now: float) -> None:
        self._refused_at[creditor] = now

    def heard(self, creditor: str) -> None:
        """A heartbeat: what the creditor says now counts again."""
        self._refused_at.pop(creditor, None)

    def choose(
        self, request: pb.CandidatesRequest, instances: Iterable[pb.Instance], now: float
    ) -> list[pb.Instance]:
        """Up to three that hold the same model and can lend, the debtor's own host first, then the most
        lendable.

        Those that can lend all blocks asked for; where there is none, those that can lend any. Equals are
        shuffled, so that debtors who ask at once do not all go to the same one.
        """
        self._refused_at = {name: at for name, at in self._refused_at.items() if now - at < REFUSAL_S}
        able = [
            instance
            for instance in instances
            if instance.service in LENDERS
            and instance.load.ready
            and instance.load.lendable_blocks > 0
            and instance.id != request.debtor
            and instance.id not in self._refused_at
            and instance.model.fingerprint == request.model
        ]
        whole = [instance for instance in able if instance.load.lendable_blocks >= request.blocks]
        ranked = sorted(
            whole or able,
            key=lambda one: (one.host != request.host, -one.load.lendable_blocks, self._rng.random()),
        )
        return ranked[:CANDIDATES_MAX]
