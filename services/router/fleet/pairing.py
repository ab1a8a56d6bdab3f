"""Which instances serve a turn, and which kvstore has a session or a prompt's blocks: pure decisions over the
directory's view and the router's own counts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvcommons.homes import homes_of
from kvcommons.pb import ledger_pb2
from kvcommons.pb.common_pb2 import ModelInfo

# How much busier than the idlest instance a session's own instance may be and still be preferred: what its
# device tier saves is worth about that many sequences' share of an iteration.
_AFFINITY_SLACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The instances of one attempt."""

    prefill: ledger_pb2.Instance
    decode: ledger_pb2.Instance


# What has to be equal for KV to be understood: of a model, and as the settings call it.
_LAYOUT = {
    "name": "model",
    "kv_dtype": "dtype",
    "block_tokens": "block_tokens",
    "layers": "number of layers",
    "kv_heads": "number of KV heads",
    "head_dim": "head size",
}


def choose_pair(
    *,
    prefills: Sequence[ledger_pb2.Instance],
    decodes: Sequence[ledger_pb2.Instance],
    model: bytes,
    under_way: Mapping[str, int],
    affinity: str,
    blocks: int,
    failed: Collection[str] = (),
    free_blocks: Mapping[str, int] | None = None,
    shared_blocks: Mapping[str, int] | None = None,
) -> Pair | None:
    """The pair to try next; None when the model has no ready prefill or no ready decode.

    `model`: fingerprint. `under_way`: choices that this router has under way, by instance id. `affinity`:
    what goes to the same instances while they are about as busy as others: a session id, so that its device
    tier is hit. `blocks`: what the sequence needs at the start. `failed`: ids that failed this turn lately;
    they are taken only when there is no other. `free_blocks`: blocks of the largest sequence that fits a
    decode instance, borrowed ones included, by its id. `shared_blocks`: how many of the sequence's blocks
    each has already."""
    free_blocks, shared_blocks = free_blocks or {}, shared_blocks or {}
    prefill = _choose(of_model(prefills, model), under_way, affinity, 0, failed, free_blocks, shared_blocks)
    decode = _choose(
        of_model(decodes, model), under_way, affinity, blocks, failed, free_blocks, shared_blocks
    )
    if prefill is None or decode is None:
        return None
    return Pair(prefill=prefill, decode=decode)


def capacity_blocks(
    decodes: Sequence[ledger_pb2.Instance], pools: Sequence[ledger_pb2.Instance], model: bytes
) -> int | None:
    """Blocks that the largest sequence may take at most: all of one decode instance and, where it borrows,
    all that others lend at most. None where no heartbeat has said yet."""
    loads = [instance.load for instance in of_model(decodes, model)]
    if not any(load.total_blocks for load in loads):
        return None
    lending = [load.lend_blocks_max for load in loads]
    # The parts of a head group have the same blocks, a share of the heads each: one counts for all.
    pooled = sum(one.load.lend_blocks_max for one in of_model(pools, model) if not one.heads.number)
    return max(
        load.total_blocks + (0 if load.only_here else sum(lending) - mine + pooled)
        for load, mine in zip(loads, lending, strict=True)
    )


def unfit_pools(
    decodes: Sequence[ledger_pb2.Instance], pools: Sequence[ledger_pb2.Instance]
) -> dict[str, str]:
    """Attention pools that can lend to no decode instance that is there, by id: why not. Nobody is named
    while there is no decode instance."""
    if not decodes:
        return {}
    wanted = {instance.model.fingerprint for instance in decodes}
    return {
        pool.id: _difference(pool.model, decodes) for pool in pools if pool.model.fingerprint not in wanted
    }


def _difference(model: ModelInfo, decodes: Sequence[ledger_pb2.Instance]) -> str:
    """To the decode instance that is most alike."""
    found = min((_differences(model, decode.model) for decode in decodes), key=len)
    return ", ".join(found) or "its model has other weights or another config than decode's"


def _differences(model: ModelInfo, wanted: ModelInfo) -> list[str]:
    return [
        f"its {setting} is {getattr(model, name)} and decode's {getattr(wanted, name)}"
        for name, setting in _LAYOUT.items()
        if getattr(model, name) != getattr(wanted, name)
    ]


