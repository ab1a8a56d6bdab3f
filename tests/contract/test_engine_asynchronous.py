"""The engines compute on a device that does everything late and in memory of its own: the tokens are the
frozen ones, and nobody touches a tensor from the host but by staging it (tests/asynchronous.py)."""

from __future__ import annotations

import json

import pytest

from kvcommons.backend.interface import Backend
from kvcommons.backend.products import Products
from tests.asynchronous import AsynchronousDevice, asynchronous
from tests.contract.engine_stack import Stack
from tests.contract.test_engine_golden import CASES, FROZEN

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


@pytest.mark.parametrize(
    ("engines", "case"),
    [
        ("mistral-sliding", "plain"),
        pytest.param("llama", "reuse", marks=pytest.mark.slow),
        pytest.param("llama", "borrowed", marks=pytest.mark.slow),
        pytest.param("mistral-sliding", "truncated", marks=pytest.mark.slow),
    ],
    indirect=["engines"],
)
async def test_the_tokens_are_the_frozen_ones(
    engines: Stack, case: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[AsynchronousDevice] = []

    def choose(device: str, products: Products = Products.NATIVE) -> Backend:
        backend = asynchronous()
        devices.append(backend.device)
        return backend

    for module in ("kvcommons.engine.core", "services.attention_pool.pool"):
        monkeypatch.setattr(f"{module}.choose", choose)
    tokens = await CASES[case](engines)
    kind = request.node.callspec.params["engines"]
    assert tokens == json.loads((FROZEN / f"{kind}.json").read_text())[case]
    assert len(devices) >= 2
    assert all(device.stream.done > 100 for device in devices), "it was they that computed"
