"""Prompts whose holders join while they are computed (KVP: Mnemosyne, section 4.4): decode is asked for
places of further blocks some chunks ahead, so that none waits while there is memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcommons.engine.chunk_rows import ChunkRows
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.prompt import Prompt, PromptMemory
from kvcommons.errors import DataLoss, Internal, KVCommonsError
from kvcommons.pb import common_pb2, data_pb2
from kvcommons.prefill.push import Delivery
from kvcommons.prefill.targets import Target, TargetTable
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

CHUNKS_AHEAD = 2  # whose places are asked for while one is computed
_POLL_S = 0.005  # of a chunk that waits for its place; others are computed meanwhile


def ask_places(
    dialer: Dialer, first: Target, *, known_blocks: int, blocks: int, deadline: Deadline, traceparent: str
) -> Sequence[common_pb2.SegmentPlace]:
    """Where a sequence's blocks behind the known ones lie, once so many leading ones have a place. `first`:
    its first target. Blocks its thread; raises what decode raises."""
    client = dialer.client(first.data_address, "decode")
    request = data_pb2.DataRequest(
        traceparent=traceparent,
        await_places=data_pb2.AwaitPlaces(
            handle=first.handle, epoch=first.epoch, known_blocks=known_blocks, blocks=blocks
        ),
    )
    try:
        return client.call(request, deadline=deadline).places.places
    finally:
        client.close()


class JoiningHolders:
    """Of one prompt. One question at a time is under way, on a thread of its own."""

    def __init__(
        self, table: TargetTable, *, blocks: int, delivery: Delivery, dialer: Dialer = UNSECURED
    ) -> None:
        """`table` covers some of the prompt's `blocks`; the others join there."""
        self.table = table
        self._blocks = blocks
        self._delivery = delivery
        self._dialer = dialer
        self._changed = threading.Condition()
        self._pending = False
        self._failure: KVCommonsError | None = None

    def want(self, blocks: int) -> None:
        """So many leading blocks will soon need a place."""
        blocks = min(blocks, self._blocks)
        with self._changed:
            if blocks <= self.table.blocks or self._pending or self._failure is not None:
                return
            self._pending = True
        threading.Thread(target=self._ask, args=(blocks,), name="prefill-places", daemon=True).start()

    def reached(self, blocks: int, wait_s: float) -> bool:
        """Whether so many have one, after a moment at most. Raises why they will not."""
        blocks = min(blocks, self._blocks)
        with self._changed:
            if self.table.blocks < blocks:
                self._changed.wait_for(lambda: not self._pending, wait_s)
            if self._failure is not None:
                raise self._failure
            return self.table.blocks >= blocks

    def _ask(self, blocks: int) -> None:
        failure: KVCommonsError | None = None
        try:
            known = self.table.blocks
            places = ask_places(
                self._dialer,
                self.table.now[0],
                known_blocks=known,
                blocks=blocks,
                deadline=self._delivery.deadline,
                traceparent=self._delivery.traceparent,
            )
            self.table.add(places)
            if self.table.blocks < blocks:
                failure = DataLoss(
                    f"decode has places for {self.table.blocks} blocks of a prompt of {self._blocks}, and "
                    "adds none"
                )
        except KVCommonsError as error:
            failure = error
        except Exception as error:
            failure = Internal(f"no further holder could be asked for: {error}")
        with self._changed:
            self._pending, self._failure = False, failure
            self._changed.notify_all()


class GrowingPlaces:
    """A prompt's `PromptMemory`: another one's, but that a chunk waits until its blocks have a place."""

    def __init__(self, memory: PromptMemory, joining: JoiningHolders, chunk_tokens: int) -> None:
        """`chunk_tokens`: of a chunk, at most."""
        self._memory = memory
        self._joining = joining
        self._ahead_tokens = CHUNKS_AHEAD * chunk_tokens

    @property
    def keeps(self) -> bool:
        return self._memory.keeps

    def check(self, prompt: Prompt) -> None:
        self._memory.check(prompt)

    def take(self, prompt: Prompt) -> bool:
        return self._memory.take(prompt)

    def chunk(self, prompt: Prompt, tokens: int) -> range:
        return self._memory.chunk(prompt, tokens)

    def work(self, chunk: range) -> IterationWork:
        return self._memory.work(chunk)

    def open(self, prompt: Prompt, chunk: range) -> bool:
        self._joining.want(-(-(chunk.stop + self._ahead_tokens) // prompt.block_tokens))
        if not self._joining.reached(-(-chunk.stop // prompt.block_tokens), _POLL_S):
            return False
        return self._memory.open(prompt, chunk)

    def rows(self, prompt: Prompt, chunk: range) -> ChunkRows:
        return self._memory.rows(prompt, chunk)

    def close(self, prompt: Prompt) -> None:
        self._memory.close(prompt)
