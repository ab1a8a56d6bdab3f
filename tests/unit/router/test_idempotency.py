"""What a router keeps for requests that may come again: whose it is, how much, and for how long."""

from __future__ import annotations

import pytest

from kvcommons.errors import IdempotencyInProgress, IdempotencyKeyReused
from services.router.turn.idempotency import KeptAnswer, KeptAnswers, RequestKey

ENTRY = 512


def key(name: str = "k", tenant: str = "ann", body: bytes = b"{}") -> RequestKey:
    return RequestKey.of(tenant, [name], [b"POST", b"/v1/completions", body])


def answer(size: int) -> KeptAnswer:
    return KeptAnswer(content_type="application/json", body=b"x" * size)


def keep(kept: KeptAnswers, one: RequestKey, size: int, now_s: float = 0.0) -> None:
    assert kept.begin(one, now_s) is None
    kept.end(one, answer(size), now_s)


def test_a_key_is_its_tenants() -> None:
    kept = KeptAnswers(bytes_max=1 << 20, kept_s=60.0)
    keep(kept, key(), 10)
    assert kept.begin(key(), 1.0) == answer(10)
    assert kept.begin(key(tenant="bob"), 1.0) is None
    # No name and key of one tenant read as those of another one.
    assert key("b:c", tenant="a").key != key("c", tenant="a:b").key


def test_parts_of_a_request_do_not_run_into_each_other() -> None:
    one = RequestKey.of("ann", ["k"], [b"POST", b"/a", b"b"])
    other = RequestKey.of("ann", ["k"], [b"POST", b"/ab", b""])
    assert one.key == other.key
    assert one.request != other.request


def test_while_it_is_under_way_and_with_another_body_it_is_refused() -> None:
    kept = KeptAnswers(bytes_max=1 << 20, kept_s=60.0)
    assert kept.begin(key(), 0.0) is None
    with pytest.raises(IdempotencyInProgress):
        kept.begin(key(), 1e6)
    with pytest.raises(IdempotencyKeyReused):
        kept.begin(key(body=b"[]"), 1.0)
    kept.end(key(), None, 2.0)
    assert kept.size == 0
    assert kept.begin(key(body=b"[]"), 3.0) is None


def test_what_is_in_a_session_is_known_here_by_its_digest_alone() -> None:
    kept = KeptAnswers(bytes_max=1 << 20, kept_s=60.0)
    kept.begin(key(), 0.0)
    kept.end(key(), KeptAnswer(), 0.0)
    assert kept.size == ENTRY
    with pytest.raises(IdempotencyKeyReused):
        kept.begin(key(body=b"[]"), 1.0)
    assert kept.begin(key(), 1.0) is None
    with pytest.raises(IdempotencyInProgress):
        kept.begin(key(), 1.0)


def test_answers_are_kept_for_a_while_and_requests_under_way_until_their_end() -> None:
    kept = KeptAnswers(bytes_max=1 << 20, kept_s=60.0)
    kept.begin(key("slow"), 0.0)
    keep(kept, key("one"), 10, 1.0)
    keep(kept, key("two"), 10, 31.0)
    assert kept.begin(key("one"), 60.0) is not None
    assert kept.begin(key("two"), 62.0) is not None
    assert kept.size == 2 * ENTRY + 10
    assert kept.begin(key("one"), 62.0) is None
    with pytest.raises(IdempotencyInProgress):
        kept.begin(key("slow"), 1e6)


def test_the_tenant_that_has_most_gives_way_its_oldest_first() -> None:
    kept = KeptAnswers(bytes_max=10 * (ENTRY + 100), kept_s=60.0)
    keep(kept, key("mine", tenant="ann"), 100)
    for number in range(30):
        keep(kept, key(f"k{number}", tenant="bob"), 100, float(number) / 100)
        assert kept.size <= kept.bytes_max
    assert kept.begin(key("mine", tenant="ann"), 1.0) is not None
    assert kept.begin(key("k29", tenant="bob"), 1.0) is not None
    assert kept.begin(key("k20", tenant="bob"), 1.0) is None


def test_an_answer_that_is_larger_than_all_room_is_not_kept() -> None:
    kept = KeptAnswers(bytes_max=1000, kept_s=60.0)
    keep(kept, key(), 2000)
    assert kept.size == 0


def test_requests_under_way_are_never_given_up_for_room() -> None:
    kept = KeptAnswers(bytes_max=ENTRY, kept_s=60.0)
    for number in range(3):
        kept.begin(key(f"k{number}"), 0.0)
    kept.end(key("k0"), answer(1), 1.0)
    with pytest.raises(IdempotencyInProgress):
        kept.begin(key("k1"), 1.0)
