"""How slow this machine is now, and what tests have to allow for it.

Deadlines in tests, and the waits that they configure services with, are written for a quiet machine of two
cores. `scaled` and its kin stretch them by one number, `SLOWNESS`: how many times as long as there two
processes that start at once take for a fixed piece of work. Other processes that keep the cores busy count as
a slower machine. The number is measured once in a session of tests; `KVCOMMONS_TEST_SLOWNESS` hands it to
workers, and sets it by hand. Workers that test side by side keep the cores busy from the first test on, which
is after the measurement: each of them counts as one more process beside those of a worker alone.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import time
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from annotated_types import Le

VARIABLE = "KVCOMMONS_TEST_SLOWNESS"
WORKERS = "PYTEST_XDIST_WORKER_COUNT"  # as xdist tells its workers, and they their children
SLOWNESS_MAX = 10.0
QUIET_S = 0.3  # what the work takes on two quiet cores of 2.5 GHz
GIVE_UP_S = 60.0
WORK = """
import hashlib
for _ in range(300):
    hashlib.sha256(bytes(4000)).digest()
    sum(i * i for i in range(10_000))
"""
# Settings that say how long something is waited for. Others in seconds say how often something is done.
WAIT = re.compile(r"(^|_)(deadline|drain|lease|staging|stall|timeout|wait)_m?s$")

Number = TypeVar("Number", int, float)
Settings = TypeVar("Settings")


def _measured() -> float:
    command = [sys.executable, "-I", "-S", "-c", WORK]
    began_s = time.monotonic()
    for child in [subprocess.Popen(command) for _ in range(2)]:
        child.wait(GIVE_UP_S)
    return round(min(max((time.monotonic() - began_s) / QUIET_S, 1.0), SLOWNESS_MAX), 1)


def _slowness() -> float:
    """As the environment has it, which xdist's workers and helper processes inherit, or else measured; with
    the other workers of the session."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_measured())
    others = int(os.environ.get(WORKERS, "1")) - 1
    return float(os.environ[VARIABLE]) * (1 + others / len(os.sched_getaffinity(0)))


SLOWNESS = _slowness()


def scaled(quiet: Number) -> Number:
    """A deadline in any unit, from that for a quiet machine."""
    return type(quiet)(quiet * SLOWNESS)


def scaled_settings(settings: Settings) -> Settings:
    """Settings of a service, a dataclass, with their waits scaled, defaults included, each as far as its
    bound allows."""
    changed = {}
    longest = dict(_longest(type(settings)))
    for each in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, each.name)
        if dataclasses.is_dataclass(value):
            changed[each.name] = scaled_settings(value)
        elif WAIT.search(each.name) and value is not None:
            changed[each.name] = min(scaled(value), longest.get(each.name, math.inf))
    return dataclasses.replace(settings, **changed)  # type: ignore[type-var]


def scaled_table(schema: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of a service's table in the settings file: the waits that it names, and the defaults of
    `schema` for those it does not."""
    waits = {name: value for name, value in (*_defaults(schema), *table.items()) if WAIT.search(name)}
    longest = dict(_longest(schema))
    return {
        **table,
        **{name: min(scaled(value), longest.get(name, math.inf)) for name, value in waits.items()},
    }


def _longest(schema: type) -> Iterator[tuple[str, Any]]:
    """Settings that have an upper bound, each with it."""
    hints = typing.get_type_hints(schema, include_extras=True)
    for each in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[each.name]):
            yield from _longest(hints[each.name])
        for bound in getattr(hints[each.name], "__metadata__", ()):
            if isinstance(bound, Le):
                yield each.name, bound.le


def _defaults(schema: type) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(schema)
    for each in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[each.name]):
            yield from _defaults(hints[each.name])
        elif each.default not in (dataclasses.MISSING, None):
            yield each.name, each.default
