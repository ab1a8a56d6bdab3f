"""A group that cannot come together: it says why, and leaves nothing open."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcommons.errors import Loading, Unavailable
from kvcommons.pb import data_pb2 as pb
from kvcommons.stages.division import LayerDivision
from kvcommons.stages.epoch import StageAddress
from kvcommons.stages.group import StageGroup
from kvcommons.transport.server import DataServer, Exchange
from tests.machine import scaled
from tests.unit.engine.tiny import tiny_core


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        yield Path(name)


def test_a_stage_that_cannot_be_reached_leaves_the_others_free(socket_folder: Path) -> None:
    """An unclosed connection is an error of the test's."""
    joined: list[pb.JoinStages] = []

    def join(request: pb.DataRequest, exchange: Exchange) -> None:
        joined.append(request.join_stages)
        exchange.reply(pb.DataReply(stage_report=pb.StageReport()))

    server = DataServer(f"unix:{socket_folder}/stage", join, name="stage")
    server.start()
    unused: Any = SimpleNamespace()
    group = StageGroup(
        tiny_core(layers=3), LayerDivision.said((1, 1, 1), 3), metrics=unused, saver=unused, condemner=unused,
        iteration_s=1.0, instance_id="p", changed=lambda: None,
    )  # fmt: skip
    members = [
        StageAddress(number=1, data_address=server.address),
        StageAddress(number=2, data_address=f"unix:{socket_folder}/nobody"),
    ]
    try:
        for attempt in (1, 2):
            with pytest.raises(Unavailable, match="nobody"):
                group.form(members)
            gc.collect()
            until_s = time.monotonic() + scaled(5)
            while len(joined) < attempt:  # it may not have read it yet
                assert time.monotonic() < until_s
                time.sleep(0.002)
    finally:
        server.stop()
    assert [one.number for one in joined] == [1, 1]
    assert joined[0].epoch < joined[1].epoch
    assert joined[0].next_address == members[1].data_address
    assert not group.formed
    with pytest.raises(Loading, match="lacks stages"):
        group.check()