def served_models(
    prefills: Sequence[ledger_pb2.Instance], decodes: Sequence[ledger_pb2.Instance]
) -> list[ledger_pb2.Instance]:
    """A decode instance for each model (fingerprint) that a prefill serves too; most instances first."""
    computed = {instance.model.fingerprint for instance in prefills}
    by_model: dict[bytes, list[ledger_pb2.Instance]] = {}
    for instance in decodes:
        if instance.model.fingerprint in computed:
            by_model.setdefault(instance.model.fingerprint, []).append(instance)
    ranked = sorted(by_model.items(), key=lambda item: (-len(item[1]), item[0]))
    return [instances[0] for _, instances in ranked]


def _choose(
    candidates: Sequence[ledger_pb2.Instance],
    under_way: Mapping[str, int],
    affinity: str,
    blocks: int,
    failed: Collection[str],
    free_blocks: Mapping[str, int],
    shared_blocks: Mapping[str, int],
) -> ledger_pb2.Instance | None:
    if not candidates:
        return None
    fresh = [instance for instance in candidates if instance.id not in failed] or candidates
    fitting = _with_free_blocks(fresh, blocks, free_blocks, shared_blocks) or fresh
    least = min(_busy(instance, under_way) for instance in fitting)
    near = [
        instance
        for instance in fitting
        if _busy(instance, under_way) <= least + (_AFFINITY_SLACK if affinity else 0)
    ]
    # Rendezvous hashing: every replica of the router prefers the same instance, with nothing to remember.
    return max(near, key=lambda instance: _weight(affinity, instance.id))


def _with_free_blocks(
    candidates: Sequence[ledger_pb2.Instance],
    blocks: int,
    free_blocks: Mapping[str, int],
    shared_blocks: Mapping[str, int],
) -> list[ledger_pb2.Instance]:
    """Those that have it themselves; else those that have it with what others lend."""
    here = [one for one in candidates if one.load.free_blocks + shared_blocks.get(one.id, 0) >= blocks]
    return here or [instance for instance in candidates if free_blocks.get(instance.id, 0) >= blocks]


def _busy(instance: ledger_pb2.Instance, under_way: Mapping[str, int]) -> float:
    """Sequences of each of its batches. The heartbeat's count is some seconds old and the own count is of
    this router alone: the larger is nearer."""
    load = instance.load
    return max(load.running + load.queued, under_way.get(instance.id, 0)) / max(load.batches, 1)


def _weight(affinity: str, instance_id: str) -> bytes:
    return hashlib.blake2b(f"{affinity}\0{instance_id}".encode(), digest_size=8).digest()


def of_model(instances: Sequence[ledger_pb2.Instance], model: bytes) -> list[ledger_pb2.Instance]:
    """Those that have the model of this fingerprint."""
    return [instance for instance in instances if instance.model.fingerprint == model]


def stores_of(
    stores: Collection[ledger_pb2.Instance], records: str, home: bytes
) -> list[ledger_pb2.Instance]:
    """The kvstores to ask about a key: its home first, then whoever would be its home without those before.

    `records` says where those of the stack are; while that is not known ("") all kvstores have to agree. Of a
    folder's processes the last one has it; dead ones stay in the registry for some seconds. The others come
    behind it all the same, for who is the last is but what it says itself.
    """
    records = records or common_records(stores)
    found: dict[str, list[ledger_pb2.Instance]] = {}
    for store in sorted(stores, key=lambda one: -one.started_ms):
        if store.records == records:
            found.setdefault(store.folder or store.id, []).append(store)
    return [store for name in homes_of(home, found) for store in found[name]]


def common_records(stores: Collection[ledger_pb2.Instance]) -> str:
    """Where all of them keep session records; empty where they do not agree."""
    places = {store.records for store in stores}
    return places.pop() if len(places) == 1 else ""


def why_none_serves(stores: Collection[ledger_pb2.Instance], records: str) -> str:
    """Of kvstores that are there."""
    places = sorted({store.records for store in stores if store.records != records})
    if not places:
        return "no session store is there; try again in some seconds"
    own = f"this stack's records lie in the {records}" if records else "nobody has said which ones count"
    return (
        f"no session store serves: kvstores have session records in the {', the '.join(places)}, and {own}. "
        'Set records in [kvstore] of all to the same database ("postgresql://…"), or run one kvstore only'
    )
