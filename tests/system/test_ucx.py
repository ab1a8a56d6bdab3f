"""A conversation whose KV goes over UCX: from prefill to decode, to the kvstore and back, and to the pool
that decode borrows from."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack.plan import Place
from devstack.rest import Piece
from tests.system.by_hand import ByHand
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack, blocks_of
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Not by importing it, which sets variables for all that this process starts.
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs the extra ucx"),
]

SERVICES = ("ledger", "kvstore", "prefill", "decode", "attention_pool", "router")
# No other test asks the shared stack for this, and so both stacks have nothing of it in their caches.
TURNS = ("My heron is called Ulla. Tell me a story about her.", "What is my heron called?")
ANSWER = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
# Decode has room for less than the conversation takes: the rest lies on the pool. Loads are made however long
# they take: to connect UCX takes longer than to compute so short a prompt.
TABLES = {
    **FLOAT32,
    "prefill": {**FLOAT32["prefill"], "loads": "always"},
    "decode": {**FLOAT32["decode"], "capacity_tokens": 128},
}
READY_S_MAX = 60.0


class UcxPlace(Place):
    def transport(self, name: str) -> str:
        return "ucx:127.0.0.1:0"


@pytest.fixture
def over_ucx(tmp_path: Path) -> Iterator[ByHand]:
    stack = ByHand(tmp_path, place=UcxPlace, tables=TABLES)
    try:
        for name in ("etcd", *SERVICES):
            stack.start(name)
        wait_until(stack.client.healthy, "the stack is not healthy", within_s=READY_S_MAX)
        yield stack
    finally:
        stack.end()


def test_a_conversation_over_ucx(over_ucx: ByHand, stack: Stack) -> None:
    """Its tokens are those of a stack of shared memory, and its second turn finds the first one's KV."""
    lent = 0
    for number, message in enumerate(TURNS):
        expected = stack.client.say(message, "over-shm", **ANSWER)
        pieces = []
        for part in over_ucx.client.chat(message, "over-ucx", **ANSWER):
            if isinstance(part, Piece):
                pieces.append(part.text)
                lent = max(lent, blocks_of("attention_pool", over_ucx.place.control("attention_pool")).lent)
            else:
                assert part.cached_tokens == expected.cached_tokens
                assert bool(part.cached_tokens) == bool(number)
        assert "".join(pieces) == expected.text
    assert lent > 0
