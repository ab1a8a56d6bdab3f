"""Services die and pause at random under sessions that go on: each turn gives the very tokens of an
undisturbed run, or a clear error and no trace of itself."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from devstack.rest import RestClient, Turn
from kvcommons.errors import Conflict, KVCommonsError, Overloaded, SessionNotFound, Unavailable
from tests.fault.conftest import TWINS
from tests.fault.refusals import wrong_with
from tests.fault.streams import SAMPLINGS, stream, token_ids, until_whole
from tests.machine import scaled
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SEED = int(os.environ.get("KVCOMMONS_TEST_SEED", "20261121"))
CHAOS_S = 60.0
WORKERS = 4
TURNS = 4
LEASE_MS = 4000
CALL_S_MAX = 60.0
MESSAGE = "My cat is called Zuzu and my brother is called Benno. Tell me a long story about them."
MESSAGES = ["My cat is called Zuzu.", "I have a green house.", "What is my cat called?", "Tell me a story."]
# While a part is gone for good, or an id is taken by the turn that broke: all else would be a fault.
CLEAR = (Unavailable, Overloaded, Conflict)
TABLES = {
    **{name: {**table, "capacity_tokens": 8192} for name, table in FLOAT32.items()},
    # A stream's worth at each decode instance: what is more is borrowed.
    "decode": {**FLOAT32["decode"], "capacity_tokens": 512},
    "kvstore": {"dram_bytes": 8 << 20},
    "router": {"lease_ms": LEASE_MS, "stall_s": 5.0, "request_deadline_s": CALL_S_MAX - 10},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    shared = Stack(tmp_path_factory.mktemp("chaos"), tables=TABLES, **TWINS)
    with shared:
        yield shared
    shared.assert_gone()


@pytest.fixture(autouse=True)
def whole(stack: Stack) -> Iterator[None]:
    yield
    until_whole(stack, {**TWINS, "kvstore": 1, "router": 1})
    stack.assert_no_block_is_held(20)


@pytest.fixture(scope="module")
def calm(stack: Stack) -> tuple[str, list[int]]:
    turn, _ = stream(stack, "calm", MESSAGE, reuse=False, **SAMPLINGS["sampled"])
    return turn.text, token_ids(stack, "calm")


def pids(stack: Stack, *services: str) -> dict[str, int]:
    return {process.name: process.pid for process in stack.processes() if process.name.startswith(services)}


@contextlib.contextmanager
def paused(found: dict[str, int], wait_s: float) -> Iterator[None]:
    """Until `wait_s` later, scaled, whatever is done meanwhile."""
    for pid in found.values():
        os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(scaled(wait_s), _go_on, [found])
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _go_on(found: dict[str, int]) -> None:
    for pid in found.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("service", ["prefill", "decode", "attention_pool", "kvstore", "ledger", "etcd"])
@pytest.mark.parametrize("pause_s", [2.0, 8.0])
def test_a_pause_in_mid_stream_changes_no_token(
    stack: Stack, calm: tuple[str, list[int]], service: str, pause_s: float
) -> None:
    """Shorter than what is taken for a death, and longer: who comes back is not listened to any more."""
    session = f"paused-{service}-{pause_s:g}"
    found = pids(stack, service)
    with contextlib.ExitStack() as pauses:

        def pause() -> None:
            # Of both decode instances one may go on: whichever of them has the stream, it stops once.
            victims = dict(list(found.items())[:1]) if service == "decode" and pause_s > 5 else found
            pauses.enter_context(paused(victims, pause_s))

        turn, _ = stream(stack, session, MESSAGE, pause, **SAMPLINGS["sampled"])
    assert (turn.text, token_ids(stack, session)) == calm


def test_the_router_dies_in_mid_stream(stack: Stack, calm: tuple[str, list[int]]) -> None:
    """The client sees a broken connection, the session no turn; it is free again within the lease's time."""
    stack.client.say("Hello.", "orphan", max_tokens=4)
    before = token_ids(stack, "orphan")
    with pytest.raises(Unavailable):
        stream(stack, "orphan", MESSAGE, lambda: stack.kill("router"))
    stack.until(stack.client.healthy, 20, "the router does not come back")
    assert token_ids(stack, "orphan") == before
    began_s = time.monotonic()
    stack.until(lambda: _free(stack, "orphan"), LEASE_MS / 1000 + 5, "the session stays taken")
    assert time.monotonic() - began_s < scaled(LEASE_MS / 1000 + 2)
    turn, _ = stream(stack, "after-the-router", MESSAGE, **SAMPLINGS["sampled"])
    assert (turn.text, token_ids(stack, "after-the-router")) == calm


def _free(stack: Stack, session: str) -> bool:
    try:
        stack.client.say("Hello again.", session, max_tokens=4)
    except Conflict:
        return False
    return True


@pytest.mark.parametrize(
    "pair", [("decode", "kvstore"), ("prefill", "decode"), ("kvstore", "etcd")], ids="-".join
)
def test_two_deaths_at_once(stack: Stack, calm: tuple[str, list[int]], pair: tuple[str, str]) -> None:
    session = f"two-{'-'.join(pair)}"

    def kill_both() -> None:
        for service in pair:
            os.kill(next(iter(pids(stack, service).values())), signal.SIGKILL)

    turn, _ = stream(stack, session, MESSAGE, kill_both, **SAMPLINGS["sampled"])
    assert (turn.text, token_ids(stack, session)) == calm


