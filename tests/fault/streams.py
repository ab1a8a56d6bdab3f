"""Streams that something happens to on the way."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from devstack.rest import Turn
from tests.system.stack import Stack

ANSWER_TOKENS = 200
# Without its control tokens a model has to go on talking: each of the 200 tokens is text.
NEVER_ENDS = {"ignore_eos": True, "logit_bias": {str(token): -100 for token in range(3)}}
# Services that can tell whether they are at work.
INSPECTED = ("prefill", "decode", "attention_pool")
# Greedy, and sampled: noise is a function of seed, choice and position, so both have to continue alike.
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11}}


def stream(
    stack: Stack,
    session: str,
    message: str,
    disturb: Callable[[], object] | None = None,
    *,
    at_piece: int = 10,
    **parameters: Any,
) -> tuple[Turn, float]:
    """Streams 200 tokens, calls `disturb` once on the way; the turn, and its longest silence in seconds."""
    silence_s, last = 0.0, time.monotonic()
    calls = stack.client.chat(message, session, max_tokens=ANSWER_TOKENS, **NEVER_ENDS, **parameters)
    for number, part in enumerate(calls):
        now = time.monotonic()
        silence_s, last = max(silence_s, now - last), now
        if number == at_piece and disturb is not None:
            disturb()
        if isinstance(part, Turn):
            return part, silence_s
    raise AssertionError("a chat ends with its Turn")


def token_ids(stack: Stack, session: str) -> list[int]:
    """The session's tokens as they were committed."""
    found = stack.client.session(session)["token_ids"]
    return [int(token) for token in found]


class Victims:
    """Finds and kills the instance that is at work, within a token's time: pids and channels are ready."""

    def __init__(self, stack: Stack, service: str) -> None:
        names = sorted(process.name for process in stack.processes() if process.name.startswith(service))
        self._pids = {name: stack.pid(name) for name in names}
        self._inspect = {name: stack.inspector(name) for name in names if name.startswith(INSPECTED)}
        self.killed: list[str] = []

    def __len__(self) -> int:
        """How many there were at first."""
        return len(self._pids)

    def kill_busy(self) -> bool:
        """Whether there was one: where this process gets no CPU, a stream ends before anybody looks."""
        now = {name: inspect() for name, inspect in self._inspect.items() if name not in self.killed}
        busy = [name for name, blocks in now.items() if blocks.free < blocks.total]
        if busy:
            os.kill(self._pids[busy[0]], signal.SIGKILL)
            self.killed.append(busy[0])
        return bool(busy)

    def kill_any(self) -> None:
        name = next(name for name in self._pids if name not in self.killed)
        os.kill(self._pids[name], signal.SIGKILL)
        self.killed.append(name)


def until_whole(stack: Stack, wanted: dict[str, int], wait_s: float = 60.0) -> None:
    """Until the stack has started again what was killed. One that has died is listed as ready for a while, so
    processes are counted and asked, too."""

    def whole() -> bool:
        instances = stack.client.get("/v1/status")["instances"]
        ready = Counter(instance["service"] for instance in instances if instance["ready"])
        if any(ready[service] < count for service, count in wanted.items() if service != "ledger"):
            return False
        for service in wanted.keys() & INSPECTED:
            kind = "decode" if stack.colocated and service == "prefill" else service
            names = [process.name for process in stack.processes() if process.name.startswith(kind)]
            first = [name for name in names if "-stage-" not in name and "-rank-" not in name]
            if len(first) < wanted[service] or not all(map(stack.has_loaded, first)):
                return False
        return True

    stack.until(whole, wait_s, "not all instances came back")
