"""What `kvcommons status` makes of what the router tells."""

from __future__ import annotations

import pytest
from rich.console import Console

from devstack.status import _services
from kvcommons.pb import ledger_pb2
from services.router.api.health import _instance


@pytest.mark.parametrize("part", [None, 1])
def test_a_part_of_a_head_group_says_so(part: int | None) -> None:
    pool = ledger_pb2.Instance(id="attention_pool-1", service="attention_pool")
    if part is not None:
        pool.heads.group, pool.heads.number, pool.heads.parts = "halves", part, 2
    console = Console(width=160)
    with console.capture() as shown:
        console.print(_services([_instance(pool)], None))
    assert "attention_pool-1" in shown.get()
    assert ("heads 1/2 of halves" in shown.get()) is (part is not None)


def test_a_pool_that_lends_nothing_says_why() -> None:
    pool = ledger_pb2.Instance(
        id="attention_pool-1", service="attention_pool", load=ledger_pb2.Load(ready=True)
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(
            _services([_instance(pool, "its dtype is float32 and decode's bfloat16"), _instance(pool)], None)
        )
    lines = [line for line in shown.get().splitlines() if "attention_pool-1" in line]
    assert "lends nothing: its dtype is float32 and decode's bfloat16" in lines[0]
    assert "ready" in lines[1]


def test_a_kvstore_whose_records_are_elsewhere_says_so() -> None:
    console = Console(width=200)
    stores = [
        ledger_pb2.Instance(id=name, service="kvstore", load=ledger_pb2.Load(ready=True), records=records)
        for name, records in (("kvstore-1", "folder kvstore"), ("kvstore-2", "folder kvstore-2"))
    ]
    with console.capture() as shown:
        console.print(_services([_instance(store) for store in stores], "folder kvstore"))
    lines = [line for line in shown.get().splitlines() if "kvstore-" in line]
    assert "ready" in lines[0]
    assert "serves nothing: has session records of its own, in the folder kvstore-2" in lines[1]
