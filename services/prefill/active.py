"""A job that the engine has in hand, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from kvcommons.engine.history import Load
from kvcommons.errors import KVCommonsError
from kvcommons.transport.deadline import Deadline
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
    load_until: Deadline | None = None
