"""GET /v1/status: what it says of instances that cannot be of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.pb import ledger_pb2 as pb
from tests.contract.rest_stack import KvStore, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)


async def test_a_pool_that_can_lend_to_no_decode_says_why(
    socket_folder: Path, rest_store: KvStore, caplog: pytest.LogCaptureFixture
) -> None:
    """In the status, and once in the log."""
    async with stack(socket_folder, rest_store) as served:
        engines = [one for engine in served.engines for one in engine.instances()]
        (decode,) = [one for one in engines if one.service == "decode"]
        pools = [
            pb.Instance(id=f"pool-{at}", service="attention_pool", load=pb.Load(ready=True)) for at in (0, 1)
        ]
        for pool in pools:
            pool.model.CopyFrom(decode.model)
        pools[1].model.kv_dtype, pools[1].model.fingerprint = "float16", b"other" * 6
        await served.ledger.show([*engines, served.store.instance, *pools])

        async def unfit() -> dict[str, str | None]:
            _, status = await served.get("/v1/status")
            return {one["id"]: one["unfit"] for one in status["instances"] if one["id"].startswith("pool")}

        async def both() -> bool:
            return len(await unfit()) == 2

        await eventually(both)
        why = f"its dtype is float16 and decode's {decode.model.kv_dtype}"
        assert await unfit() == {"pool-0": None, "pool-1": why}
        line = f"pool-1 can lend to no decode instance: {why}"
        await eventually(lambda: line in caplog.messages)
        assert caplog.messages.count(line) == 1
