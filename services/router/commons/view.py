"""The commons as one picture, made of what the router, the ledgers and the kvstores know. No I/O;
schemas/commons.py describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcommons.pb import kvstore_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb.holder_pb2 import InspectReply
from services.router.admission.classes import ServiceClass
from services.router.turn.dispatch import SequenceUnderWay

SEQUENCES_MAX = 200  # in a picture; it says how many more there are
LENDERS = ("decode", "attention_pool")
_OUTCOMES = ("met", "missed", "refused", "best_effort")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """Choices that run and that wait at this router; of the running ones those that wait until
    decode has room for them; documents on their way into sessions."""

    running: int
    waiting: int
    waiting_for_room: int
    documents: int


def commons_view(
    *,
    taken_at: float,
    instances: Sequence[pb.Instance],
    ready: frozenset[str],
    silent_s: Mapping[str, float | None],
    held: Mapping[str, InspectReply],
    stats: Mapping[str, kvstore_pb2.StatsReply],
    settlements: Iterable[pb.SettlementReport],
    sequences: Iterable[SequenceUnderWay],
    queue: QueueCounts,
    classes: Iterable[ServiceClass],
    outcomes: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """`taken_at`: seconds since the epoch. `ready`: ids of the instances that are asked to serve. `silent_s`:
    by id, how old what the registry says of its load is; None: not known. `held`: of the holders that
    answered, their memory and their loans at this moment; of others they are as old as their heartbeats.
    `stats`: of the kvstores that answered. `outcomes`: by class, how many requests came to which."""
    shown: list[dict[str, Any]] = []
    left_out = 0
    for one in sequences:
        if len(shown) < SEQUENCES_MAX:
            shown.append(_sequence(one))
        else:
            left_out += 1
    return {
        "object": "commons",
        "taken_at": taken_at,
        "instances": [
            _instance(one, held.get(one.id), silent_s.get(one.id), ready=one.id in ready) for one in instances
        ],
        "tiers": [_tiers(one.id, stats.get(one.id)) for one in instances if one.service == "kvstore"],
        "loans": _loans(instances, held),
        "sequences": shown,
        "sequences_left_out": left_out,
        "settlements": [_settlement(one) for one in merged(settlements)],
        "queue": {
            "running": queue.running,
            "waiting": queue.waiting,
            "waiting_for_room": queue.waiting_for_room,
            "documents": queue.documents,
        },
        "classes": [_class(one, outcomes.get(one.name, {})) for one in classes],
    }


def merged(reports: Iterable[pb.SettlementReport]) -> list[pb.SettlementReport]:
    """Each settlement once, oldest first: of several ledgers that tell of it, the one that drives it knows
    best, and of those that drove it the last one."""
    best: dict[str, pb.SettlementReport] = {}
    for one in reports:
        name = one.settlement.id
        known = best.get(name)
        if known is None or (one.ended, one.ended_ms) < (known.ended, known.ended_ms):
            best[name] = one
    return sorted(best.values(), key=lambda one: (-one.begun_ms, one.settlement.id))


def _instance(
    one: pb.Instance, held: InspectReply | None, silent_s: float | None, *, ready: bool
) -> dict[str, Any]:
    load = one.load
    memory = load if held is None else held
    group = one.heads.group if one.HasField("heads") else one.stage.group if one.HasField("stage") else None
    return {
        "id": one.id,
        "service": one.service,
        "host": one.host,
        "model": one.model.name or None,
        "group": group,
        "ready": ready,
        "total_blocks": memory.total_blocks,
        "free_blocks": memory.free_blocks,
        "lendable_blocks": load.lendable_blocks,
        "running": load.running,
        "queued": load.queued,
        "silent_s": None if silent_s is None else round(silent_s, 1),
        "answers": held is not None if one.service in LENDERS else None,
    }


def _tiers(store: str, stats: kvstore_pb2.StatsReply | None) -> dict[str, Any]:
    names = (
        "dram_blocks",
        "dram_capacity_blocks",
        "disk_blocks",
        "disk_capacity_blocks",
        "pending_writes",
        "sessions",
    )
    figures = {name: getattr(stats, name) if stats is not None else None for name in names}
    return {"kvstore": store, **figures}


def _loans(instances: Iterable[pb.Instance], held: Mapping[str, InspectReply]) -> list[dict[str, Any]]:
    """By the lenders' block tables, which are what counts: at this moment, or of a lender that does not
    answer as its last heartbeat told."""
    return [
        {"creditor": one.id, "debtor": debtor, "blocks": blocks}
        for one in instances
        if one.service in LENDERS
        for debtor, blocks in sorted(_lent(one, held.get(one.id)).items())
        if blocks
    ]


def _lent(one: pb.Instance, held: InspectReply | None) -> Mapping[str, int]:
    """Blocks by debtor. Of a head group, whose parts all lend the same, the first one counts."""
    if held is None:
        return one.load.loans
    lent: Counter[str] = Counter()
    if not one.HasField("heads") or one.heads.number == 0:
        for segment in held.segments:
            if segment.lease_left_ms:  # else its own
                lent[segment.owner] += segment.blocks
    return lent


def _sequence(one: SequenceUnderWay) -> dict[str, Any]:
    """Blocks that nobody lends are decode's own. What is borrowed may be more than the sequence fills yet."""
    blocks = -(-one.tokens // one.block_tokens)
    holders = {one.decode: max(0, blocks - sum(one.borrowed.values()))} if one.decode else {}
    holders.update(one.borrowed)
    return {
        "name": one.name,
        "phase": one.phase.value,
        "prompt_tokens": one.prompt_tokens,
        "tokens": one.tokens,
        "prefill": one.prefill or None,
        "decode": one.decode or None,
        "holders": [{"instance": name, "blocks": held} for name, held in holders.items()],
        "resumptions": one.resumptions,
    }


def _settlement(report: pb.SettlementReport) -> dict[str, Any]:
    settlement = report.settlement
    return {
        "id": settlement.id,
        "step": pb.Settlement.Step.Name(settlement.step).lower(),
        "round": settlement.round,
        "legs": [
            {
                "debtor": leg.debtor,
                "creditor": leg.creditor,
                "left_blocks": leg.left_blocks,
                "settled_blocks": leg.settled_blocks,
            }
            for leg in settlement.legs
        ],
        "begun_s": report.begun_ms / 1000,
        "ended_s": report.ended_ms / 1000 if report.ended else None,
    }


def _class(one: ServiceClass, outcomes: Mapping[str, int]) -> dict[str, Any]:
    objectives = one.objectives
    counts = {name: outcomes.get(name, 0) for name in _OUTCOMES}
    return {"name": one.name, "ttft_s": objectives.ttft_s, "tbt_s": objectives.tbt_s, **counts}
