"""Prefill's settings: table `[prefill]` of kvcommons.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from kvcommons.config import Addresses, Node
from kvcommons.engine.core import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Prefill only sends, and has no data address, but for a pipeline stage that another one sends to."""

    node: Node
    engine: EngineSettings
    ledger: Addresses
    chunk_tokens: Annotated[int, Gt(0)] = 512  # computed at once; other jobs take their turn between chunks
    max_running: Annotated[int, Ge(1)] = 4  # jobs that hold memory and take turns
    max_queue: Annotated[int, Ge(0)] = 256  # jobs that wait for memory; more are refused
    push_deadline_s: Annotated[float, Gt(0)] = 5.0  # of one write; past it the decode side counts as lost
    read_buffer_bytes: Annotated[int, Ge(0)] = 256 << 20  # history loaded before its job's turn to compute
    save_buffer_bytes: Annotated[int, Gt(0)] = 256 << 20  # KV on its way to the kvstore; more is not saved
    core_lock: str = ""  # a file: see decode's
    loads: str = "auto"  # of stored history: "auto" loads or computes by measured rates, "always" loads

    stages: Annotated[int, Ge(1)] = 1  # processes that are one instance, each with a range of the layers
    stage: Annotated[int, Ge(0)] = 0  # which of them this one is; the first, 0, takes requests
    stage_group: str = "prefill"  # of an instance's stages, by which they find each other
    stage_layers: tuple[int, ...] = ()  # of each stage; default: by what they are expected to take
    stage_deadline_s: Annotated[float, Gt(0)] = 120.0  # of a chunk, through all stages; then one is lost
    data_listen: str | None = None  # of a stage behind the first: its transport address
    advertise_data: str | None = None  # default: what was bound

    def __post_init__(self) -> None:
        if self.stage >= self.stages:
            raise ValueError(f"stage = {self.stage} of stages = {self.stages}: stages count from 0")
        if self.stage_layers and len(self.stage_layers) != self.stages:
            raise ValueError(
                f"stage_layers = {list(self.stage_layers)} names {len(self.stage_layers)} stages, and stages "
                f"= {self.stages}"
            )
        if self.stage and self.data_listen is None:
            raise ValueError(f"stage = {self.stage} is sent activations: set data_listen")
        if self.stages > 1 and self.core_lock:
            raise ValueError("stages compute at the same time: leave core_lock out where stages > 1")
        if self.loads not in ("auto", "always"):
            raise ValueError(f'loads = "{self.loads}" is neither "auto" nor "always"')
