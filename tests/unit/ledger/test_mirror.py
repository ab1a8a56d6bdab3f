"""A replica's last words to an etcd that fails."""

from __future__ import annotations

import asyncio
from typing import cast

from kvcommons.errors import Unavailable
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.etcd import Etcd
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry
from tests.machine import scaled


class Failing:
    """The first call of a round fails at once; the others take a while to hear that nobody wants them."""

    def __init__(self) -> None:
        self.calls = 0

    async def revoke(self, lease_id: int) -> None:
        self.calls += 1
        if self.calls % 2:
            raise Unavailable("it is away")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)


async def test_a_time_out_that_comes_as_a_round_of_writes_fails_is_not_lost() -> None:
    etcd, registry = Failing(), Registry(lease_s=30, heartbeat_s=10)
    mirror = Mirror(cast(Etcd, etcd), registry, prefix="/p/", lease_s=30, changed=lambda: None)
    for name in ("decode-1", "decode-2"):
        gone = pb.Instance(id=name, service="decode")
        registry.heartbeat(gone, 0.0)
        registry.put(1, gone)
        registry.left(gone, 0.0)
    leaving = asyncio.create_task(mirror.flush(0.1))
    done, _ = await asyncio.wait({leaving}, timeout=scaled(5))
    leaving.cancel()
    assert done
    assert not leaving.result()
    assert etcd.calls >= 2
