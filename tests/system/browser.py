"""A real Chromium, for what only a browser can judge; skips where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALL = "is not installed: pip install kvcommons[browser]"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's, which drives the machine's own Chromium, or the one that $CHROMIUM names."""
    api = pytest.importorskip("playwright.sync_api", reason=f"playwright {INSTALL}")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(**_options(playwright))
        try:
            yield browser
        finally:
            browser.close()


@asynccontextmanager
async def chromium_beside_a_loop() -> AsyncIterator[Any]:
    """The same for a test that is a coroutine."""
    api = pytest.importorskip("playwright.async_api", reason=f"playwright {INSTALL}")
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(**_options(playwright))
        try:
            yield browser
        finally:
            await browser.close()


def _options(playwright: Any) -> dict[str, Any]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    path = path or playwright.chromium.executable_path
    if not Path(path).exists():
        pytest.skip("no Chromium is on this machine: install one, or name it in $CHROMIUM")
    # Its sandbox wants rights that a container's root has not; the only pages it sees are ours.
    return {"executable_path": path, "args": ["--no-sandbox"]}
