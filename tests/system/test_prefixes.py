"""Prefixes on a real stack: whoever begins alike shares, whatever the call, and nobody across tenants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from devstack.rest import RestClient, Turn
from tests.system.conftest import FLOAT32, LOADS
from tests.system.scrape import scrape
from tests.system.stack import Stack

BLOCK_TOKENS = 16  # of the demo model
TEXT = " ".join(f"Remark {number}: the cat of house {number} sleeps by the mill." for number in range(24))


def say(client: RestClient, text: str, session: str | None) -> Turn:
    return client.say(text, session, max_tokens=4, temperature=0.0, ignore_eos=True)


def waiting(client: RestClient) -> int:
    found: int = client.get("/v1/status")["queue"]["waiting"]
    return found


def full(turn: Turn) -> int:
    """What a repetition of its prompt can reuse."""
    return (turn.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Alice and Bob have keys. One job runs at a time, and prefill has room for one long prefix."""
    folder = tmp_path_factory.mktemp("keyed")
    keys, secret = folder / "keys", folder / "secret"
    keys.write_text("alice key-of-alice operator\nbob key-of-bob\n")
    secret.write_bytes(b"sixteen bytes or more of secret")
    router = {
        "api_keys": str(keys), "secret_file": str(secret), "policy": "bounded_fpf", "max_running": 1,
    }  # fmt: skip
    room = {**FLOAT32["prefill"], **LOADS, "capacity_tokens": 24 * BLOCK_TOKENS}
    stack = Stack(folder, tables={**FLOAT32, "prefill": room, "router": router}, attention_pool=0)
    with stack:
        yield stack
    stack.assert_gone()


def test_requests_sessions_and_forks_share_and_tenants_do_not(keyed: Stack) -> None:
    alice = RestClient(keyed.url, api_key="key-of-alice")
    bob = RestClient(keyed.url, api_key="key-of-bob")
    cold = say(alice, TEXT, None)
    assert cold.cached_tokens == 0
    assert full(cold) >= 4 * BLOCK_TOKENS
    keyed.until(
        lambda: not scrape(keyed, "kvstore").value("kvcommons_block_pending_writes"), 10.0, "not saved"
    )

    # Another tenant's store calls, device hits and answer are those of a text that nobody ever had.
    before = scrape(keyed, "kvstore")
    foreign = say(bob, TEXT, None)
    after = scrape(keyed, "kvstore")
    assert (foreign.cached_tokens, foreign.timings["device_tokens"]) == (0, 0)
    for tier in ("dram", "disk"):
        name = "kvcommons_block_hits_total"
        assert after.value(name, tier=tier) == before.value(name, tier=tier)
    assert foreign.text == cold.text  # greedy, in float32: the same tokens, computed twice

    # Stateless, in a session, in its fork, and in part: each finds what the others left.
    assert say(alice, TEXT, None).cached_tokens == full(cold)
    assert say(alice, TEXT, "s").cached_tokens == full(cold)
    alice.post("/v1/sessions/s/fork", {"id": "f"})
    left, right = say(alice, "Who sleeps?", "s"), say(alice, "Where is the mill?", "f")
    assert left.cached_tokens >= full(cold)
    assert right.cached_tokens >= full(cold)
    part = say(alice, TEXT[: len(TEXT) // 2] + "And then?", None)
    assert 0 < part.cached_tokens <= full(cold) // 2 + BLOCK_TOKENS

    # A session that is deleted takes nothing from those that share with it.
    alice.delete_session("s")
    assert say(alice, "And who is awake?", "f").cached_tokens >= full(right)
    assert say(bob, TEXT, None).cached_tokens == full(cold)  # his own by now


def test_the_order_of_the_queue_reaches_the_memory_of_prefill(keyed: Stack) -> None:
    """Two prefixes by turns, and room for one: first come, first served finds none of them there. By groups,
    each is brought there once, for all that wait for it."""
    rng = random.Random(7)
    prefixes = [[rng.randrange(100, 1000) for _ in range(16 * BLOCK_TOKENS)] for _ in range(2)]
    prompts = [[*prefixes[number % 2], 100 + number] for number in range(6)]
    client = RestClient(keyed.url, api_key="key-of-alice")
    with ThreadPoolExecutor(max_workers=len(prompts) + 1) as pool:
        long = pool.submit(client.say, "Tell me a story.", None, max_tokens=1500, ignore_eos=True)
        keyed.until(lambda: client.get("/v1/status")["queue"]["running"] == 1, 5.0, "nothing runs")
        answers = []
        for prompt in prompts:  # one after the other, so that they come by turns
            answers.append(pool.submit(client.complete, prompt, max_tokens=1, ignore_eos=True))
            keyed.until(lambda: waiting(client) == len(answers), 5.0, "not queued")
        assert not long.done(), "the queue moved before all had come"
        reported = [answer.result() for answer in answers]
    found = [timings["device_tokens"] for _, timings in reported]
    whole = 16 * BLOCK_TOKENS
    assert found == [0, 0, whole, whole, whole, whole]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage, _ in reported] == found
