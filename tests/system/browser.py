"""A real Chromium, for what only a browser can judge; skips where there is none."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALL = "is not installed: pip install kvcommons[browser]"


@functools.cache
def no_chromium() -> str:
    """Why there is none; empty where there is one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return f"playwright {INSTALL}"
    with sync_playwright() as playwright:
        if Path(_path(playwright)).exists():
            return ""
    return "no Chromium is on this machine: install one, or name it in $CHROMIUM"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's, which drives the machine's own Chromium, or the one that $CHROMIUM names."""
    if reason := no_chromium():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**_options(playwright))
        try:
            yield browser
        finally:
            browser.close()


@asynccontextmanager
async def chromium_beside_a_loop() -> AsyncIterator[Any]:
    """The same for a test that is a coroutine, which asks `no_chromium` before anything is started."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**_options(playwright))
        try:
            yield browser
        finally:
            await browser.close()


def _path(playwright: Any) -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    return str(found or playwright.chromium.executable_path)


def _options(playwright: Any) -> dict[str, Any]:
    # Its sandbox wants rights that a container's root has not; the only pages it sees are ours.
    return {"executable_path": _path(playwright), "args": ["--no-sandbox"]}
