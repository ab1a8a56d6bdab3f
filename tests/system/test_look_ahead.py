"""After a restart, what waits in the router's queue is in the kvstore's DRAM when its turn comes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.conftest import FLOAT32
from tests.system.scrape import scrape
from tests.system.stack import Stack

SESSIONS = [f"session-{number}" for number in range(6)]


@pytest.mark.slow
def test_queued_sessions_are_served_from_dram_after_a_restart(tmp_path: Path) -> None:
    """One job runs at a time. While a long one does, six sessions queue up whose KV is on disk."""
    stack = Stack(tmp_path, tables={**FLOAT32, "router": {"max_running": 1, "policy": "bounded_fpf"}})
    with stack:
        before = [stack.client.say("My cat is called Zuzu.", name, max_tokens=24) for name in SESSIONS]
        stack.until(
            lambda: stack.client.get("/v1/status")["store"]["pending_writes"] == 0, 5.0, "not on disk"
        )
        stack.kill_all()
        stack.start()
        with ThreadPoolExecutor(max_workers=len(SESSIONS) + 1) as pool:
            long = pool.submit(stack.client.say, "Tell me a story.", None, max_tokens=1500, ignore_eos=True)
            stack.until(lambda: stack.client.get("/v1/status")["queue"]["running"] == 1, 5.0, "nothing runs")
            turns = [
                pool.submit(stack.client.say, "What is my cat called?", name, max_tokens=8)
                for name in SESSIONS
            ]
            stack.until(
                lambda: stack.client.get("/v1/status")["queue"]["waiting"] == len(SESSIONS), 5.0, "not queued"
            )
            fetched_by = time.monotonic() + 5.0
            while not scrape(stack, "kvstore").value("kvcommons_block_prefetched_total"):
                assert not long.done(), "the queue moved before anything was fetched"
                assert time.monotonic() < fetched_by
            assert long.result().completion_tokens == 1500
            after = [turn.result() for turn in turns]
        assert [turn.cached_tokens > 0 for turn in after] == [True] * len(before)
        store = scrape(stack, "kvstore")
        assert store.value("kvcommons_block_hits_total", tier="dram") > 0
        assert store.value("kvcommons_block_hits_total", tier="disk") == 0
    stack.assert_gone()
