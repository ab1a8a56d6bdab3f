"""Documents on their way into sessions, wherever records lie: who goes on with one, what its end leaves."""

from __future__ import annotations

import pytest

from kvcommons.errors import AlreadyExists, Conflict, InvalidInput, SessionNotFound, TurnInProgress
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.records.interface import Records
from services.kvstore.session import TurnBegin, TurnRenewal
from services.kvstore.turn_lease import DocumentOnItsWay, TurnLease
from tests.contract.records_fixtures import MODEL, Home, begin, commit, turn

pytest_plugins = ("tests.contract.records_home",)

DOCUMENT = pb.Document(
    format=1,
    model=MODEL,
    model_name="m",
    tokens=range(100_000),
    messages=[pb.Message(role="system", content="a long one")],
)


def renewal(lease: TurnLease, computed_tokens: int, document: pb.Document | None = None) -> TurnRenewal:
    state = pb.DocumentState(tokens=100_000, computed_tokens=computed_tokens, left_ms=7000, role="system")
    return TurnRenewal(
        turn_id=lease.turn_id,
        fencing=lease.fencing,
        lease_ms=1000,
        document_state=state,
        document=document,
    )


async def kept(records: Records, session_id: str = "s") -> TurnLease:
    """A turn that is a document from now on."""
    _, lease = await begin(records, "d1", session_id)
    await records.renew("alice", session_id, renewal(lease, 0, DOCUMENT))
    return lease


async def only_document(records: Records) -> DocumentOnItsWay:
    (found,) = await records.documents()
    assert await records.documents(found.tenant, found.session_id) == [found]
    assert await records.documents("bob", found.session_id) == []
    return found


@pytest.mark.parametrize("committed", [False, True], ids=["new session", "old session"])
async def test_a_document_is_gone_on_with_by_another_owner(home: Home, committed: bool) -> None:
    records, clock = await home.open(), home.clock
    if committed:
        await commit(records, "t1", [7, 8])
    lease = await kept(records)
    await records.renew("alice", "s", renewal(lease, 40_000))
    found = await only_document(records)
    assert (found.session_id, found.lease.turn_id, found.orphaned) == ("s", "d1", False)
    assert found.lease.document is not None
    assert found.lease.document.computed_tokens == 40_000
    with pytest.raises(TurnInProgress, match="40% of its 100000 tokens") as reported:
        await begin(records, "d1", owner="another router")
    assert reported.value.retry_after_ms == 7000
    clock.time_ms += 24 * 3_600_000  # as long as it may take until somebody has time for it
    await home.close()
    records = await home.open()
    assert await records.sweep() == 0
    assert (await only_document(records)).orphaned
    with pytest.raises(TurnInProgress, match="40%"):
        await begin(records, "t2", owner="another router")
    with pytest.raises(AlreadyExists):
        await records.create("alice", "s", 0)
    begun = await records.begin("alice", "s", TurnBegin(turn_id="d1", owner="another router", lease_ms=1000))
    assert begun.document == DOCUMENT
    assert begun.lease.fencing > lease.fencing
    assert begun.lease.document is not None
    assert begun.lease.document.computed_tokens == 40_000
    assert list(begun.record.tokens) == ([7, 8] if committed else [])
    with pytest.raises(Conflict):
        await records.renew("alice", "s", renewal(lease, 50_000))
    with pytest.raises(Conflict):
        await records.commit("alice", "s", turn(lease, begun.record.version, [9]))
    await records.abandon("alice", "s", turn_id="d1", fencing=lease.fencing)  # takes nothing from the next
    await records.renew("alice", "s", renewal(begun.lease, 60_000))
    done = turn(begun.lease, begun.record.version, DOCUMENT.tokens)
    assert (await records.commit("alice", "s", done)).new
    assert not (await records.commit("alice", "s", done)).new
    assert await records.documents() == []
    stored = await records.get("alice", "s")
    assert list(stored.tokens) == [*begun.record.tokens, *DOCUMENT.tokens]
    record, _ = await begin(records, "t2")
    assert record == stored


async def test_a_router_that_comes_back_goes_on_at_once(records: Records) -> None:
    lease = await kept(records)
    begun = await records.begin("alice", "s", TurnBegin(turn_id="d1", owner="router", lease_ms=1000))
    assert begun.document == DOCUMENT
    assert begun.lease.fencing > lease.fencing
    with pytest.raises(Conflict):
        await records.renew("alice", "s", renewal(lease, 1))


async def test_a_document_that_is_ended_leaves_nothing(records: Records) -> None:
    await commit(records, "t1", [7, 8])
    lease = await kept(records)
    await records.abandon("alice", "s", turn_id="d1", fencing=lease.fencing)
    assert await records.documents() == []
    with pytest.raises(Conflict):
        await records.renew("alice", "s", renewal(lease, 1))
    begun = await records.begin("alice", "s", TurnBegin(turn_id="d1", owner="router", lease_ms=1000))
    assert begun.document is None
    assert list(begun.record.tokens) == [7, 8]


async def test_a_document_goes_with_its_session(records: Records) -> None:
    await commit(records, "t1", [7, 8])
    lease = await kept(records)
    fork = await records.fork("alice", "s", "fork")
    assert list(fork.tokens) == [7, 8]
    await records.delete("alice", "s")
    assert await records.documents() == []
    with pytest.raises(SessionNotFound):
        await records.renew("alice", "s", renewal(lease, 1))
    begun = await records.begin("alice", "s", TurnBegin(turn_id="d1", owner="router", lease_ms=1000))
    assert begun.document is None


async def test_a_state_is_of_a_document(records: Records) -> None:
    _, lease = await begin(records, "t1")
    with pytest.raises(InvalidInput, match="document"):
        await records.renew("alice", "s", renewal(lease, 1))
    alone = TurnRenewal(turn_id="t1", fencing=lease.fencing, lease_ms=1000, document=DOCUMENT)
    with pytest.raises(InvalidInput, match="state"):
        await records.renew("alice", "s", alone)
    assert await records.documents() == []
