"""The router's settings beside the bounds of who carries them out."""

from __future__ import annotations

import pytest

from kvcommons.config import load
from kvcommons.errors import InvalidInput
from services.kvstore.turn_lease import LEASE_MS_MAX
from services.router.config import RouterConfig

FLAGS = {"listen": "unix:/tmp/r.sock", "ledger": "unix:/tmp/l.sock", "model": "demo"}


def configured(lease_ms: int) -> RouterConfig:
    return load("router", RouterConfig, environ={}, flags={**FLAGS, "lease_ms": str(lease_ms)})


def test_a_turns_lease_is_one_that_the_kvstore_grants() -> None:
    """With a longer one every turn of a session would be refused."""
    assert configured(LEASE_MS_MAX).lease_ms == LEASE_MS_MAX
    for lease_ms in (0, LEASE_MS_MAX + 1):
        with pytest.raises(InvalidInput, match="lease_ms"):
            configured(lease_ms)
