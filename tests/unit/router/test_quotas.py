"""Quotas of tenants: rates, their overdrafts, and a share of the queue. The time is the test's."""

from __future__ import annotations

import pytest

from kvcommons.errors import QuotaExceeded
from services.router.admission.queue import RequestQueue
from services.router.admission.quotas import Quota, Quotas, Rate
from services.router.admission.scheduling import Promise

ANN, BOB = "ann", "bob"


def test_a_minutes_worth_and_then_as_it_comes_in() -> None:
    quotas = Quotas({ANN: Quota(requests_per_minute=3)})
    for _ in range(3):
        quotas.admit(ANN, 100.0)
    with pytest.raises(QuotaExceeded, match="3 requests a minute") as refused:
        quotas.admit(ANN, 100.0)
    assert 19_000 <= refused.value.retry_after_ms <= 20_001
    quotas.admit(ANN, 100.0 + refused.value.retry_after_ms / 1000)
    with pytest.raises(QuotaExceeded):
        quotas.admit(ANN, 121.0)
    for _ in range(1000):
        quotas.admit(BOB, 100.0)  # nobody's quota but hers
    usage, left, _ = quotas.usage(ANN, 121.0)
    assert (usage.requests, usage.refused, left) == (4, 2, 0)


def test_others_have_one_each() -> None:
    quotas = Quotas({"*": Quota(requests_per_minute=1), ANN: Quota(requests_per_minute=2)})
    for tenant in (ANN, ANN, BOB, "eve"):
        quotas.admit(tenant, 0.0)
    for tenant in (ANN, BOB, "eve"):
        with pytest.raises(QuotaExceeded):
            quotas.admit(tenant, 0.0)


def test_tokens_are_reserved_and_what_was_cached_is_given_back() -> None:
    quotas = Quotas({ANN: Quota(tokens_per_minute=1000)})
    quotas.admit(ANN, 0.0)
    first = quotas.reserve(ANN, 900, 0.0)
    quotas.admit(ANN, 0.0)
    second = quotas.reserve(ANN, 900, 0.0)  # overdrawn, by one prompt at most for each that is let in
    with pytest.raises(QuotaExceeded, match="tokens") as refused:
        quotas.admit(ANN, 0.0)
    assert refused.value.retry_after_ms > 48_000
    first.settle(prompt=900, cached=880, completion=10, now_s=0.0)
    first.settle(prompt=900, cached=880, completion=10, now_s=0.0)  # once
    quotas.admit(ANN, 0.0)
    second.settle(prompt=0, cached=0, completion=0, now_s=0.0)  # its client went away before a token
    usage, _, left = quotas.usage(ANN, 0.0)
    assert left == 970
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (900, 880, 10)


def test_nothing_is_saved_up_beyond_a_minute_and_a_clock_that_jumps_back_takes_nothing() -> None:
    rate = Rate(60, 1000.0)
    assert rate.left(5000.0) == 60
    rate.use(60, 5000.0)
    assert rate.left(4000.0) == 0
    assert rate.left(4010.0) == 10
    rate.use(-500, 4010.0)
    assert rate.left(4010.0) == 60


def queue(share: float) -> RequestQueue:
    return RequestQueue(max_running=1, max_waiting=8, share=lambda tenant: share if tenant == ANN else 1.0)


def test_one_tenant_leaves_room_in_the_queue_for_others() -> None:
    made = queue(0.5)

    def submit(tenant: str, cost: int = 1) -> None:
        made.submit(cost=cost, now_s=0.0, deadline_s=99.0, promise=Promise(tenant=tenant))

    for _ in range(5):
        submit(ANN)  # one runs, and four wait
    with pytest.raises(QuotaExceeded, match="4 requests of the tenant 'ann' wait") as refused:
        submit(ANN)
    assert refused.value.retry_after_ms >= 1000
    for _ in range(4):
        submit(BOB)
    assert (made.running, made.waiting) == (1, 8)


def test_one_request_may_wait_however_small_the_share() -> None:
    made = queue(0.01)
    for _ in range(2):
        made.submit(cost=1, now_s=0.0, deadline_s=99.0, promise=Promise(tenant=ANN))
    assert made.waiting == 1
    with pytest.raises(QuotaExceeded):
        made.submit(cost=1, now_s=0.0, deadline_s=99.0, promise=Promise(tenant=ANN))
