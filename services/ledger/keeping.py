"""Records in etcd and what is decided on them, kept in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvcommons.errors import Unavailable
from services.ledger.etcd import Etcd, Listing, Record

log = logging.getLogger(__name__)

AWAY_S = 1.0  # before etcd is tried again
RELIST_S = 60.0


async def keep(
    etcd: Etcd,
    prefix: bytes,
    *,
    listed: Callable[[Listing], None],
    changed: Callable[[Record], None],
    write: Callable[[], Coroutine[Any, Any, None]],
    away: Callable[[Unavailable], None],
) -> None:
    """Lists the records under `prefix` and watches them, while `write` writes what is due, until cancelled;
    `etcd` is closed then. It lists again now and then, and where `write` has ended. Where etcd is out of
    reach, `away` is called, and all of it begins anew."""
    try:
        while True:
            try:
                await etcd.reconnect()
                while True:
                    await _follow(etcd, prefix, listed, changed, write)
            except Unavailable as error:
                away(error)
            await asyncio.sleep(AWAY_S)
    finally:
        await etcd.close()


async def _follow(
    etcd: Etcd,
    prefix: bytes,
    listed: Callable[[Listing], None],
    changed: Callable[[Record], None],
    write: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """From one listing to the next. Raises Unavailable."""
    listing = await etcd.list(prefix)
    listed(listing)
    writing = asyncio.create_task(write())
    until = time.monotonic() + RELIST_S
    try:
        async with contextlib.aclosing(etcd.watch(prefix, listing.revision)) as changes:
            async for records in changes:
                for record in records:
                    changed(record)
                if writing.done() or time.monotonic() >= until:
                    break
    finally:
        writing.cancel()
        await asyncio.wait({writing})  # which does not take our own cancellation for its
        if not writing.cancelled() and (failed := writing.exception()) is not None:
            log.debug("what is due was not written: %s", failed, extra={"prefix": prefix.decode()})
