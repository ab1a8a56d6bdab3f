"""What the simulation of the commons takes for granted of its processes and messages."""

from __future__ import annotations

import random

from tests.simulation.commons_world import WAKING_S, Proc, World


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
