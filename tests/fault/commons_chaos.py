"""A stack whose instances borrow from each other, under load, while its processes are killed and paused.

    python -m tests.fault.commons_chaos --faults 60 --seconds 600 --seed 7 --folder /tmp/chaos

Every stream has to be the very text of an undisturbed instance, or to end with a clear error after a part of
it. The seed decides who is hit, when and how, and what is asked; how that falls in time is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devstack.rest import Piece, RestClient, Turn
from kvcommons.errors import KVCommonsError
from tests.fault.refusals import wrong_with
from tests.fault.streams import NEVER_ENDS, until_whole
from tests.machine import scaled
from tests.simulation.commons_history import History, replayed
from tests.system.scrape import scrape
from tests.system.stack import Stack

HOLDERS = ("decode", "attention_pool")
INSTANCES = {"prefill": 1, "decode": 3, "attention_pool": 1, "ledger": 2}
WORKERS = 5
PROMPTS = 12
CALL_S_MAX = 60.0
QUIET_S = 40.0  # until all is back: leases run out, settlements end, who was killed has loaded its model
BLOCK_TOKENS = 16
FLOAT32 = {"dtype": "float32", "block_tokens": BLOCK_TOKENS}
# A sequence is larger than what its decode instance has left beside others: it lies at its neighbours too,
# and the one pool is small.
TABLES: dict[str, dict[str, Any]] = {
    "prefill": {**FLOAT32, "capacity_tokens": 8192},
    "decode": {
        **FLOAT32,
        "capacity_tokens": 20 * BLOCK_TOKENS,
        "lend_share": 0.6,
        "borrow_blocks": 2,
        "lease_ms": 3000,
    },
    "attention_pool": {**FLOAT32, "capacity_tokens": 16 * BLOCK_TOKENS},
    "kvstore": {"dram_bytes": 8 << 20},
    "ledger": {
        "heartbeat_ms": 300,
        "settle_threshold_blocks": 1,
        "settle_round_blocks": 2,
        "settle_every_s": 0.3,
    },
    "router": {"stall_s": 5.0, "request_deadline_s": CALL_S_MAX - 10, "resume_deadline_s": 30.0},
    "up": {"log_bytes": 64 << 20},
}


@dataclass(frozen=True, slots=True)
class Prompt:
    number: int
    text: str
    max_tokens: int

    @classmethod
    def drawn(cls, dice: random.Random, number: int) -> Prompt:
        """Of 30 to 350 tokens or so; the answer of as many."""
        facts = [
            f"My {who} is called {name}."
            for who, name in zip(
                dice.choices(("cat", "dog", "brother", "sister", "friend", "horse"), k=28),
                dice.choices(("Zuzu", "Benno", "Mila", "Otto", "Rosa", "Pablo"), k=28),
                strict=True,
            )
        ]
        text = " ".join(facts[: dice.randint(1, 28)])
        return cls(number, f"{text} Tell me a story of number {number}.", dice.randint(60, 220))

    def parameters(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": 0.0, **NEVER_ENDS}


@dataclass
class Story:
    """What became of one request."""

    prompt: Prompt
    text: str
    error: KVCommonsError | None
    took_s: float


@dataclass
class Chaos:
    """Answers, and what was wrong with them."""

    expected: dict[int, str]
    stories: list[Story] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)  # whom each of them hit
    broken: list[BaseException] = field(default_factory=list)
    history: History = field(default_factory=History)

    def wrong(self) -> list[str]:
        """A whole answer is the expected one, a part of one its beginning; an error comes in time, for a
        known reason, and no oftener than the faults explain."""
        found = [f"{error!r}" for error in self.broken]
        found += wrong_with(
            [story.error for story in self.stories if story.error is not None], self.struck, WORKERS
        )
        for story in self.stories:
            expected = self.expected[story.prompt.number]
            if story.error is None and story.text != expected:
                found.append(f"prompt {story.prompt.number}: {story.text!r} is not {expected!r}")
            elif not expected.startswith(story.text):
                found.append(f"prompt {story.prompt.number}: {story.text!r} does not begin {expected!r}")
            if story.took_s > scaled(CALL_S_MAX):
                found.append(f"prompt {story.prompt.number} took {story.took_s:.1f} s")
        return found

    @property
    def exact(self) -> int:
        return sum(story.error is None for story in self.stories)

    def reported(self) -> str:
        errors = Counter(
            f"{type(story.error).__name__}: {story.error.message[:70]}"
            for story in self.stories
            if story.error is not None
        )
        lines = [*self.faults, f"{self.exact} of {len(self.stories)} answers are whole"]
        lines.append(", ".join(f"{count} {event}" for event, count in self.history.seen.most_common()))
        return "\n".join([*lines, *(f"{count} times {error}" for error, count in errors.most_common())])


def answers(folder: Path, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Of one instance with room for everything, one prompt after the other."""
    tables = {**TABLES, "decode": {**FLOAT32, "capacity_tokens": 8192, "placement": "local"}}
    with Stack(folder, tables=tables, attention_pool=0) as stack:
        return {
            prompt.number: stack.client.say(prompt.text, None, reuse=False, **prompt.parameters()).text
            for prompt in prompts
        }


