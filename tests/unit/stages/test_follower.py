"""A stage takes nothing on trust of what it is sent."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.history import Condemner
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.errors import InvalidInput, from_detail
from kvcommons.pb import data_pb2 as pb
from kvcommons.stages.follower import Follower
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from tests.machine import scaled
from tests.unit.engine.tiny import tiny_core

EPOCH = 7


@pytest.fixture
def stage() -> Iterator[str]:
    """Where the only stage behind the first listens."""
    core, saver = tiny_core(layers=2), BlockSaver("stage")
    unused: Any = SimpleNamespace()
    telemetry: Any = SimpleNamespace(tracer=Tracer.off())

    async def made() -> Condemner:
        return Condemner()

    follower = Follower(
        core, 1, keeper=BlockKeeper(core, saver), saver=saver, histories=unused,
        condemner=asyncio.run(made()), push_deadline_s=1.0, attend_deadline_s=1.0, telemetry=telemetry,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        server = DataServer(f"unix:{Path(name)}/stage", follower, name="stage")
        server.start()
        try:
            yield server.address
        finally:
            follower.close()
            server.stop()
            saver.close(Deadline.after(1))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (pb.StagePlan(number=1, spans=[pb.StageSpan(sequence=1, tokens=1 << 31)]), "more than there are"),
        (pb.StagePlan(number=2, iteration=True), "plan 2 came where 1 was due"),
        (pb.StagePlan(number=1, changes=[pb.StageChange()]), "does not know: run one version"),
    ],
)
def test_a_plan_that_cannot_be_ends_the_epoch(stage: str, plan: pb.StagePlan, why: str) -> None:
    client, deadline = DataClient(stage), Deadline.after(scaled(10))
    model = tiny_core(layers=2).info.fingerprint
    reports, channel = client.connect(deadline), client.connect(deadline)
    plan.epoch = EPOCH
    try:
        join = pb.JoinStages(epoch=EPOCH, model=model, number=1, blocks=1, writer="first")
        reports.send(_request(deadline, join_stages=join), (), deadline)
        assert not _reply(reports, deadline).HasField("error")
        channel.send(_request(deadline, stage_plan=plan), (), deadline)
        while not (reply := _reply(reports, deadline)).HasField("error"):
            pass
        error = from_detail(reply.error)
        assert isinstance(error, InvalidInput)
        assert why in error.message
    finally:
        reports.abort()
        reports.close()
        channel.close()
        client.close()


def _request(deadline: Deadline, **op: Any) -> bytes:
    return pb.DataRequest(deadline_ms=deadline.left_ms(), **op).SerializeToString()


def _reply(connection: Any, deadline: Deadline) -> pb.DataReply:
    head, _ = connection.receive_head(deadline)
    connection.drain(deadline)
    return pb.DataReply.FromString(head)
