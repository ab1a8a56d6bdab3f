"""Iterations ask nothing of the environment: what it says was read when the process began."""

from __future__ import annotations

import os
import threading

import pytest

from tests.contract.engine_stack import Stack
from tests.contract.engine_turns import turn

pytest_plugins = ("tests.contract.engine_fixtures",)

MADE = 8


@pytest.mark.asyncio
async def test_engines_read_nothing_of_it_once_they_compute(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    look_up = type(os.environ).__getitem__

    def watched(environ: os._Environ[str], name: str) -> str:
        if threading.current_thread().name == "engine":
            read.append(name)
        return look_up(environ, name)

    prefill, decode = await engines.prefill(), await engines.decode()
    first, second = (
        turn(prefill, decode, engines.model, engines.reference.prompt(length, MADE)[0], MADE)
        for length in (75, 76)
    )
    await first.run()  # modules that are imported when they are first needed read it
    monkeypatch.setattr(type(os.environ), "__getitem__", watched)
    await second.run()
    assert len(second.tokens) == MADE
    assert any(thread.name == "engine" for thread in threading.enumerate())
    assert read == []
    asked = threading.Thread(target=lambda: os.environ.get("HOME"), name="engine")
    asked.start()
    asked.join()
    assert read == ["HOME"], "it would have been seen"
