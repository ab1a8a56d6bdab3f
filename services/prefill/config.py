"""Prefill's settings: table `[prefill]` of kvcommons.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from kvcommons.config import Addresses, Node
from kvcommons.engine.settings import EngineSettings
from kvcommons.stages.settings import StageSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Prefill only sends, and has no data address, but for a pipeline stage that another one sends to."""

    node: Node
    engine: EngineSettings
    ledger: Addresses  # of its replicas
    # PEM: the public key of the router's tenant_key; calls for a tenant have to be signed. None: they are
    # not.
    tenant_key: str | None = None
    shape: StageSettings = field(default_factory=StageSettings)
    chunk_tokens: Annotated[int, Gt(0)] = 512  # computed at once; other jobs are served between chunks
    max_running: Annotated[int, Ge(1)] = 4  # jobs that hold memory and alternate
    max_queue: Annotated[int, Ge(0)] = 256  # jobs that wait for memory; more are refused
    push_deadline_s: Annotated[float, Gt(0)] = 5.0  # of one write; past it the decode side counts as lost
    read_buffer_bytes: Annotated[int, Ge(0)] = 256 << 20  # history loaded before its job is computed
    save_buffer_bytes: Annotated[int, Gt(0)] = 256 << 20  # KV on its way to the kvstore; more is not saved
    core_lock: str = ""  # a file: see decode's
    loads: str = "auto"  # of stored history: "auto" loads or computes by measured rates, "always" loads

    data_listen: str | None = None  # of a process beside the first: its transport address
    advertise_data: str | None = None  # default: what was bound

    def __post_init__(self) -> None:
        if self.shape.follows and self.data_listen is None:
            raise ValueError(
                f"stage = {self.shape.stage}, rank = {self.shape.rank} is sent activations: set data_listen"
            )
        if self.shape.members > 1 and self.core_lock:
            raise ValueError(
                "stages and ranks compute at the same time: leave core_lock out where stages or tensor > 1"
            )
        if self.loads not in ("auto", "always"):
            raise ValueError(f'loads = "{self.loads}" is neither "auto" nor "always"')
