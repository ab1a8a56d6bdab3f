"""Requests to prompts: what becomes of one is decided by where its blocks go and whether they fit here."""

from __future__ import annotations

import asyncio
import time

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
from kvcommons.prefill.push import Delivery, Pusher
from kvcommons.prefill.spread import Holders, SpreadPrompt, await_placed, can_spread
from kvcommons.prefill.targets import Target
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.deadline import Deadline


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
    ) -> None:
        """`prompts`: the engine's."""
        self.core = core
        self.engine = engine
        self._whole = WholePrompt(core, prompts)
        self._keeper = keeper
        self._pusher = pusher
        self._holders = holders
        self._condemner = condemner
        self._chunk_tokens = chunk_tokens

    async def prompt(self, asked: pb.PrefillRequest, deadline_s: float, listener: Listener) -> Prompt:
        """Of the call under way, to be submitted. Raises InvalidInput, ContextLengthExceeded or ModelNotFound
        for what cannot be computed here, and what decode raises where its history was waited for."""
        core = self.core
        request = Request.of(asked.job, core.info)
        self._condemner.know(data_address=request.store_data, control_address=request.store_control)
        targets = tuple(Target.of(placement) for placement in asked.targets)
        delivery = Delivery(Deadline(deadline_s), current_traceparent())
        prompt = Prompt(
            sequence=Sequence(
                key=self.engine.new_key(),
                request=request,
                block_tokens=core.block_tokens,
                chain=request.chain(core.info),
            ),
            sink=HandOver(self._pusher, delivery, targets, asked.push_from_block, listener),
            memory=self._whole,
            deadline_s=deadline_s,
            submitted_s=time.monotonic(),
        )
        if prompt.total_blocks > core.allocator.total and can_spread(request, targets, core.block_tokens):
            prompt.memory = SpreadPrompt(
                core, self._keeper, self._holders, delivery, targets, self._chunk_tokens
            )
            if asked.push_from_block:
                placed = await asyncio.to_thread(
                    await_placed, targets, Deadline(deadline_s), delivery.traceparent
                )
                prompt.reuse(placed=min(placed, len(prompt.reusable())))
        return prompt
