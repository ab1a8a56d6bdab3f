"""Requests to prompts: what becomes of one is decided by where its blocks go and whether they fit here."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Condemner
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import Sequence
from kvcommons.pb import prefill_pb2 as pb
from kvcommons.prefill.handover import HandOver, Listener
from kvcommons.prefill.joining import GrowingPlaces, JoiningHolders
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.spread import Holders, SpreadPrompt, await_placed, can_spread
from kvcommons.prefill.targets import TargetTable
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.deadline import Deadline


class PromptStages(Protocol):
    """The stages, or ranks, that compute an instance's prompts together."""

    @property
    def stages(self) -> int: ...

    async def prepared(self, request: Request) -> None:
        """Returns once they can answer it."""

    def sink(
        self,
        asked: pb.PrefillRequest,
        key: int,
        pusher: Pusher,
        delivery: Delivery,
        targets: TargetTable,
        listener: Listener,
    ) -> HandOver:
        """Of a request: which prompt it is, and where it goes. Raises where the stages are not
        together."""


class Intake:
    """Belongs to the event loop."""

    def __init__(
        self,
        core: Core,
        engine: Engine,
        prompts: Prompts,
        *,
        keeper: BlockKeeper,
        pusher: Pusher,
        holders: Holders,
        condemner: Condemner,
        chunk_tokens: int,
        stages: PromptStages | None = None,
    ) -> None:
        """`prompts`: the engine's. `stages`: None where prompts are computed here alone."""
        self.core = core
        self.engine = engine
        self._whole = WholePrompt(core, prompts)
        self._keeper = keeper
        self._pusher = pusher
        self._holders = holders
        self._condemner = condemner
        self.chunk_tokens = chunk_tokens
        self._stages = stages
        self._windows = (
            1 if stages is None else stages.stages
        ) + 1  # of a spread prompt: while one chunk is in each stage, the next one comes

    async def prompt(self, asked: pb.PrefillRequest, deadline_s: float, listener: Listener) -> Prompt:
        """Of the call under way, to be submitted. Raises InvalidInput, ContextLengthExceeded or ModelNotFound
        for what cannot be computed here, and what decode raises where its history was waited for."""
        core = self.core
        request = Request.of(asked.job, core.info)
        await core.check_grammar(request)
        if self._stages is not None:
            await self._stages.prepared(request)
        self._condemner.know(data_address=request.store_data, control_address=request.store_control)
        targets = TargetTable(asked.targets)
        delivery = Delivery(Deadline(deadline_s), current_traceparent())
        key = self.engine.new_key()
        blocks = core.layout.blocks_of(len(request.tokens))
        grows = bool(targets.now) and targets.blocks < blocks
        if self._stages is not None:
            sink = self._stages.sink(asked, key, self._pusher, delivery, targets, listener)
        else:
            sink = HandOver(self._pusher, delivery, targets, asked.push_from_block, listener)
        prompt = Prompt(
            sequence=Sequence(
                key=key,
                request=request,
                block_tokens=core.block_tokens,
                chain=request.chain(core.info),
                constraint=core.constraint(request),
            ),
            sink=sink,
            memory=self._whole,
            deadline_s=deadline_s,
            submitted_s=time.monotonic(),
        )
        fits = prompt.total_blocks <= core.allocator.total
        if not fits and can_spread(targets, core.heads):
            prompt.memory = SpreadPrompt(
                core,
                self._keeper,
                self._holders,
                delivery,
                targets,
                self.chunk_tokens,
                windows=self._windows,
            )
            if asked.push_from_block:
                placed = await asyncio.to_thread(
                    await_placed,
                    self._holders.dialer,
                    targets.now[0],
                    delivery.deadline,
                    delivery.traceparent,
                )
                prompt.reuse(placed=min(placed, len(prompt.reusable())))
        if grows:
            joining = JoiningHolders(targets, blocks=blocks, delivery=delivery, dialer=self._holders.dialer)
            prompt.memory = GrowingPlaces(prompt.memory, joining, self.chunk_tokens)
        return prompt
