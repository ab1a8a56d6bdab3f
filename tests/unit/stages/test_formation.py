"""Which processes are a group's stages, and what is wrong where they are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import common_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.stages.division import LayerDivision
from kvcommons.stages.epoch import StageAddress
from kvcommons.stages.formation import StageShare, members

MODEL = b"m" * 32
SHARE = StageShare(service="prefill", group="prefill", number=0, division=LayerDivision.said((4, 3, 3), 10))


def stage(number: int, **changes: Any) -> pb.Instance:
    layers = SHARE.ranges[number]
    part = {
        "group": "prefill", "number": number, "stages": 3, "first_layer": layers.start, "layers": len(layers),
        "rank": 0, "ranks": 1,
    }  # fmt: skip
    part |= {name: changes.pop(name) for name in list(changes) if name in part}
    known: dict[str, Any] = {
        "id": f"s{number}", "service": "prefill_stage", "host": "h", "data_address": f"unix:/s{number}",
        "started_ms": 1, "model": common_pb2.ModelInfo(fingerprint=MODEL), "load": pb.Load(ready=True),
    }  # fmt: skip
    return pb.Instance(stage=pb.StagePart(**part), **(known | changes))


def test_stages_are_found_in_order_whoever_else_is_there() -> None:
    others = [stage(1, id="x", group="other", data_address="unix:/x")]
    found, shortfall = members(SHARE, MODEL, [stage(2), *others, stage(1)])
    assert not shortfall
    assert found == [
        StageAddress(number=1, data_address="unix:/s1"),
        StageAddress(number=2, data_address="unix:/s2"),
    ]


def test_ranks_of_stages_are_members_one_after_another() -> None:
    share = StageShare(
        service="prefill", group="prefill", number=0, division=SHARE.division, rank=TensorRank(ranks=2)
    )
    assert not share.alone
    instances = [
        stage(number, rank=rank, ranks=2, id=f"{number}-{rank}", data_address=f"unix:/{number}-{rank}")
        for number in range(3)
        for rank in range(2)
        if number or rank
    ]
    found, shortfall = members(share, MODEL, reversed(instances))
    assert not shortfall
    assert [(one.number, one.data_address) for one in found] == [
        (number, f"unix:/{number // 2}-{number % 2}") for number in range(1, 6)
    ]
    assert "stage 1, rank 1, of group 'prefill' is not there" in members(share, MODEL, instances[:2])[1]
    wrong = [stage(0, rank=1, ranks=4), *instances[1:]]
    assert "has 4 ranks a stage, and 2 are due: start all" in members(share, MODEL, wrong)[1]


def test_of_two_at_one_address_the_later_lives() -> None:
    killed = stage(1, id="before", started_ms=0, model=common_pb2.ModelInfo(fingerprint=b"old"))
    assert members(SHARE, MODEL, [stage(1), killed, stage(2)])[1] == ""


@pytest.mark.parametrize(
    ("instances", "why"),
    [
        ([stage(1)], "stage 2 of group 'prefill' is not there"),
        ([stage(1), stage(2, load=pb.Load())], "stage 2 of group 'prefill' is not there, or not ready"),
        ([stage(1), stage(1, id="b", data_address="unix:/b"), stage(2)], r"stage 1 more than once \(b, s1\)"),
        ([stage(1, stages=2, layers=0, load=pb.Load())], "is started as one of 2 stages, and 3 are due"),
        ([stage(1, layers=2), stage(2)], "has layers 4 … 5 of 3 stages, and 4 … 6 of 3 are due"),
        ([stage(1, stages=2), stage(2)], "of 2 stages, and 4 … 6 of 3 are due"),
        ([stage(1), stage(2, model=common_pb2.ModelInfo(fingerprint=b"o"))], "has another model"),
    ],
)
def test_what_is_wrong_is_said(instances: list[pb.Instance], why: str) -> None:
    found, shortfall = members(SHARE, MODEL, instances)
    assert found == []
    assert re.search(why, shortfall)