class Load:
    """Asks for one answer after the other, several at once, until stopped."""

    def __init__(self, url: str, prompts: Sequence[Prompt], seed: int, chaos: Chaos) -> None:
        self._url = url
        self._prompts = prompts
        self._chaos = chaos
        self._stop = threading.Event()
        self._workers = [
            threading.Thread(target=self._work, args=(random.Random(seed * 100 + number),))
            for number in range(WORKERS)
        ]

    def __enter__(self) -> Load:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for worker in self._workers:
            worker.join(scaled(CALL_S_MAX + 30))
            if worker.is_alive():
                self._chaos.broken.append(AssertionError("an answer never ends"))

    def _work(self, dice: random.Random) -> None:
        client = RestClient(self._url, timeout_s=scaled(CALL_S_MAX))
        try:
            while not self._stop.is_set():
                story = self._ask(client, dice.choice(self._prompts), reuse=dice.random() < 0.5)
                self._chaos.stories.append(story)
                while story.error is not None and not self._stop.wait(0.2) and not client.healthy():
                    pass  # a stream that finds no router is none
        except BaseException as error:
            self._chaos.broken.append(error)

    def _ask(self, client: RestClient, prompt: Prompt, *, reuse: bool) -> Story:
        texts: list[str] = []
        began_s = time.monotonic()
        failed: KVCommonsError | None = None
        try:
            for part in client.chat(prompt.text, None, reuse=reuse, **prompt.parameters()):
                if isinstance(part, Piece):
                    texts.append(part.text)
                elif isinstance(part, Turn) and part.finish_reason != "length":
                    failed = KVCommonsError(f"an answer ended with {part.finish_reason!r}")
        except KVCommonsError as error:
            failed = error
        return Story(prompt, "".join(texts), failed, time.monotonic() - began_s)


