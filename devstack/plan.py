"""What `kvcommons up` starts: pure, from settings to a list of processes with their settings and environment.

Each service gets the same generated settings file (the user's tables over the stack's defaults) and, as
`--set` flags, what belongs to one instance alone: its addresses and its place on disk.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devstack.settings import DEMO_MODEL, UpSettings
from kvcommons.config import PREFIX
from kvcommons.errors import InvalidInput
from kvcommons.placement.choice import POLICIES
from kvcommons.security.roles import TENANTS_KEY, TENANTS_PUBLIC, VERIFYING

# Started together, stopped in this order: each before what it calls. etcd comes last of all.
STOP_ORDER = ("router", "prefill", "decode", "attention_pool", "kvstore", "postgres", "ledger", "etcd")
# Those that compute share the machine's cores.
MODEL_SERVICES = ("prefill", "decode", "attention_pool")
ENGINES = ("prefill", "decode")
# The attention pools together, where they divide the KV heads.
HEAD_GROUP = "pools"
# Of [up], as the router's settings call them, too.
_ROUTER_FILES = ("api_keys", "tls_cert", "tls_key")
# Small blocks, so that a prefix of the short demo conversation is already worth keeping.
DEMO_BLOCK_TOKENS = 16
# As clients call it; its folder is just `model`.
DEMO_NAME = "kvcommons-demo"
# A gigabyte-sized DRAM tier would be most of a laptop; the settings file has the last word.
KVSTORE_DRAM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One child process. `sockets` are paths that its death leaves behind; `account`: as whom it runs, where
    that is not whoever runs the stack."""

    name: str  # "decode-1"; without the number where there is one
    service: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    sockets: tuple[Path, ...] = ()
    folder: Path | None = None  # working directory
    account: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stack lives: `data` outlives it, `runtime` (short, for socket paths) does not."""

    data: Path
    runtime: Path

    @property
    def settings_file(self) -> Path:
        return self.runtime / "kvcommons.toml"

    @property
    def secret_file(self) -> Path:
        """The root of the tenants' salts: block identities are lost with it."""
        return self.data / "secret"

    @property
    def certificates(self) -> Path:
        """By which services know each other on a network, and the keys that sign and verify tenants."""
        return self.data / "certificates"

    @property
    def postgres(self) -> Path:
        """Session records, where the stack runs a database of its own for them."""
        return self.data / "postgres"

    @property
    def postgres_sockets(self) -> Path:
        """Beside `runtime`, which another account may not enter."""
        return self.runtime.with_name(f"{self.runtime.name}-pg")

    @property
    def core_lock(self) -> Path:
        return self.runtime / "cores"

    @property
    def predictors(self) -> Path:
        """What iterations take on this machine, as its engines have learnt."""
        return self.data / "predictors"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    def control(self, name: str) -> str:
        return f"unix:{self.runtime / name}.c"

    def transport(self, name: str) -> str:
        return f"shm:{self.runtime / name}.d"

    def metrics(self, name: str) -> str:
        return f"unix:{self.runtime / name}.m"


def locks_cores(settings: UpSettings, user: Mapping[str, Any]) -> bool:
    """Whether prefill and decode compute one after another, each with all cores. Never where decode's batches
    are to be computed at the same time as others' attention or slices, or prompts in stages."""
    at_once = _offloads(user) or user.get("decode", {}).get("pipelining") == "on" or settings.rotate
    at_once = at_once or any(members_of(service, settings, user) > 1 for service in ENGINES)
    return settings.core_lock and not at_once


def shape_of(service: str, settings: UpSettings, user: Mapping[str, Any]) -> tuple[int, int]:
    """Stages of each prefill or decode, and ranks of each stage: what [up] says, or what the service's own
    table does."""
    table = user.get(service, {})
    named = [table.get(name, 1) for name in ("stages", "tensor")]
    stages, tensor = (one if isinstance(one, int) else 1 for one in named)
    if service == "prefill":
        return max(settings.stages, stages), max(settings.tensor, tensor)
    if service == "decode":
        return max(settings.decode_stages, stages), max(settings.decode_tensor, tensor)
    return 1, 1


def members_of(service: str, settings: UpSettings, user: Mapping[str, Any]) -> int:
    """Processes of each instance."""
    stages, tensor = shape_of(service, settings, user)
    return stages * tensor


def _offloads(user: Mapping[str, Any]) -> bool:
    """Whether decode keeps no KV of its own; a name that is no policy is refused by decode."""
    policy = POLICIES.get(str(user.get("decode", {}).get("placement")))
    return policy is not None and policy.offloads


