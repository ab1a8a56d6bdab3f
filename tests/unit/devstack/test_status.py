"""What `kvcommons status` makes of what the router tells."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rich.console import Console, RenderableType

from devstack.status import _services, _tables
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


def test_a_service_that_is_silent_is_shown_with_the_age_of_its_figures() -> None:
    pool = ledger_pb2.Instance(id="attention_pool-1", service="attention_pool")
    for silent_s, said in ((None, False), (2.5, False), (31.2, True)):
        reported = _lines(_services([_instance(pool, None, silent_s)], None), "of 31 s ago")
        assert bool(reported) is said


def test_a_pool_that_lends_nothing_says_why() -> None:
    pool = ledger_pb2.Instance(
        id="attention_pool-1", service="attention_pool", load=ledger_pb2.Load(ready=True)
    )
    why = "its dtype is float32 and decode's bfloat16"
    unfit, fit, reason = _lines(_services([_instance(pool, why), _instance(pool)], None), "attention_pool-1")
    assert "unfit" in unfit
    assert "ready" in fit
    assert f"lends nothing: {why}" in reason


def test_a_kvstore_whose_records_are_elsewhere_says_so() -> None:
    stores = [
        ledger_pb2.Instance(id=name, service="kvstore", load=ledger_pb2.Load(ready=True), records=records)
        for name, records in (("kvstore-1", "folder kvstore"), ("kvstore-2", "folder kvstore-2"))
    ]
    shown = _services([_instance(store) for store in stores], "folder kvstore")
    first, second, reason = _lines(shown, "kvstore-")
    assert "ready" in first
    assert "unfit" in second
    assert "serves nothing: has session records of its own, in the folder kvstore-2" in reason


def test_who_multiplies_is_shown() -> None:
    decode = ledger_pb2.Instance(id="decode-1", service="decode", products="native avx2")
    assert _lines(_services([_instance(decode)], None), "decode-1: products by native avx2")
    assert not _lines(_services([_instance(ledger_pb2.Instance(id="kvstore-1"))], None), "products")


HOST = "ip-10-0-12-134"
STARTED_MS = int(time.time() * 1000) - 90_000_000  # a day and an hour
LONG = "x" * 128
MODEL = "org/Some-Model-135M-Instruct"
SESSIONS: list[dict[str, Any]] = [
    {
        "id": f"conversation-{number:024x}",
        "model": "org/Some-Model-135M-Instruct",
        "version": 2,
        "last_used_at": int(time.time()) - 90_000 + number,
    }
    for number in range(25)
]


def _found(ids: dict[str, str]) -> dict[str, Any]:
    load = ledger_pb2.Load(ready=True, total_blocks=4096, free_blocks=4000)
    instances = [
        _instance(ledger_pb2.Instance(id=name, service=service, load=load, started_ms=STARTED_MS))
        for name, service in ids.items()
    ]
    return {"instances": instances, "queue": {"running": 1, "waiting": 0}, "models": ["demo"]}


def _lines(shown: RenderableType, containing: str = "", width: int = 200) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(shown)
    return [line for line in captured.get().splitlines() if containing in line]


def test_at_80_columns_no_id_is_cut() -> None:
    services = ("router", "prefill", "decode", "attention_pool", "kvstore", "ledger")
    ids = {f"{service}-{HOST}-1a2b3c4d": service for service in services}
    lines = _lines(_tables(_found(ids), {"data": SESSIONS, "total": 25}), width=80)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line]
    for name in ids:
        assert [line for line in lines if line.startswith(f"{name} ")], name
    for session in SESSIONS[-10:]:
        assert [line for line in lines if line.startswith(f"{session['id']} ")], session
    longest = [{**SESSIONS[0], "id": LONG}]
    whole = _lines(_tables(_found(ids), {"data": longest, "total": 1}), "x", width=80)
    assert sum(line.count("x") for line in whole) >= len(LONG)


def test_the_sessions_used_last_are_shown_and_the_others_counted() -> None:
    counted = _lines(_tables(_found({}), {"data": SESSIONS, "total": 31}))
    assert [line.split()[0] for line in counted if line.startswith("conversation-")] == [
        session["id"] for session in SESSIONS[:-11:-1]
    ]
    assert [line for line in counted if "not shown: 21 " in line]
    assert _lines(_tables(_found({}), {"data": SESSIONS, "total": None}), "not shown: more than 15 ")
    assert not _lines(_tables(_found({}), {"data": SESSIONS[:3], "total": 3}), "not shown")


@pytest.mark.parametrize("name", ["[/red]", "[bold]me", "a[b]"])
def test_an_id_is_no_markup(name: str) -> None:
    sessions = [{**SESSIONS[0], "id": name}]
    assert _lines(_tables(_found({name: "decode"}), {"data": sessions, "total": 1}), name)
