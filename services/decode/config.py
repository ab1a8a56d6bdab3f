"""Decode's settings: table `[decode]` of kvcommons.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from kvcommons.config import Addresses, DataPlane, Node
from kvcommons.engine.settings import EngineSettings
from kvcommons.stages.settings import StageSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Times bound what a failing peer can cost the sequences that do not need it."""

    node: Node
    data_plane: DataPlane
    engine: EngineSettings
    ledger: Addresses  # of its replicas
    # PEM: the public key of the router's tenant_key; calls for a tenant have to be signed. None: they are
    # not.
    tenant_key: str | None = None
    # In stages and ranks nothing is lent to others, and ranks borrow of head groups only.
    shape: StageSettings = field(default_factory=StageSettings)
    placement: str = "overflow"  # local, overflow, offload, grow or auto; see docs/placement.md
    holder_tokens: Annotated[int, Ge(1)] = 16384  # of one sequence, the most on one holder (placement grow)
    grow_wait_s: Annotated[float, Gt(0), Le(50)] = 10.0  # for memory, in mid-prompt (placement grow)
    pipelining: Literal["auto", "on", "off"] = "auto"  # batches alternate at model and pool
    # Data addresses of all instances, this one's among them, that compute slices of each other's batches; the
    # same list in each.
    replicas: tuple[str, ...] = ()
    slice_deadline_s: Annotated[float, Gt(0)] = 0.5  # for a slice elsewhere; then it is computed here
    # Messages to a holder for a layer, each on a connection of its own; 0: by what was measured.
    mini_batches: Annotated[int, Ge(0), Le(8)] = 0
    colocated: bool = False  # this process is a prefill instance, too; it computes all of its prompts itself
    # Prompts with at most so many tokens to compute are computed here instead of by prefill; 0: none.
    max_local_prefill_tokens: Annotated[int, Ge(0)] = 256
    chunk_tokens: Annotated[int, Gt(0)] = 512  # of prompts, computed here in one iteration at most
    push_deadline_s: Annotated[float, Gt(0)] = 5.0  # of one write, of prompts for other instances (colocated)
    max_batch: Annotated[int, Ge(1)] = 32  # sequences of one iteration
    # Of a sequence in an iteration: what may come next, by what was said before, is verified beside its last
    # token, as much of it as pays by what was measured; 0: nothing.
    max_draft_tokens: Annotated[int, Ge(0), Le(32)] = 16
    # A smaller model with the same tokenizer, which drafts what was not said before; "": none. It has as much
    # room for KV, in tokens.
    draft_model: str = ""
    max_sequences: Annotated[int, Ge(1)] = 256  # held at once, those that wait for their prompt included
    attend_deadline_s: Annotated[float, Gt(0)] = 2.0  # an iteration waits so long for other holders
    fetch_deadline_s: Annotated[float, Gt(0)] = 5.0  # for history from the kvstore; then prefill pushes it
    fetch_min_bytes: Annotated[int, Ge(0)] = 1 << 20  # of history; less than that comes from prefill anyway
    lease_ms: Annotated[int, Ge(1000), Le(600_000)] = 10_000  # of borrowed blocks; renewed each third of it
    borrow_blocks: Annotated[int, Ge(1)] = 8  # asked for at once when a sequence grows elsewhere
    tbt_objective_s: Annotated[float, Gt(0)] = 0.2  # between tokens; attention for others takes what is left
    lend_share: Annotated[float, Ge(0), Le(1)] = 0.5  # of all blocks, the most that others may hold here
    # A file, the same for all engines of a host that share its cores: they compute one after another, an
    # iteration each, and pipelining = "auto" is off then. Off by default: a service has cores of its own.
    core_lock: str = ""
    homecoming: bool = True  # borrowed blocks come home by themselves where there is room
    save_buffer_bytes: Annotated[int, Gt(0)] = 256 << 20  # KV on its way to the kvstore; more is not saved

    def __post_init__(self) -> None:
        if self.draft_model and not self.max_draft_tokens:
            raise ValueError("draft_model is of no use with max_draft_tokens = 0: set it, or leave it out")
        if self.draft_model and self.replicas:
            raise ValueError("draft_model is not there with replicas, which verify no drafts: leave it out")
        if self.draft_model and self.pipelining == "on":
            raise ValueError('draft_model is not there with pipelining = "on": no drafts are verified then')
        if self.shape.members == 1:
            return
        name = "stages" if self.shape.stages > 1 else "tensor"
        alone = f"is not there where {name} = {getattr(self.shape, name)}: leave it out, or set {name} to 1"
        if self.replicas:
            raise ValueError(f"replicas {alone}: no other instance computes slices of a part of the model")
        if self.pipelining == "on":
            raise ValueError(f'pipelining = "on" {alone}: batches alternate in stages by themselves')
        if self.mini_batches:
            raise ValueError(f"mini_batches {alone}: each stage sends a holder one message a layer")
        if self.draft_model:
            raise ValueError(f"draft_model {alone}: no drafts are verified in them")
        if self.core_lock:
            raise ValueError(f"core_lock {alone}: all of its processes compute at the same time")
