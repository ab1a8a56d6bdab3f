"""Keys, tenants, salts."""

from __future__ import annotations

import pytest

from kvcommons.errors import InvalidInput, Unauthenticated
from services.router.http.tenants import Tenants, parse_keys

KEYS = {"key-of-ann": "ann", "key-of-bob": "bob", "other-of-ann": "ann"}


def test_keys_name_tenants_and_salts_differ() -> None:
    tenants = Tenants(KEYS, b"secret")
    ann = tenants.authenticate("Bearer key-of-ann")
    bob = tenants.authenticate("bearer  key-of-bob ")
    assert (ann.name, bob.name) == ("ann", "bob")
    assert ann == tenants.authenticate("Bearer other-of-ann")
    assert ann.salt != bob.salt
    assert Tenants(KEYS, b"another").authenticate("Bearer key-of-ann").salt != ann.salt


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


def test_the_file_of_keys() -> None:
    text = "# comment\n\nann key-of-ann\n  bob   key-of-bob\n"
    assert parse_keys(text, "keys") == {"key-of-ann": "ann", "key-of-bob": "bob"}
    for bad, says in (
        ("ann", "line 1"),
        ("ann short", "8 characters"),
        ("an/n key-of-ann", "name"),
        ("ann key-of-ann\nbob key-of-ann", "line 2"),
        ("# nothing", "no keys"),
    ):
        with pytest.raises(InvalidInput, match=says) as refused:
            parse_keys(bad, "keys")
        assert "key-of" not in refused.value.message
