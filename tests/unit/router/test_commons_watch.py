from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvcommons.errors import Overloaded
from services.router.commons.watch import VIEWERS_MAX, CommonsWatch


class Camera:
    """Takes a picture when it is `free` to."""

    def __init__(self) -> None:
        self.taken = 0
        self.now_s = 0.0
        self.free = asyncio.Event()
        self.free.set()
        self.watch = CommonsWatch(self.take, period_s=1.0, clock=lambda: self.now_s)

    async def take(self) -> dict[str, Any]:
        await self.free.wait()
        self.taken += 1
        return {"number": self.taken}


async def test_one_picture_a_period_however_many_want_it() -> None:
    camera = Camera()
    first = await asyncio.gather(*(camera.watch.picture() for _ in range(30)))
    assert first == [{"number": 1}] * 30
    camera.now_s = 0.9
    assert await camera.watch.picture() == {"number": 1}
    camera.now_s = 1.0
    assert await asyncio.gather(camera.watch.picture(), camera.watch.picture()) == [{"number": 2}] * 2
    assert camera.taken == 2


async def test_whoever_leaves_while_taking_it_stops_nobody() -> None:
    camera = Camera()
    camera.free.clear()
    leaving, staying = (asyncio.create_task(camera.watch.picture()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    camera.free.set()
    assert await asyncio.wait_for(staying, 5) == {"number": 1}


async def test_a_close_ends_the_wait_for_the_next() -> None:
    camera = Camera()
    await camera.watch.picture()  # the next one is due in a second, by a clock that stands still
    waiting = asyncio.create_task(camera.watch.next_due())
    await asyncio.sleep(0)
    camera.watch.close()
    assert await asyncio.wait_for(waiting, 5) is False


async def test_one_viewer_too_many_is_refused_and_a_place_comes_free() -> None:
    watch = Camera().watch
    with contextlib.ExitStack() as viewers:
        for _ in range(VIEWERS_MAX):
            viewers.enter_context(watch.viewer())
        with pytest.raises(Overloaded, match="viewers"), watch.viewer():
            pass
    with watch.viewer():
        pass
