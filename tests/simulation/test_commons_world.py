"""What the simulation of the commons takes for granted of its processes and messages."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.commons_loop import Thread
from tests.simulation.commons_schedule import CommonsSchedule
from tests.simulation.commons_world import WAKING_S, Proc, World
from tests.simulation.machine import Violation


def test_a_process_that_was_paused_loses_messages_under_way_but_none_of_its_timers() -> None:
    world = World(random.Random(1))
    here, there = Proc(world, "here"), Proc(world, "there")
    happened: list[str] = []
    here.paused = True
    world.after(here, 1.0, lambda: happened.append("timer"))
    world.send(here, lambda: happened.append("message"), there)
    assert world.deliver()
    world.advance(2.0)
    assert not happened
    world.resume(here)
    world.send(here, lambda: happened.append("lost"), there)
    world.lose(here)
    world.advance(2 * WAKING_S)
    assert not world.deliver()
    assert sorted(happened) == ["message", "timer"]


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_makes_the_same_history_each_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    histories: list[list[str]] = [[], []]
    tell = World.tell
    for history in histories:

        def reported(
            world: World, name: str, event: str, *, history: list[str] = history, **facts: object
        ) -> None:
            history.append(f"{world.now} {name} {event} {facts}")
            tell(world, name, event, **facts)

        monkeypatch.setattr(World, "tell", reported)
        CommonsSchedule(seed).run()
    assert len(histories[0]) > 20
    assert histories[0] == histories[1]


def test_what_must_never_happen_is_raised_by_the_step_in_which_a_task_saw_it() -> None:
    world = World(random.Random(1))
    here = Proc(world, "here")

    async def work() -> None:
        world.tell("here", "freed", blocks=[1])

    with pytest.raises(Violation, match="freed twice"):
        world.start(here, work)


async def _sleep(happened: list[str]) -> None:
    await asyncio.sleep(1.0)
    happened.append("awake")


def test_a_process_gets_on_when_something_reaches_it_and_not_while_it_is_paused_or_dead() -> None:
    world = World(random.Random(1))
    paused, dead = Proc(world, "paused"), Proc(world, "dead")
    happened: list[str] = []
    for proc in (paused, dead):
        world.start(proc, lambda: _sleep(happened))
    paused.paused, dead.alive = True, False
    world.advance(5.0)
    assert not happened
    world.resume(paused)
    world.advance(WAKING_S)
    assert happened == ["awake"]
    world.close()


async def test_a_thread_begins_anew_with_what_it_was_answered() -> None:
    begun: list[int] = []
    thread = Thread()

    def work() -> tuple[int, int]:
        begun.append(1)
        return thread.ask(1, timeout_s=1.0), thread.ask(2, timeout_s=1.0)

    async def call(number: int, *, timeout_s: float) -> int:
        return 10 * number

    assert await thread.run(work, call) == (10, 20)
    assert len(begun) == 3