def test_the_kvstore_dies_while_it_commits(stack: Stack) -> None:
    """At any moment of the commit: a turn that was answered is there once, and all that were before it."""
    dice = random.Random(SEED)
    expected: list[int] = []
    for number in range(5):
        parts = stack.client.chat(f"This is message {number}.", "commits", max_tokens=20, ignore_eos=True)
        next(parts)  # begun: the stack waits longer before each restart, and only a commit can wait so long
        killer = threading.Timer(dice.uniform(0.0, 0.2), stack.kill, ["kvstore"])
        killer.start()
        try:
            assert isinstance(list(parts)[-1], Turn)
        finally:
            killer.join()
        stack.until(lambda: _readable(stack, "commits"), 20, "the kvstore does not come back")
        found = stack.client.session("commits")
        assert found["version"] == number + 1
        assert found["token_ids"][: len(expected)] == expected
        expected = found["token_ids"]


def _readable(stack: Stack, session: str) -> bool:
    try:
        return bool(stack.client.session(session))
    except Unavailable:
        return False


# ---- at random


@dataclass
class Story:
    """One session, its turns in order, and what the client heard of them."""

    name: str
    seed: int
    texts: list[str | None] = field(default_factory=list)  # None: an error, though the turn was committed
    errors: list[KVCommonsError] = field(default_factory=list)  # the first one of each turn that had any
    slowest_s: float = 0.0

    def turn(self, client: RestClient, session: str, number: int, *, reuse: bool) -> Turn:
        return client.say(
            f"{MESSAGES[number]} ({self.name})",
            session,
            max_tokens=60,
            temperature=0.8,
            seed=self.seed + number,
            reuse=reuse,
            ignore_eos=True,
        )

    def live(self, url: str, give_up_s: float) -> None:
        """All turns, each tried until it is committed."""
        client = RestClient(url, timeout_s=scaled(CALL_S_MAX))
        for number in range(TURNS):
            refused = len(self.errors)
            while len(self.texts) == number:
                try:
                    self.texts.append(self._timed_turn(client, number))
                except CLEAR as error:
                    if len(self.errors) <= refused:
                        self.errors.append(error)
                    assert time.monotonic() < give_up_s, f"{self.name} makes no progress: {self.errors}"
                    time.sleep(0.1)
                    if self._version(client, give_up_s) == number + 1:
                        self.texts.append(None)

    def _timed_turn(self, client: RestClient, number: int) -> str:
        """Without the time that a router or a store takes to come back, which their restarts decide."""
        began_s = time.monotonic()
        try:
            return self.turn(client, self.name, number, reuse=True).text
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    def _version(self, client: RestClient, give_up_s: float) -> int:
        while True:
            try:
                return int(client.session(self.name)["version"])
            except SessionNotFound:
                return 0
            except CLEAR:
                assert time.monotonic() < give_up_s, f"{self.name} cannot be read"
                time.sleep(0.1)


def _disturb(stack: Stack, dice: random.Random, until_s: float) -> list[str]:
    """Kills and pauses, about one a second; what was done. Fewer on a slow machine, on which processes take
    longer to come back: of a stack that is dead nothing could be expected."""
    done = []
    while time.monotonic() < until_s:
        time.sleep(scaled(dice.uniform(0.3, 2.0)))
        alive = {process.name: process.pid for process in stack.processes() if process.name != "up"}
        for name in dice.sample(sorted(alive), min(dice.choice([1, 1, 1, 2]), len(alive))):
            pause_s = dice.choice([0.0, 0.0, dice.uniform(0.2, scaled(4.0))])
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive[name], signal.SIGSTOP if pause_s else signal.SIGKILL)
            if pause_s:
                threading.Timer(pause_s, _go_on, [{name: alive[name]}]).start()
            done.append(f"{name} {f'paused {pause_s:.1f} s' if pause_s else 'killed'}")
    return done


def _work(url: str, stories: list[Story], seed: int, until_s: float, failures: list[BaseException]) -> None:
    number = 0
    try:
        while time.monotonic() < until_s:
            number += 1
            story = Story(name=f"story-{seed}-{number}", seed=seed * 1000 + number * 10)
            stories.append(story)
            story.live(url, until_s + scaled(90))
    except BaseException as error:
        failures.append(error)


def test_chaos(stack: Stack, tmp_path: Path) -> None:
    print(f"replay with KVCOMMONS_TEST_SEED={SEED}")
    stories: list[Story] = []
    failures: list[BaseException] = []
    until_s = time.monotonic() + scaled(CHAOS_S)
    workers = [
        threading.Thread(target=_work, args=(stack.url, stories, SEED % 1000 + number, until_s, failures))
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    done = _disturb(stack, random.Random(SEED), until_s)
    for worker in workers:
        worker.join(scaled(CHAOS_S + 120))
        assert not worker.is_alive()
    print("; ".join(done))
    refused = [error for story in stories for error in story.errors]
    print(Counter(f"{error.code}: {error.message[:80]}" for error in refused))
    assert not failures, failures
    until_whole(stack, {**TWINS, "kvstore": 1, "router": 1}, 40)
    stack.assert_no_block_is_held(20)
    assert len(stories) >= WORKERS
    assert wrong_with(refused, [one.split()[0] for one in done], WORKERS) == []
    assert max(story.slowest_s for story in stories) < scaled(CALL_S_MAX)
    for story in stories:
        _hold_to_a_calm_run(stack, story)


def _hold_to_a_calm_run(stack: Stack, story: Story) -> None:
    session = f"calm-{story.name}"
    for number, text in enumerate(story.texts):
        calm = story.turn(stack.client, session, number, reuse=False)
        assert text in (None, calm.text), (story.name, number)
    assert token_ids(stack, story.name) == token_ids(stack, session), story.name
    assert stack.client.session(story.name)["version"] == TURNS