class Troubles:
    """Kills, pauses shorter and longer than leases and deadlines, and processes that are slow for a while; a
    death is followed by a restart (the stack's), a pause by going on."""

    def __init__(self, stack: Stack, dice: random.Random, chaos: Chaos) -> None:
        self._stack = stack
        self._dice = dice
        self._chaos = chaos
        self._timers: list[threading.Timer] = []
        self._began_s = time.monotonic()

    def run(self, faults: int, seconds: float) -> None:
        """So many over this time."""
        every_s = seconds / faults
        for number in range(faults):
            self._wait_until(every_s * (number + self._dice.random()))
            self._strike()
        self._wait_until(seconds)
        for timer in self._timers:
            timer.join()

    def _wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, self._began_s + at_s - time.monotonic()))

    def _strike(self) -> None:
        dice = self._dice
        alive = {one.name: one.pid for one in self._stack.processes() if one.name != "up"}
        # Those that hold KV are hit as often as all others together.
        holders = [name for name in sorted(alive) if name.startswith(("decode", "attention_pool"))]
        others = [name for name in sorted(alive) if name not in holders]
        among, kind, pause_s = dice.random() < 0.5, dice.random(), dice.choice((0.5, 1.5, 4.0, 9.0))
        name = dice.choice((holders if among else others) or sorted(alive))
        self._chaos.struck.append(name)
        pause_s = scaled(pause_s)  # as long as leases and deadlines are
        pid = alive[name]
        if kind < 0.45:
            what = "killed"
            _send(pid, signal.SIGKILL)
        elif kind < 0.6:
            what = f"slow for {pause_s} s"
            self._later(0.0, lambda: _slow(pid, pause_s))
        else:
            last = signal.SIGCONT if kind < 0.9 else signal.SIGKILL
            what = f"paused for {pause_s} s" + (", then killed" * (kind >= 0.9))
            _send(pid, signal.SIGSTOP)
            self._later(pause_s, lambda: _send(pid, last))
        self._chaos.faults.append(f"{time.monotonic() - self._began_s:6.1f} s: {name} {what}")

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.start()
        self._timers.append(timer)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _slow(pid: int, seconds: float) -> None:
    """It runs for a fraction of the time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for number, wait_s in ((signal.SIGSTOP, 0.08), (signal.SIGCONT, 0.02)):
            _send(pid, number)
            time.sleep(wait_s)


def run(folder: Path, *, faults: int, seconds: float, seed: int) -> Chaos:
    """Raises Unavailable where blocks do not come back or the stack does not recover."""
    events = folder / "events"
    tables = {**TABLES, **{name: {**TABLES[name], "event_log": str(events)} for name in HOLDERS}}
    dice = random.Random(seed)
    prompts = [Prompt.drawn(dice, number) for number in range(PROMPTS)]
    chaos = Chaos(answers(folder / "calm", prompts))
    stack = Stack(folder / "chaos", tables=tables, **INSTANCES)
    with stack:
        with Load(stack.url, prompts, seed, chaos):
            Troubles(stack, dice, chaos).run(faults, seconds)
            until_whole(stack, {**INSTANCES, "kvstore": 1, "router": 1}, QUIET_S)
            # Under load they agree between two changes.
            stack.until(lambda: _books_agree(stack) > 0, QUIET_S, "the ledgers do not know what is lent")
        stack.assert_no_block_is_held(QUIET_S)
        stack.until(lambda: _books_agree(stack) == 0, QUIET_S, "the ledgers know of debts that are none")
        holders = sum(INSTANCES[name] for name in HOLDERS)
        stack.until(lambda: len(_known(stack)) == holders, QUIET_S, "who was killed is still known")
        chaos.history = replayed(events)
        chaos.history.rest(_known(stack), idle=True)
    stack.assert_gone()
    return chaos


def _books_agree(stack: Stack) -> int:
    """Blocks that are lent, where all ledgers say so too; else less than none."""
    names = [process.name for process in stack.processes()]
    lent = sum(stack.blocks(name).lent for name in names if name.startswith(HOLDERS))
    owed = {
        scrape(stack, name).value("kvcommons_ledger_debt_blocks")
        for name in names
        if name.startswith("ledger")
    }
    return lent if owed == {lent} else -1


def _known(stack: Stack) -> list[str]:
    """The ids of those that hold KV; of one that was killed, too, until its lease is over."""
    found = stack.client.get("/v1/status")["instances"]
    return [str(one["id"]) for one in found if one["service"] in HOLDERS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for data and logs")
    options = parser.parse_args(arguments)
    chaos = run(options.folder, faults=options.faults, seconds=options.seconds, seed=options.seed)
    print(chaos.reported())
    wrong = chaos.wrong()
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
