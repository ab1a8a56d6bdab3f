"""Which kvstore is asked for a session, and which one next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvcommons.errors import DeadlineExceeded, Overloaded, SessionNotFound, StoreUnavailable, Unavailable
from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.rpc.channel import open_channel
from services.router.fleet.fleet import Fleet
from services.router.fleet.pairing import stores_of
from services.router.sessions.store import CALL_S, SILENT_S, SessionStore

PLACE = "database d:5432/kv"


def kvstore(folder: str, *, life: int = 1, records: str = PLACE) -> Instance:
    return Instance(id=f"{folder}-{life}", folder=folder, records=records, started_ms=life)


def folders(stores: list[Instance]) -> list[str]:
    return [store.folder for store in stores]


def test_the_home_comes_first_and_the_next_one_without_it() -> None:
    stores = [kvstore(folder) for folder in "abcd"]
    firsts = set()
    for number in range(50):
        ranked = folders(stores_of(stores, PLACE, str(number).encode()))
        assert sorted(ranked) == [*"abcd"]
        left = [store for store in stores if store.folder != ranked[0]]
        assert folders(stores_of(left, PLACE, str(number).encode())) == ranked[1:]
        firsts.add(ranked[0])
    assert firsts == {*"abcd"}


def test_of_a_folder_s_processes_the_last_one_is_asked_first() -> None:
    """And whoever says falsely that it is the last one is not the only one."""
    stores = [kvstore("a", life=2), kvstore("a", life=3), kvstore("a", life=1)]
    assert [store.id for store in stores_of(stores, PLACE, b"")] == ["a-3", "a-2", "a-1"]


def test_kvstores_whose_records_are_elsewhere_are_not_asked() -> None:
    stores = [kvstore("a"), kvstore("b", records="folder b")]
    assert folders(stores_of(stores, PLACE, b"")) == ["a"]
    assert folders(stores_of(stores, "folder b", b"")) == ["b"]
    assert stores_of(stores, "", b"") == []  # nobody knows which ones count
    assert folders(stores_of(stores[:1], "", b"")) == ["a"]


class View:
    """What the ledger says, without a ledger."""

    records = PLACE

    def __init__(self, *stores: Instance) -> None:
        self.stores = list(stores)
        self.suspected: list[str] = []

    def instances(self, service: str, *, ready: bool = True) -> list[Instance]:
        return [one for one in self.stores if not ready or one.id not in self.suspected]

    def silent_s(self, instance_id: str) -> float | None:
        return None

    def suspect(self, instance_id: str) -> None:
        self.suspected.append(instance_id)


class Asked(Fleet):
    """Tells who was asked."""

    def sessions(self, store: Instance | None):  # type: ignore[no-untyped-def]
        super().sessions(store)
        return store


def opened(*stores: Instance) -> tuple[SessionStore, View]:
    view = View(*stores)
    return SessionStore(Asked(view, open_channel)), view


Make = Callable[[Instance, float], Awaitable[str]]


async def call(store: SessionStore, make: Make, patience_s: float = 30.0) -> str:
    return await store.call(make, tenant="t", root="s", patience_s=patience_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [Unavailable("gone"), DeadlineExceeded("silent")])
async def test_another_one_is_asked_at_once_where_one_is_silent(error: Exception) -> None:
    store, view = opened(kvstore("a"), kvstore("b"))
    asked: list[tuple[str, float]] = []

    async def make(instance: Instance, timeout_s: float) -> str:
        asked.append((instance.id, timeout_s))
        if len(asked) == 1:
            raise error
        return instance.id

    assert await call(store, make) == asked[1][0]
    assert {one for one, _ in asked} == {"a-1", "b-1"}
    assert [timeout_s for _, timeout_s in asked] == [SILENT_S, CALL_S]
    assert view.suspected == [asked[0][0]]  # the next call goes elsewhere first
    assert await call(store, make) == asked[1][0]


async def test_what_may_not_be_repeated_is_asked_once() -> None:
    store, _ = opened(kvstore("a"), kvstore("b"))
    asked = []

    async def make(instance: Instance, timeout_s: float) -> str:
        asked.append((instance.id, timeout_s))
        raise Unavailable("gone")

    with pytest.raises(StoreUnavailable):
        await call(store, make, patience_s=0.0)
    assert [timeout_s for _, timeout_s in asked] == [CALL_S]


@pytest.mark.parametrize("error", [StoreUnavailable("the database is away"), Overloaded("too many")])
async def test_nobody_is_suspected_who_answers(error: Exception) -> None:
    store, view = opened(kvstore("a"), kvstore("b"))

    async def make(instance: Instance, timeout_s: float) -> str:
        raise error

    with pytest.raises((StoreUnavailable, Overloaded)):
        await call(store, make, patience_s=0.2)
    assert view.suspected == []


async def test_what_the_store_says_of_a_session_passes_through() -> None:
    store, _ = opened(kvstore("a"), kvstore("b"))
    asked = []

    async def make(instance: Instance, timeout_s: float) -> str:
        asked.append(instance.id)
        raise SessionNotFound("there is none")

    with pytest.raises(SessionNotFound):
        await call(store, make)
    assert len(asked) == 1


async def test_where_no_kvstore_serves_the_error_says_why() -> None:
    async def make(instance: Instance, timeout_s: float) -> str:
        return instance.id

    store, _ = opened()
    with pytest.raises(StoreUnavailable, match="no session store is there"):
        await call(store, make, patience_s=0.0)
    store, _ = opened(kvstore("a", records="folder a"), kvstore("b", records="folder b"))
    with pytest.raises(
        StoreUnavailable, match="folder a, the folder b, and this stack's records lie in the data"
    ):
        await call(store, make, patience_s=0.0)
