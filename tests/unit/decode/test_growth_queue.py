from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from services.decode.arrival.growth_queue import GrowthQueue

WAIT_S, PAUSE_S = 8.0, 0.1
TRIES = 0.05  # of looks at what is free, those that begin a prompt though there is no room for it


def queue(draw: float = 1.0) -> GrowthQueue:
    return GrowthQueue(wait_s=WAIT_S, draw=lambda: draw)


def test_the_oldest_that_waits_asks_alone() -> None:
    some = queue()
    assert some.may_ask(7)
    some.waits(7, 0.0)
    assert some.any_waits
    assert some.may_ask(7)
    assert not some.may_ask(8)
    assert some.may_ask(5)
    some.waits(5, 1.0)
    assert not some.may_ask(7)
    some.ended(5)
    assert some.may_ask(7)
    some.ended(7)
    assert not some.any_waits


@pytest.mark.parametrize(("draw", "patience_s"), [(1.0, WAIT_S), (0.0, WAIT_S / 2)])
def test_a_younger_one_gives_up_after_a_quarter_of_the_patience(draw: float, patience_s: float) -> None:
    some = queue(draw)
    some.waits(1, 0.0)
    some.waits(2, 0.0)
    some.waits(2, 1.0)  # that it goes on waiting changes nothing
    assert not some.gives_up(2, patience_s / 4 - 0.01)
    assert some.gives_up(2, patience_s / 4)
    assert not some.gives_up(1, patience_s - 0.01)
    assert some.gives_up(1, patience_s)
    some.ended(1)
    assert not some.gives_up(2, patience_s - 0.01), "it is the oldest now"


@dataclass(slots=True)
class Growing:
    """A prompt of the simulation: it takes a block at a time, computes, and gives all back at its end."""

    instance: int
    number: int
    needed: int
    key: int = 0
    held: int = 0
    since_s: float | None = None  # it waits


@dataclass(slots=True)
class Commons:
    """Instances whose prompts grow in one memory, in simulated time."""

    dice: random.Random
    free: int
    instances: list[GrowthQueue]
    now_s: float = 0.0
    keys: int = 0
    ended: int = 0
    promised: int = 0  # blocks that prompts which have begun still want
    given_up: list[tuple[int, bool]] = field(
        default_factory=list
    )  # instance; whether a younger one waited on
    events: list[tuple[float, int, Growing]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def after(self, seconds: float, prompt: Growing) -> None:
        heapq.heappush(self.events, (self.now_s + seconds, next(self.numbers), prompt))

    def run(self) -> None:
        while self.events:
            self.now_s, _, prompt = heapq.heappop(self.events)
            self.advance(prompt)

    def advance(self, prompt: Growing) -> None:
        own = self.instances[prompt.instance]
        if not prompt.key:
            # A router has it wait for room for all of it, or tries at times; decode refuses.
            capacity = self.free - self.promised >= prompt.needed or self.dice.random() < TRIES
            if not capacity or own.any_waits or not self.free:
                self.after(self.dice.uniform(0.05, 0.8), prompt)
                return
            self.keys += 1
            self.promised += prompt.needed
            prompt.key = self.keys
        elif prompt.held == prompt.needed:
            self.free += prompt.held
            self.ended += 1
            return
        if self.free and own.may_ask(prompt.key):
            self.free -= 1
            self.promised -= 1
            prompt.held += 1
            own.ended(prompt.key)
            self.after(self.dice.uniform(0.05, 1.0), prompt)
            return
        own.waits(prompt.key, self.now_s)
        if not own.gives_up(prompt.key, self.now_s):
            self.after(PAUSE_S * self.dice.uniform(0.9, 1.1), prompt)
            return
        self.given_up.append((prompt.instance, own.may_ask(prompt.key)))
        own.ended(prompt.key)
        self.free += prompt.held
        self.promised -= prompt.needed - prompt.held
        prompt.held, prompt.key = 0, 0
        self.after(self.dice.uniform(0.05, 0.8), prompt)


def simulate(seed: int, instances: int) -> Commons:
    dice = random.Random(seed)
    memory = dice.randrange(4, 13)
    made = [GrowthQueue(wait_s=WAIT_S, draw=dice.random) for _ in range(instances)]
    world = Commons(dice, memory, made)
    prompts = dice.randrange(2, 9)
    for number in range(prompts):
        one = Growing(dice.randrange(instances), number, dice.randrange(memory // 2, memory + 1))
        world.after(dice.uniform(0.0, 2.0), one)
    world.run()
    assert (world.free, world.promised) == (memory, 0), f"seed {seed}: blocks are lost"
    assert world.ended == prompts, f"seed {seed}: not all prompts have ended"
    return world


@pytest.mark.parametrize("first_seed", range(0, 2000, 500))
def test_prompts_that_wait_for_each_other_all_come_to_their_end(first_seed: int) -> None:
    """Of one instance the oldest never gives up; of several, whose prompts hold all memory together, one
    does."""
    for seed in range(first_seed, first_seed + 500):
        alone = simulate(seed, 1)
        assert not any(oldest for _, oldest in alone.given_up), f"seed {seed}"
        together = simulate(seed, 3)
        assert len(together.given_up) < 40, f"seed {seed}: they give up in circles"
        assert together.now_s < 300, f"seed {seed}: {together.now_s:.0f} s"
