"""Settings of the kvstore: table [kvstore]."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from kvcommons.config import Addresses, DataPlane, Node
from services.kvstore.policies.catalogue import DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreConfig:
    node: Node
    data_plane: DataPlane
    ledger: Addresses  # of its replicas
    # PEM: the public key of the router's tenant_key; calls for a tenant have to be signed. None: they are
    # not.
    tenant_key: str | None = None
    data: Path  # folder of all that survives; one process at a time
    folder: str = ""  # what `data` is called in the stack, whatever its path; drawn at its first start
    dram_bytes: Annotated[int, Ge(1 << 20)] = (
        1 << 30
    )  # of blocks in memory; the process takes up to 200 MB beside them
    # Whether all of `dram_bytes` is taken from the system at the start; else it is as it is used.
    touch_memory: bool = False
    disk_bytes: Annotated[int, Ge(0)] = 16 << 30  # of slab files at most; they grow as blocks come
    # Left free on the disk, for sessions and for others: KV stops growing there, and gives room back below
    # it. At most a quarter of the file system.
    disk_reserve_bytes: Annotated[int, Ge(0)] = 256 << 20
    policy: str = DEFAULT  # which blocks go first when a tier is full: docs/replay.md has the names
    # Of each tier's blocks of a model: the part that is divided among the tenants in it, so that what one
    # stores cannot evict all that another has.
    tenant_floors: Annotated[float, Ge(0), Le(1)] = 0.5
    # By which they are divided; 1 for a tenant that is not named.
    tenant_weights: dict[str, Annotated[float, Gt(0)]] = field(default_factory=dict)
    # What a tenant's blocks may take in DRAM of this kvstore; "*" is each tenant that is not named. What is
    # more goes within a moment, the least recently used of its own first.
    tenant_dram_bytes: dict[str, Annotated[int, Ge(0)]] = field(default_factory=dict)
    # What they may take on disk, likewise.
    tenant_disk_bytes: dict[str, Annotated[int, Ge(0)]] = field(default_factory=dict)
    dram_buffer: Annotated[float, Ge(0), Lt(1)] = 0.02  # share of DRAM kept free, so that what comes has room
    block_ttl_s: Annotated[int, Ge(0)] = 0  # blocks that nobody uses for so long go; 0: when room is wanted
    io_threads: Annotated[int, Gt(0), Le(64)] = 4  # reads of slab files at once
    blocks_max: Annotated[int, Gt(0)] = 100_000  # on disk; each takes about 800 bytes of memory to know
    scrub_bytes_per_s: Annotated[int, Ge(0)] = 4 << 20  # read to find what went bad on disk; 0: never
    staging_s: Annotated[float, Gt(0)] = (
        30.0  # a block whose next layer does not come for so long is given up
    )
    session_ttl_s: Annotated[int, Ge(0)] = (
        30 * 86_400
    )  # of sessions without a ttl_s of their own; 0: for ever
    sweep_s: Annotated[float, Gt(0)] = 10.0  # between looks for expired sessions
    # Where session records lie: "postgresql://USER@HOST/DATABASE" with libpq's parameters; empty: in `data`.
    records: str = ""
    records_password_file: Path | None = None  # no password stands in `records`; else PGPASSFILE, PGPASSWORD
    records_connections: Annotated[int, Gt(0)] = 16  # to the database at once
    records_timeout_s: Annotated[float, Gt(0)] = 4.0  # of one call with all its tries; routers wait for 5 s
