"""Settings of `kvcommons up`: the `[up]` table of kvcommons.toml, `KVCOMMONS_UP__…`, and its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen

from devstack.fetch import MODELS, cached
from devstack.terminal import LogFormat

# The model that ships with the repository, by its name here and in `--model`.
DEMO_MODEL = "demo"

Count = Annotated[int, Ge(0), Le(64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `kvcommons up` starts, and where."""

    model: str = DEMO_MODEL  # a folder, a hub id, "demo", or one that `kvcommons fetch` knows
    # As clients call it; default: the folder's name, or the hub id. A session goes on under the name that it
    # began with.
    model_name: Annotated[str, MinLen(1)] | None = None
    prefill: Annotated[int, Gt(0), Le(64)] = 1  # instances that compute prompts
    stages: Annotated[int, Gt(0), Le(64)] = 1  # of each prefill: processes with a range of the layers each
    tensor: Annotated[int, Gt(0), Le(64)] = 1  # of each stage: processes with a share of the heads each
    decode: Annotated[int, Gt(0), Le(64)] = 1  # instances that generate
    decode_stages: Annotated[int, Gt(0), Le(64)] = 1  # of each decode, likewise
    decode_tensor: Annotated[int, Gt(0), Le(64)] = 1  # of each of those stages, likewise
    colocated: bool = False  # decode instances are prefill instances, too: each loads the model once for both
    core_lock: bool = (
        True  # prefill and decode compute one after another, each with all cores; else they divide them
    )
    rotate: bool = False  # the decode instances compute slices of each other's batches
    attention_pool: Count = 1  # instances that lend memory, and compute attention over it
    heads: bool = False  # the attention pools are one head group: each has a share of the KV heads
    kvstore: Annotated[int, Gt(0), Le(64)] = (
        1  # more than one keep their records in a PostgreSQL of the stack's
    )
    ledger: Annotated[int, Gt(0), Le(64)] = 1  # replicas
    data: Path = Path(".kvcommons")  # sessions, KV, etcd and logs: all that outlives the stack
    bind: str = "127.0.0.1"  # of the REST API; anything but loopback needs api_keys
    api_keys: Path | None = None  # a file: a line per key, "tenant key [operator]"
    tls_cert: Path | None = None  # a PEM file: the REST API is served by HTTPS
    tls_key: Path | None = None  # the certificate's key, another one
    port: Annotated[int, Ge(0), Le(65535)] = 8000  # 0 takes a free one
    restart: bool = True  # a child that dies is started again
    demo: bool = True  # hold the short conversation once all is ready
    ready_wait_s: Annotated[float, Gt(0)] = 300.0  # a large model reads its weights for minutes
    log_bytes: Annotated[int, Ge(1 << 16)] = 8 << 20  # per process, one older file kept beside it
    # What `kvcommons up` itself writes: "text" for people, "json" an object a line; "auto" is text on a
    # terminal, else JSON.
    log_format: LogFormat = "auto"

    @property
    def prefill_processes(self) -> int:
        """Of their own."""
        return 0 if self.colocated else self.prefill

    @property
    def model_folder(self) -> str:
        """What the services take as `model`."""
        if self.model == DEMO_MODEL:
            return str(Path(__file__).parent.parent / "demo" / "model")
        if self.model in MODELS:
            return str(cached(self.model))
        path = Path(self.model).expanduser()
        return str(path.resolve()) if path.is_dir() else self.model