def threads_by_service(cores: int, settings: UpSettings, user: Mapping[str, Any]) -> dict[str, int]:
    """Cores divided by the processes that compute at the same time, at least 1: together they must not run
    more threads than cores (three times slower). Engines that lock the cores have all of them each; a pool
    computes while the engine that holds the lock waits for it, or beside that one's own part."""
    prefill = settings.prefill_processes * members_of("prefill", settings, user)
    decode = settings.decode * members_of("decode", settings, user)
    together = prefill + decode + settings.attention_pool
    threads = dict.fromkeys(MODEL_SERVICES, max(1, cores // together))
    if locks_cores(settings, user):
        threads |= dict.fromkeys(ENGINES, cores)
    return threads


def tables(
    settings: UpSettings,
    place: Place,
    cores: int,
    user: Mapping[str, Any],
    records: str = "",
    certificates: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The generated settings: the stack's defaults for each service, the user's tables over them. `records`:
    the stack's own database of session records; `certificates`: its own folder of them. Raises InvalidInput
    where these leave a stack that answers nothing."""
    lenders = settings.attention_pool + settings.decode - 1
    if _offloads(user) and not lenders:
        raise InvalidInput(
            f'placement = "{user["decode"]["placement"]}" in [decode] keeps KV on attention pools, and '
            "there is none: raise attention_pool in [up]",
            param="attention_pool",
        )
    if settings.heads and settings.attention_pool < 2:
        raise InvalidInput(
            "heads = true in [up] divides the KV heads between attention pools, and attention_pool = "
            f"{settings.attention_pool}: set it to 2 or more in [up], or leave heads out",
            param="heads",
        )
    if settings.rotate and settings.decode < 2:
        raise InvalidInput(
            "rotate = true in [up] lets decode instances compute slices of each other's batches, and "
            f"decode = {settings.decode}: set it to 2 or more in [up], or leave rotate out",
            param="rotate",
        )
    if settings.colocated and settings.prefill != 1:
        raise InvalidInput(
            f"colocated = true in [up] starts no prefill processes, and prefill = {settings.prefill}: leave "
            "one of them out",
            param="prefill",
        )
    shapes = {service: shape_of(service, settings, user) for service in ENGINES}
    for name, count in zip(("stages", "tensor"), shapes["prefill"], strict=True):
        if settings.colocated and count > 1:
            raise InvalidInput(
                f"colocated = true in [up] starts no prefill processes, and {name} = {count}: decode_{name} "
                "is for those that compute prompts and generate",
                param=name,
            )
    for name, count in zip(("decode_stages", "decode_tensor"), shapes["decode"], strict=True):
        if settings.rotate and count > 1:
            raise InvalidInput(
                "rotate = true in [up] lets decode instances compute slices of each other's batches, which "
                f"stages and ranks do not, and {name} = {count}: leave one of them out",
                param=name,
            )
    ledgers = [place.control(name) for name in names("ledger", settings.ledger)]
    model: dict[str, Any] = {"ledger": ledgers, "model": settings.model_folder}
    threads = threads_by_service(cores, settings, user)
    compute = {service: {**model, "threads": threads[service]} for service in MODEL_SERVICES}
    for table in compute.values():
        if settings.model == DEMO_MODEL:
            table |= {"block_tokens": DEMO_BLOCK_TOKENS, "model_name": DEMO_NAME}
        if settings.model_name is not None:
            table["model_name"] = settings.model_name
    if locks_cores(settings, user):
        for service in ENGINES:
            compute[service]["core_lock"] = str(place.core_lock)
    for service, shape in shapes.items():
        for name, count in zip(("stages", "tensor"), shape, strict=True):
            if count > 1:
                compute[service][name] = count
    decode = compute["decode"]
    if settings.colocated:
        decode["colocated"] = True
    if settings.rotate:
        decode["replicas"] = [place.transport(name) for name in names("decode", settings.decode)]
    defaults: dict[str, dict[str, Any]] = {
        "router": {**model, **_router_table(settings, place)},
        **compute,
        "kvstore": {"ledger": ledgers, "dram_bytes": KVSTORE_DRAM_BYTES, "records": records},
        "ledger": {"etcd": [f"unix:{place.runtime / 'etcd'}"]},
    }
    if certificates is not None:
        for service, table in defaults.items():
            table |= identity(service, certificates)
    return {service: {**table, **user.get(service, {})} for service, table in defaults.items()}


def identity(service: str, certificates: Path) -> dict[str, str]:
    """The settings by which a service is known, and knows for whom it is called: of a folder that `kvcommons
    certificates` has made."""
    table = {"certificates": str(certificates / service)}
    if service == "router":
        table["tenant_key"] = str(certificates / service / TENANTS_KEY)
    if service in VERIFYING:
        table["tenant_key"] = str(certificates / service / TENANTS_PUBLIC)
    return table


def brings_identities(user: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether the user's tables or variables say how services know each other: then all of it is the
    user's."""
    named = {name for table in user.values() if isinstance(table, Mapping) for name in table}
    named |= {name.lower().rpartition("__")[2] for name in environ if name.startswith(PREFIX)}
    return bool(named & {"certificates", "token_file", "tenant_key"})


def _router_table(settings: UpSettings, place: Place) -> dict[str, str]:
    table = {"bind": settings.bind, "secret_file": str(place.secret_file)}
    for name in _ROUTER_FILES:
        path: Path | None = getattr(settings, name)
        if path is not None:
            table[name] = str(path.expanduser().absolute())  # a link may lead elsewhere tomorrow
    return table


def names(service: str, count: int) -> list[str]:
    """`decode` where there is one, else `decode-1`, `decode-2`, …"""
    return [service] if count == 1 else [f"{service}-{number}" for number in range(1, count + 1)]


def processes(
    settings: UpSettings,
    place: Place,
    cores: int,
    port: int,
    environ: Mapping[str, str],
    *,
    user: Mapping[str, Any],
    flagged: Collection[str] = (),
) -> list[ProcessPlan]:
    """Every service process of the stack; etcd is planned beside it (`devstack.etcd`).

    `port` is the router's. `user`: the user's tables, as in `tables`. `flagged`: settings of [up] that
    were given on the command line, which beats what file and environment say in a service's table.
    """
    threads = threads_by_service(cores, settings, user)
    plans = []
    for service, count in (
        ("ledger", settings.ledger),
        ("kvstore", settings.kvstore),
        ("prefill", settings.prefill_processes),
        ("decode", settings.decode),
        ("attention_pool", settings.attention_pool),
        ("router", 1),
    ):
        shape = shape_of(service, settings, user)
        for number, name in enumerate(_all_names(service, count, shape)):
            flags = _instance_flags(service, name, port, place)
            if shape != (1, 1):
                flags |= _stage_flags(service, name, number, count, shape, place)
            if service == "attention_pool" and settings.heads:
                flags |= {"heads": f"{number}/{count}", "head_group": HEAD_GROUP}
            if "model" in flagged and service in ("router", *MODEL_SERVICES):
                flags["model"] = settings.model_folder
            if "model_name" in flagged and service in MODEL_SERVICES:
                flags["model_name"] = str(settings.model_name)
            if service == "router":
                router = _router_table(settings, place)
                flags |= {name: router[name] for name in ("bind", *_ROUTER_FILES) if name in flagged}
            command = [sys.executable, "-m", f"services.{service}", "--config", str(place.settings_file)]
            for key, value in flags.items():
                command += ["--set", f"{key}={value}"]
            addresses = (place.control(name), place.transport(name), place.metrics(name))
            plans.append(
                ProcessPlan(
                    name=name,
                    service=service,
                    command=tuple(command),
                    environment=_environment(environ, threads.get(service, 1)),
                    sockets=tuple(Path(address.partition(":")[2]) for address in addresses),
                )
            )
    return plans


def _all_names(service: str, count: int, shape: tuple[int, int]) -> list[str]:
    """With those of other stages and ranks: `prefill-1`, `prefill-1-rank-1`, `prefill-1-stage-1`,
    `prefill-1-stage-1-rank-1`, …"""
    stages, tensor = shape
    return [
        name + (f"-stage-{stage}" if stage else "") + (f"-rank-{rank}" if rank else "")
        for name in names(service, count)
        for stage in range(stages)
        for rank in range(tensor)
    ]


def _stage_flags(
    service: str, name: str, number: int, count: int, shape: tuple[int, int], place: Place
) -> dict[str, str]:
    """`number`: of the process, among those of `count` instances."""
    stages, tensor = shape
    instance, member = divmod(number, stages * tensor)
    stage, rank = divmod(member, tensor)
    flags = {"stage": str(stage), "stage_group": names(service, count)[instance]}
    if tensor > 1:
        flags["rank"] = str(rank)
    return flags | ({"data_listen": place.transport(name)} if member else {})


def _instance_flags(service: str, name: str, port: int, place: Place) -> dict[str, str]:
    flags = {"listen": place.control(name)}
    if service in ("kvstore", "decode", "attention_pool"):  # prefill only sends
        flags["data_listen"] = place.transport(name)
    if service == "router":
        flags["port"] = str(port)
    else:
        flags["metrics_listen"] = place.metrics(name)
    if service in ENGINES:
        flags["predictor_file"] = str(place.predictors / f"{name}.json")
    if service == "kvstore":
        # The first one's, however many there are: a stack that grows keeps its sessions.
        folder = service if name in names(service, 1) + names(service, 2)[:1] else name
        flags["data"] = str(place.data / folder)
        flags["folder"] = folder  # the same after it was deleted: what was in it is known to be lost
    return flags


def _environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The stack's own environment, with every library's threads bounded and no buffering of what is
    logged."""
    bounds = {
        name: str(threads)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    }
    return {
        **environ,
        **bounds,
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "4",  # glibc's arenas, one per thread, are what idle services mostly weigh
        "PYTHONUNBUFFERED": "1",
    }
