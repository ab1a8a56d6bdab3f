from __future__ import annotations

import pytest

from services.router.admission.shares import TenantShares


def test_who_has_had_more_is_ahead_by_what_the_others_lack() -> None:
    shares = TenantShares()
    for tenant in ("ann", "bob", "eve"):
        shares.join(tenant)
    shares.use("ann", 4.0)
    shares.use("bob", 1.0)
    assert [shares.delay_s(tenant, 0.0) for tenant in ("ann", "bob", "eve")] == [12.0, 3.0, 0.0]
    shares.leave("eve")
    assert [shares.delay_s(tenant, 0.0) for tenant in ("ann", "bob")] == [6.0, 0.0]
    shares.use("ann", -4.0)  # it was charged too much
    assert [shares.delay_s(tenant, 0.0) for tenant in ("ann", "bob")] == [0.0, 2.0]


def test_nobody_saves_up_by_staying_away_nor_pays_for_having_been_alone() -> None:
    shares = TenantShares()
    shares.join("ann")
    shares.use("ann", 1000.0)
    assert shares.delay_s("ann", 0.0) == 0.0
    shares.join("bob")
    assert (shares.delay_s("ann", 0.0), shares.delay_s("bob", 0.0)) == (0.0, 0.0)
    shares.use("bob", 5.0)
    shares.leave("bob")
    shares.join("bob")
    assert shares.delay_s("bob", 0.0) == pytest.approx(10.0), "nor is what it had forgotten while others wait"
    shares.leave("bob")
    shares.leave("ann")
    shares.join("bob")
    shares.join("ann")
    assert (shares.delay_s("ann", 0.0), shares.delay_s("bob", 0.0)) == (0.0, 0.0), (
        "all were content meanwhile"
    )


def test_what_a_tenants_requests_wait_for_each_other_is_its_own() -> None:
    shares = TenantShares()
    for tenant in ("ann", "bob"):
        shares.join(tenant)
    assert shares.delay_s("ann", oldest_s=3.0) == 0.0, "none has started"
    shares.start("ann", 0.0, now_s=10.0)
    assert shares.delay_s("ann", oldest_s=3.0) == 7.0
    assert shares.delay_s("ann", oldest_s=12.0) == 0.0, "it came later"
    assert shares.delay_s("bob", oldest_s=3.0) == 0.0
