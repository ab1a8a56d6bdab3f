"""Stacks for benchmarks that take turns: their settings, and the pairs of turns that they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prompts import PromptWriter
from benchmarks.sessions import Pair, SessionsBenchmark, Workload
from devstack.running import RunningStack


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSetting:
    """`folder` is where the stack keeps everything; `model` a folder or hub id; `loads` prefill's setting."""

    folder: Path
    model: str
    dtype: str
    block_tokens: int
    loads: str = "auto"
    dram_bytes: int = 2 << 30
    disk_bytes: int = 16 << 30

    def writer(self) -> PromptWriter:
        """Of prompts for this model."""
        from kvcommons.model.folder import resolve_folder
        from kvcommons.model.tokenizer import Tokenizer

        return PromptWriter(Tokenizer.read(resolve_folder(self.model)), template_tokens(self.model))

    def stack(self, workload: Workload) -> RunningStack:
        """Not started yet."""
        return RunningStack(self.folder, tables=self._tables(workload), model=self.model)

    def _tables(self, workload: Workload) -> dict[str, dict[str, Any]]:
        """Prefill has room for one context a concurrent turn and a little more: see `benchmarks.sessions`."""
        grown = workload.turns * (workload.new_tokens + workload.answer_tokens)
        context = workload.history_tokens + grown + 2 * workload.new_tokens + 128
        engine = {"dtype": self.dtype, "block_tokens": self.block_tokens}
        return {
            "prefill": {**engine, "capacity_tokens": workload.concurrency * context, "loads": self.loads},
            # It would compute short turns itself, over KV that is there, and none would come from the store.
            "decode": {
                **engine,
                "capacity_tokens": 2 * workload.concurrency * context,
                "max_local_prefill_tokens": 0,
            },
            "attention_pool": {**engine, "capacity_tokens": context},
            "kvstore": {"dram_bytes": self.dram_bytes, "disk_bytes": self.disk_bytes},
        }


def take_pairs(
    setting: StackSetting, workload: Workload, *, restart: bool, progress: Callable[[str], None]
) -> list[Pair]:
    """A stack's life: histories, turns from DRAM, and with `restart` one round from disk."""
    benchmark = SessionsBenchmark(workload, setting.writer(), progress)
    progress("starting the stack")
    with setting.stack(workload) as stack:
        benchmark.begin(stack.client)
        pairs: list[Pair] = []
        for turn in range(workload.turns):
            pairs += benchmark.round(stack.client, turn, "dram")
        if restart:
            progress("restarting the stack")
            stack.restart()
            pairs += benchmark.round(stack.client, workload.turns, "disk")
    return pairs


def template_tokens(model: str) -> int:
    """What the chat template adds around one user message."""
    from kvcommons.model.chat import ChatTemplate
    from kvcommons.model.folder import resolve_folder
    from kvcommons.model.tokenizer import Tokenizer

    folder = resolve_folder(model)
    tokenizer = Tokenizer.read(folder)
    template = ChatTemplate.read(folder, tokenizer)
    return len(template.prompt([{"role": "user", "content": "x"}])) - len(tokenizer.encode_text("x"))
