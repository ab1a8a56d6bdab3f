"""Prompts that a decode instance computes itself: short ones, and tails of long ones whose history is found.

No KV crosses a network for them, and no other process: their first token comes from the iteration in which
others generate."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.prompt import FirstToken, Prompt, StaysHere
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.sequence import Sequence
from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2
from kvcommons.prefill.metrics import PrefillMetrics

Report = Callable[[int, FirstToken | KVCommonsError], None]
"""Called with the sequence's key and the result of its prompt, from any thread."""


class LocalSink(StaysHere):
    """What becomes of a prompt is reported."""

    def __init__(
        self,
        sequence: Sequence,
        report: Report,
        fall_back: Callable[[Sequence], None],
        *,
        job: common_pb2.Job,
        came_apart: Callable[[], KVCommonsError | None],
    ) -> None:
        """`fall_back` is called where the engine refused the prompt; the sequence then holds its blocks as
        before. `job`: as it came. `came_apart`: why the stages know of it no more, where this is the first of
        several."""
        super().__init__(job)
        self._sequence = sequence
        self._report = report
        self._fall_back = fall_back
        self._came_apart = came_apart

    @property
    def failure(self) -> KVCommonsError | None:
        return self._came_apart()

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        self._report(self._sequence.key, first)

    def refused(self, error: KVCommonsError) -> None:
        self._fall_back(self._sequence)

    def failed(self, error: KVCommonsError) -> None:
        self._report(self._sequence.key, error)


class ReservedPrompt(WholePrompt):
    """A prompt whose blocks were reserved when the sequence arrived."""

    def check(self, prompt: Prompt) -> None:
        """Nothing to do: the blocks are there."""

    def take(self, prompt: Prompt) -> bool:
        """What others have published since the reservation is shared, and the blocks that were reserved for
        it are free again."""
        found = self._found(prompt)
        if found is None:
            return False
        self._core.allocator.release(prompt.sequence.replace_leading(found))
        prompt.blocks = prompt.sequence.local_blocks()
        prompt.reuse(device=len(found))
        self._prompts.preloading.decide(prompt)
        return True


class LocalPrefill:
    """Decides which prompts are computed here, and hands them to the engine."""

    def __init__(
        self, core: Core, engine: Engine, prompts: Prompts, metrics: PrefillMetrics, *, tokens_max: int
    ) -> None:
        """`tokens_max`: to compute, of one prompt."""
        self._engine = engine
        self._metrics = metrics
        self._memory = ReservedPrompt(core, prompts)
        self._tokens_max = tokens_max

    def takes(self, sequence: Sequence, found_blocks: int) -> bool:
        """Whether a sequence that has just arrived, so many of whose blocks were found here or are stored, is
        one of them. All of it has to lie here, and its logprobs go the way of prefill's events."""
        if sequence.request.prompt_logprobs is not None:
            return False
        new = len(sequence.request.tokens) - found_blocks * sequence.block_tokens
        return new <= self._tokens_max and not sequence.remote_runs() and not sequence.full

    def ended(self, sequence: Sequence, first: FirstToken) -> None:
        """A prompt that was computed here has its first token."""
        self._metrics.ended(len(sequence.request.tokens), first)

    def submit(self, sequence: Sequence, sink: LocalSink, *, wait_s: float) -> None:
        """It ends with an error where its first token takes longer than that."""
        now_s = time.monotonic()
        self._engine.submit(
            Prompt(
                sequence=sequence,
                sink=sink,
                memory=self._memory,
                deadline_s=now_s + wait_s,
                submitted_s=now_s,
            )
        )
