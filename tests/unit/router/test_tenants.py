"""Keys, tenants, salts."""

from __future__ import annotations

import pytest

from kvcommons.errors import PermissionDenied, Unauthenticated
from services.router.http.keys import Grant
from services.router.http.tenants import Tenants

KEYS = {
    "key-of-ann": Grant(tenant="ann"),
    "key-of-bob": Grant(tenant="bob"),
    "other-of-ann": Grant(tenant="ann", operator=True),
}


def test_keys_name_tenants_and_salts_differ() -> None:
    tenants = Tenants(KEYS, b"secret")
    ann = tenants.authenticate("Bearer key-of-ann").tenant
    bob = tenants.authenticate("bearer  key-of-bob ").tenant
    assert (ann.name, bob.name) == ("ann", "bob")
    assert ann == tenants.authenticate("Bearer other-of-ann").tenant
    assert ann.salt != bob.salt
    assert Tenants(KEYS, b"another").authenticate("Bearer key-of-ann").tenant.salt != ann.salt


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic key-of-ann", "Bearer key-of-an", "Bearer \udcff\udcfe"]
)
def test_anything_else_is_refused_and_never_repeated(header: str | None) -> None:
    with pytest.raises(Unauthenticated) as refused:
        Tenants(KEYS, b"secret").authenticate(header)
    assert "key-of" not in refused.value.message


def test_without_keys_there_is_one_tenant() -> None:
    tenants = Tenants({}, b"secret")
    assert tenants.open
    assert tenants.authenticate(None) == tenants.authenticate("Bearer whatever")
    tenants.authenticate(None).check_operator("/metrics")


def test_a_tenants_key_is_no_operators() -> None:
    tenants = Tenants(KEYS, b"secret")
    with pytest.raises(PermissionDenied, match=r"'ann'.*operator") as refused:
        tenants.authenticate("Bearer key-of-ann").check_operator("/metrics")
    assert "key-of" not in refused.value.message
    tenants.authenticate("Bearer other-of-ann").check_operator("/metrics")


def test_keys_are_given_and_taken_back() -> None:
    tenants = Tenants(KEYS, b"secret")
    ann = tenants.authenticate("Bearer key-of-ann").tenant
    tenants.set_keys({"new-key-of-ann": Grant(tenant="ann"), "key-of-eve": Grant(tenant="eve")})
    assert tenants.authenticate("Bearer new-key-of-ann").tenant == ann  # her KV is found again
    assert tenants.named("bob") is None
    for key in ("key-of-ann", "key-of-bob", "other-of-ann"):
        with pytest.raises(Unauthenticated):
            tenants.authenticate(f"Bearer {key}")
