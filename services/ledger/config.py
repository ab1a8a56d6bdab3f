"""Settings of the ledger. Who is registered and for how long is one matter; where etcd is, the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen

from kvcommons.config import Address, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    node: Node
    # "host:port" or "unix:DIR/name" of each member; on a socket etcd listens as `unix://name:0` in DIR.
    etcd: Annotated[tuple[Address, ...], MinLen(1)]
    etcd_prefix: str = "/kvcommons/"  # stacks that share an etcd have different ones
    etcd_timeout_s: Annotated[float, Gt(0)] = 1.5  # of one call: a paused etcd is noticed in this time
    lease_s: Annotated[int, Ge(2), Le(60)] = 5  # a silent instance is gone after it; etcd's least is 2 or so
    heartbeat_ms: Annotated[int, Ge(100)] = 1_000  # how often instances send heartbeats

    # Debts are settled where the smallest one on a circle reaches the threshold: fewer blocks are not worth
    # freezing for (Infinite-LLM, section 4.5).
    settle_threshold_blocks: Annotated[int, Ge(1)] = 8
    settle_round_blocks: Annotated[int, Ge(1)] = 8  # that each participant sets aside, if it has them
    settle_every_s: Annotated[float, Gt(0)] = 2.0  # between looks for circles

    # Places of session records that are given up, as `kvcommons status` names them: another one may follow.
    lost_records: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.heartbeat_ms * 2 > self.lease_s * 1_000:
            raise ValueError("heartbeat_ms must fit twice into lease_s: one lost heartbeat is no death")
