"""What a router remembers of session records."""

from __future__ import annotations

from kvcommons.pb import kvstore_pb2 as pb
from services.router.sessions.copies import RecordCopies, grown


def record(session_id: str, *tokens: int, tenant: str = "alice") -> pb.SessionRecord:
    return pb.SessionRecord(tenant=tenant, session_id=session_id, tokens=tokens, last_turn_id="t")


def test_the_records_used_last_stay_within_the_bytes() -> None:
    copies = RecordCopies(bytes_max=3 * 400)
    for name in "abc":
        copies.put(record(name, *range(100)))
    assert copies.get("alice", "a").last_turn_id
    copies.put(record("a", *range(1, 101)))  # in its place
    assert all(copies.get("alice", name).last_turn_id for name in "abc")
    copies.put(record("d", *range(100)))
    assert [name for name in "abcd" if copies.get("alice", name).last_turn_id] == ["a", "c", "d"]
    copies.put(record("e", *range(1000)))  # too large by itself
    assert not any(copies.get("alice", name).last_turn_id for name in "abcde")


def test_tenants_have_records_of_their_own() -> None:
    copies = RecordCopies()
    copies.put(record("s", 1))
    assert copies.get("bob", "s") == pb.SessionRecord()
    copies.put(record("s", 2, tenant="bob"))
    assert (list(copies.get("alice", "s").tokens), list(copies.get("bob", "s").tokens)) == ([1], [2])


def test_a_copy_grows_by_all_fields() -> None:
    added = pb.SessionRecord(tokens=[3], version=2, messages=[pb.Message(role="user", content="x")])
    added.truncations.add(dropped_tokens=64)
    before = record("s", 1, 2)
    before.messages.add(role="system", content="y")
    expected = pb.SessionRecord()
    expected.CopyFrom(before)
    expected.MergeFrom(added)
    assert grown(before, added, kept_blocks=0) == expected
    assert grown(before, pb.SessionRecord(), kept_blocks=0) == before


def test_a_copy_that_grows_stays_as_it_was() -> None:
    before = record("s", 1, 2)
    before.block_ids.extend([b"a", b"b"])
    after = grown(
        before, pb.SessionRecord(tokens=[3], block_ids=[b"c"], version=2, last_turn_id="u"), kept_blocks=1
    )
    assert (list(after.tokens), list(after.block_ids)) == ([1, 2, 3], [b"a", b"c"])
    assert (after.session_id, after.version, after.last_turn_id) == ("s", 2, "u")
    assert (list(before.tokens), list(before.block_ids), before.version) == ([1, 2], [b"a", b"b"], 0)
