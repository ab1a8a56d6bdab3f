"""The attention pool's settings: table `[attention_pool]` of kvcommons.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from kvcommons.config import Addresses, DataPlane, Node
from kvcommons.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoolConfig:
    """`model` is read for its layout and fingerprint: dtype and block_tokens have to be decode's."""

    node: Node
    data_plane: DataPlane
    engine: EngineSettings
    ledger: Addresses  # of its replicas
    # Between two requests that follow each other so soon, a connection's thread stays awake. A debtor
    # computes for about a millisecond between two layers: 2000 saves the waking, on cores of the pool's own.
    awake_us: Annotated[int, Ge(0), Le(10_000)] = 60
    # With others, a share of the KV heads of all tokens: "0/2" is the first of two parts of `head_group`.
    heads: str | None = None
    head_group: str | None = None  # of the parts that have all heads together, by which they find each other
    save_buffer_bytes: Annotated[int, Gt(0)] = 256 << 20  # KV on its way to the kvstore; more is not saved
