"""The router's settings beside the bounds of who carries them out."""

from __future__ import annotations

import pytest

from kvcommons.config import load
from kvcommons.errors import InvalidInput
from services.kvstore.turn_lease import LEASE_MS_MAX
from services.router.answer.formats import CALL_FORMATS
from services.router.config import RouterConfig

FLAGS = {"listen": "unix:/tmp/r.sock", "ledger": "unix:/tmp/l.sock", "model": "demo"}


def configured(**flags: object) -> RouterConfig:
    given = {name: str(value) for name, value in flags.items()}
    return load("router", RouterConfig, environ={}, flags=FLAGS | given)


def test_a_turns_lease_is_one_that_the_kvstore_grants() -> None:
    """With a longer one every turn of a session would be refused."""
    assert configured(lease_ms=LEASE_MS_MAX).lease_ms == LEASE_MS_MAX
    for lease_ms in (0, LEASE_MS_MAX + 1):
        with pytest.raises(InvalidInput, match="lease_ms"):
            configured(lease_ms=lease_ms)


def test_a_format_of_calls_is_one_that_there_is() -> None:
    assert configured().tool_format == "auto"
    for name in CALL_FORMATS:
        assert configured(tool_format=name).tool_format == name
    with pytest.raises(InvalidInput, match="'lama3' is none of auto, hermes, llama3,"):
        configured(tool_format="lama3")
