"""kill -9 of a process of prefill or decode in the middle of a prompt of 16K tokens, and of its answer: the
router goes on elsewhere, or here again, and what the client reads is transformers' to the token."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fault.conftest import slow_tables
from tests.fault.streams import until_whole
from tests.long_prompt import LongPrompt, long_prompt
from tests.machine import scaled
from tests.system.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ANSWER = 40
TABLES: dict[str, Any] = {
    "prefill": {"chunk_tokens": 512},
    "decode": {"chunk_tokens": 512},
    "kvstore": {"dram_bytes": 1 << 29},
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "apart": (
        {"stages": 2, "decode_stages": 2},
        {"prefill": 1, "prefill_stage": 1, "decode": 1, "decode_stage": 1},
    ),
    "colocated": ({"colocated": True, "decode_stages": 2}, {"prefill": 1, "decode": 1, "decode_stage": 1}),
}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> LongPrompt:
    return long_prompt(tmp_path_factory.mktemp("7m"), ANSWER)


@pytest.fixture(scope="module", params=SHAPES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, long: LongPrompt
) -> Iterator[tuple[Stack, dict[str, int]]]:
    flags, whole = SHAPES[request.param]
    tables, folder = slow_tables(capacity_tokens=40_000, **TABLES), tmp_path_factory.mktemp(request.param)
    with Stack(folder, tables=tables, model=str(long.folder), attention_pool=0, **flags) as stack:
        yield stack, whole | {"kvstore": 1}
    stack.assert_gone()


class Reader:
    """Reads an answer, and kills a process once at some moment of it."""

    def __init__(self, stack: Stack, long: LongPrompt) -> None:
        self._stack, self._long = stack, long
        self.tokens: list[str] = []
        self.logprobs: list[float] = []
        self.first_s = 0.0

    def read(self, victim: str = "", *, after_s: float = 0.0, at_token: int = 0, **parameters: Any) -> None:
        """So many seconds into the prompt, or when so many tokens have come."""
        pid = self._stack.pid(victim) if victim else 0
        killer = threading.Timer(after_s, os.kill, (pid, signal.SIGKILL))
        began_s = time.monotonic()
        if after_s:
            killer.start()
        try:
            asked = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True, "logprobs": 0} | parameters
            for event in self._stack.client.tokens(self._long.tokens, **asked):
                self._take(event)
                self.first_s = self.first_s or (time.monotonic() - began_s if self.tokens else 0.0)
                if at_token and len(self.tokens) >= at_token:
                    at_token = 0
                    os.kill(pid, signal.SIGKILL)
        finally:
            killer.cancel()

    def _take(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", []):
            logprobs = choice.get("logprobs") or {}
            self.tokens += logprobs.get("tokens") or []
            self.logprobs += logprobs.get("token_logprobs") or []


def test_it_is_failed_over(served: tuple[Stack, dict[str, int]], long: LongPrompt) -> None:
    """Each process in the middle of the prompt, which is computed anew; then each in that of the answer,
    whose prompt the kvstore has."""
    stack, whole = served
    until_whole(stack, whole)
    plain = Reader(stack, long)
    plain.read(reuse=False)
    assert plain.logprobs == pytest.approx(long.logprobs, abs=1e-3)
    assert len(plain.tokens) == ANSWER
    decodes = ["decode-stage-1", "decode"]
    computing = ["prefill-stage-1", "prefill"] if "prefill_stage" in whole else decodes
    for number, victim in enumerate(computing):
        pid, one = stack.pid(victim), Reader(stack, long)
        one.read(victim, after_s=plain.first_s * (0.4 + 0.2 * number), reuse=False)
        assert one.tokens == plain.tokens
        assert one.first_s > plain.first_s, "it was not in the middle of the prompt"
        until_whole(stack, whole)
        assert stack.pid(victim) != pid
    kept = Reader(stack, long)
    kept.read()
    assert kept.tokens == plain.tokens
    for victim in decodes:
        pid, one = stack.pid(victim), Reader(stack, long)
        one.read(victim, at_token=10)
        assert one.tokens == plain.tokens
        assert one.logprobs == pytest.approx(long.logprobs, abs=1e-3)
        until_whole(stack, whole)
        assert stack.pid(victim) != pid
    for name in ("decode", *(["prefill"] if "prefill_stage" in whole else [])):
        stack.until(lambda name=name: stack._is_idle(name), scaled(20.0), f"{name} holds blocks")
