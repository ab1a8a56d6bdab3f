"""A job that the engine has in hand, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from kvcommons.engine.history import Load
from kvcommons.errors import KVCommonsError
from services.prefill.job import First, Job
from services.prefill.push import Delivery

Listener = Callable[[int | First | KVCommonsError], None]
"""Told a job's queueing time (microseconds) when it starts, then its result; from any thread, once each."""


@dataclass(slots=True, eq=False)
class Active:
    """Touched by the engine's thread only. `origin` is the call's context: trace and ids for what is done on
    behalf of it."""

    job: Job
    delivery: Delivery
    listener: Listener
    origin: Context
    load: Load | None = None
    released: bool = False  # its load may read all layers
    ahead_bytes: int = 0  # of the read buffer, while its load is held back
    waited_before_s: float = 0.0  # of `job.load_wait_s`: for a load of more blocks, which fell behind
