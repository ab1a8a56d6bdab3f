"""Prompts that are handed over: their KV goes to the holders that will attend over it, layer by layer, and
their first token to the decode instance that goes on."""

from __future__ import annotations

from collections.abc import Callable

from kvcommons.engine.prompt import FirstToken, Prompt
from kvcommons.errors import Internal, KVCommonsError, Unavailable
from kvcommons.pb import common_pb2 as pb
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.targets import TargetTable, writes

PromptEvent = int | pb.PromptLogprobs | FirstToken | KVCommonsError
"""A prompt's queueing time (microseconds) when it begins, its logprobs where they are asked for, then its
result, or why there is none."""
Listener = Callable[[PromptEvent], None]
"""Called from any thread."""


class HandOver:
    """One prompt's `PromptSink`."""

    goes_on = False

    def __init__(
        self,
        pusher: Pusher,
        delivery: Delivery,
        targets: TargetTable,
        push_from_block: int,
        listener: Listener,
    ) -> None:
        """Blocks before `push_from_block` are at the targets already, or load there themselves."""
        self._pusher = pusher
        self.delivery = delivery
        self.targets = targets
        self._push_from_block = push_from_block
        self._listener = listener

    @property
    def failure(self) -> KVCommonsError | None:
        return self.delivery.failure

    def began(self, prompt: Prompt, queued_us: int) -> None:
        self._listener(queued_us)

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        first = max(blocks.start, self._first(prompt))
        placed = writes(self.targets.now, first, blocks.stop - first)
        if self.targets.now and sum(write.count for write in placed) < blocks.stop - first:
            raise Internal(f"blocks {first} … {blocks.stop - 1} of a prompt are computed, and have no place")
        for write in placed:
            physical = prompt.blocks[write.first : write.first + write.count]
            self._pusher.write(self.delivery, layer, write, physical)

    def scored(self, prompt: Prompt, logprobs: pb.PromptLogprobs) -> None:
        self._listener(logprobs)

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        listener = self._listener

        def acknowledged(failure: KVCommonsError | None) -> None:
            listener(failure or first)

        def pushed(failure: KVCommonsError | None) -> None:
            if failure is not None or not self.targets.now:
                acknowledged(failure)
            else:
                self._pusher.start_sequence(
                    self.delivery, self.targets.now[0], first.token, self._first(prompt), acknowledged
                )

        self.delivery.seal(pushed)

    def refused(self, error: KVCommonsError) -> None:
        self.failed(error)

    def failed(self, error: KVCommonsError) -> None:
        self.delivery.abandon(error)
        self._listener(error)

    def cancelled(self) -> None:
        self.delivery.abandon(Unavailable("the job was cancelled"))

    def _first(self, prompt: Prompt) -> int:
        """A prompt whose blocks do not stay here is attended over where they go: all that is not there yet
        is pushed."""
        return self._push_from_block if prompt.memory.keeps else prompt.placed_blocks
