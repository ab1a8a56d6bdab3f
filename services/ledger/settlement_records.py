"""A settlement as etcd keeps it, and back."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.saga import Leg, Settlement, Step


def message_of(settlement: Settlement) -> pb.Settlement:
    return pb.Settlement(
        id=settlement.id,
        term=settlement.term,
        legs=[
            pb.Leg(
                debtor=leg.debtor,
                creditor=leg.creditor,
                left_blocks=leg.left_blocks,
                settled_blocks=leg.settled_blocks,
            )
            for leg in settlement.legs
        ],
        step=pb.Settlement.Step.ValueType(settlement.step),
        round=settlement.round,
        round_blocks=settlement.round_blocks,
    )


def encode(settlement: Settlement) -> bytes:
    return message_of(settlement).SerializeToString(deterministic=True)


def decode(value: bytes) -> Settlement | None:
    """None for what is no settlement."""
    try:
        record = pb.Settlement.FromString(value)
        step = Step(record.step)
    except (DecodeError, ValueError):
        return None
    if not record.id or not record.legs:
        return None
    return Settlement(
        id=record.id,
        term=record.term,
        legs=tuple(
            Leg(
                debtor=leg.debtor,
                creditor=leg.creditor,
                left_blocks=leg.left_blocks,
                settled_blocks=leg.settled_blocks,
            )
            for leg in record.legs
        ),
        round_blocks=record.round_blocks,
        step=step,
        round=record.round,
    )
