"""Blocks of prompts that are computed whole in this instance's memory."""

from __future__ import annotations

import torch

from kvcommons.engine.chunk_rows import ChunkRows
from kvcommons.engine.core import Core
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.sequence import LocalRun
from kvcommons.errors import CapacityExhausted


class WholePrompt:
    """A prompt's `PromptMemory`: all of its blocks are here from its first chunk to its end."""

    keeps = True

    def __init__(self, core: Core, prompts: Prompts) -> None:
        """`prompts`: those beside it."""
        self._core = core
        self._prompts = prompts

    def check(self, prompt: Prompt) -> None:
        if prompt.total_blocks > self._core.allocator.total:
            raise CapacityExhausted(
                f"the prompt needs {prompt.total_blocks} blocks and this prefill instance has "
                f"{self._core.allocator.total}: raise its capacity_tokens"
            )

    def take(self, prompt: Prompt) -> bool:
        """False while another prompt makes the block that it needs next."""
        allocator, found = self._core.allocator, self._found(prompt)
        if found is None:
            return False
        try:
            blocks = found + allocator.allocate(prompt.total_blocks - len(found))
        except CapacityExhausted:
            allocator.release(found)
            raise
        prompt.blocks = blocks
        prompt.sequence.append_run(LocalRun(first_block=0, blocks=list(blocks)))
        prompt.reuse(device=len(found))
        self._prompts.preloading.decide(prompt)
        return True

    def chunk(self, prompt: Prompt, tokens: int) -> range:
        return prompt.chunk(tokens)

    def work(self, chunk: range) -> IterationWork:
        return IterationWork.of_chunk(chunk)

    def open(self, prompt: Prompt, chunk: range) -> bool:
        return True

    def rows(self, prompt: Prompt, chunk: range) -> ChunkRows:
        request = prompt.request
        if prompt.table is None:  # made once: there may be a million tokens before each chunk
            prompt.table = torch.tensor(prompt.blocks)
        return ChunkRows(self._core, request.tokens, chunk, prompt.table, request.truncated)

    def close(self, prompt: Prompt) -> None:
        """The blocks are the sequence's."""

    def _found(self, prompt: Prompt) -> list[int] | None:
        """Leading blocks that are known here, held for the prompt; None while another one makes the block
        that it needs next."""
        allocator, reusable = self._core.allocator, prompt.reusable()
        found = allocator.match(reusable)
        if len(found) < len(reusable) and reusable[len(found)] in self._prompts.claims:
            allocator.release(found)
            return None
        return found
