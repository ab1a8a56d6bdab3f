"""A prompt's history from the store: how much of it is loaded, when, and what becomes of a load that falls
behind (AttentionStore, section 3.2.1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from kvcommons.engine.core import Core
from kvcommons.engine.history import Histories
from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)

LOAD_S_MAX = 60.0  # of one load, the time included in which it is held back
LOOK_S = 0.1  # between looks at a load that is waited for


class LoadFellShort(Exception):
    """Only the first `blocks` of the history that a prompt waits for can be had, or (`given_up`) are worth
    waiting for."""

    def __init__(self, blocks: int, *, given_up: bool) -> None:
        self.blocks = blocks
        self.given_up = given_up


class Preloading:
    """Loads of prompts, on the engine's thread."""

    def __init__(
        self, core: Core, histories: Histories, cost: LoadOrCompute, read_buffer: ReadBuffer
    ) -> None:
        self._core = core
        self._histories = histories
        self._cost = cost
        self.read_buffer = read_buffer

    def decide(self, prompt: Prompt) -> None:
        """How many of the blocks that the store has are loaded (`prompt.loaded_blocks`), after those that
        were found here."""
        blocks = prompt.loadable_blocks()
        if blocks and not prompt.lacks_history:
            blocks = self._cost.blocks_to_load(
                blocks,
                block_bytes=self._core.block_bytes,
                block_tokens=prompt.block_tokens,
                positions=_behind_device(prompt),
            )
        prompt.reuse(loaded=blocks)

    def begin(self, prompt: Prompt, others: Iterable[Prompt]) -> None:
        """As many layers as the read buffer has for the prompt. `others` may hold parts of it."""
        first, end = prompt.device_blocks, prompt.reused_blocks
        size = prompt.loaded_blocks * self._core.block_bytes
        ahead = self.read_buffer.layers_ahead(
            self._cost,
            history_bytes=size,
            new=range(prompt.sequence.computed, prompt.tokens),
            held_bytes=sum(other.ahead_bytes for other in others),
        )
        prompt.ahead_bytes = ahead * size // len(self._core.layers)
        prompt.load = self._histories.load(
            store=prompt.request.store_data,
            ids=prompt.ids[first:end],
            blocks=prompt.blocks[first:end],
            deadline=Deadline.after(min(LOAD_S_MAX, prompt.deadline_s - time.monotonic())),
            ahead=ahead,
        )

    def release(self, prompt: Prompt) -> None:
        """The prompt is computed next: what it loads from here on is in no read buffer."""
        if prompt.load is not None and not prompt.released:
            prompt.released = True
            prompt.ahead_bytes = 0
            prompt.load.release()

    def whole(self, prompt: Prompt) -> bool:
        """Nothing of its history is waited for any more."""
        return prompt.load is None or prompt.load.arrived(self._core.layers[-1])

    def ready(self, prompt: Prompt, *, whole: bool) -> bool:
        """Whether the prompt's chunk would not begin by waiting; `whole`: nor wait later on."""
        if whole:
            self.release(prompt)
        if self.whole(prompt):
            return True
        assert prompt.load is not None
        if not whole and prompt.load.arrived(self.read_buffer.first_use):
            return True
        return prompt.released and not self._patience_s(prompt)

    def wait_a_moment(self, prompt: Prompt, within_s: float) -> None:
        """There is nothing to compute but this prompt."""
        self.release(prompt)
        self._wait(prompt, self.read_buffer.first_use, within_s)

    def await_layer(self, prompt: Prompt, layer: int) -> None:
        """Until this layer of the prompt's history is there. Raises LoadFellShort."""
        load = prompt.load
        assert load is not None
        while not load.arrived(layer):
            patience_s = self._patience_s(prompt)
            if not patience_s:
                raise LoadFellShort(self._worth_keeping(prompt), given_up=not load.ended)
            self._wait(prompt, layer, min(patience_s, LOOK_S))
        blocks = load.wait(layer, Deadline.after(0))
        if blocks < prompt.loaded_blocks:
            raise LoadFellShort(blocks, given_up=False)

    def ended(self, prompt: Prompt) -> None:
        """All layers were waited for."""
        load, prompt.load = prompt.load, None
        assert load is not None
        if prompt.loaded_blocks:
            self._cost.loaded(load.bytes, load.seconds)

    def set_back(self, prompt: Prompt, short: LoadFellShort) -> None:
        """Goes on with fewer blocks; when this returns, nothing writes to the others any more."""
        load = prompt.load
        assert load is not None
        log.info(
            "history fell short",
            extra={
                "attempt": prompt.request.request_id,
                "wanted": prompt.loaded_blocks,
                "loaded": short.blocks,
                "given_up": short.given_up,
            },
        )
        prompt.reuse(loaded=short.blocks)
        if not short.given_up:  # else the store has them, if slowly
            prompt.save_from = min(prompt.save_from, prompt.reused_blocks)
        prompt.waited_before_s = prompt.load_wait_s
        if short.blocks:
            load.narrow(short.blocks)
        else:
            load.cancel()
            prompt.load = None

    def _wait(self, prompt: Prompt, layer: int, within_s: float) -> None:
        assert prompt.load is not None
        before = time.monotonic()
        prompt.load.arrived(layer, within_s)
        prompt.load_wait_s += time.monotonic() - before

    def _patience_s(self, prompt: Prompt) -> float:
        """How much longer to wait for the next layer."""
        load = prompt.load
        assert load is not None
        if load.ended:
            return 0.0
        loaded = _behind_device(prompt)[: prompt.loaded_blocks * prompt.block_tokens]
        return self._cost.patience_s(
            positions=range(prompt.tokens) if prompt.needs_loaded else loaded,
            waited_s=prompt.load_wait_s - prompt.waited_before_s,
            pace_s=self._pace_s(prompt),
            layers_left=len(self._core.layers) - load.layers_arrived,
        )

    def _pace_s(self, prompt: Prompt) -> float:
        """What a layer of the blocks that are still loaded takes, by those that came; 0 where none has."""
        load = prompt.load
        assert load is not None
        whole = load.bytes // self._core.block_bytes
        return load.pace_s * prompt.loaded_blocks / whole

    def _worth_keeping(self, prompt: Prompt) -> int:
        """Of a load that fell behind."""
        load = prompt.load
        assert load is not None
        arrived, layers = load.layers_arrived, len(self._core.layers)
        # It was no faster than this, which the next decision should know.
        self._cost.loaded(load.bytes * max(arrived, 1) // layers, max(load.seconds, prompt.load_wait_s))
        if load.ended or prompt.needs_loaded:
            return 0
        return self._cost.blocks_to_keep(
            prompt.loaded_blocks,
            block_tokens=prompt.block_tokens,
            positions=_behind_device(prompt),
            pace_s=self._pace_s(prompt),
            layers_left=layers - arrived,
        )


def _behind_device(prompt: Prompt) -> range:
    """Its positions behind what was found here."""
    return range(prompt.device_blocks * prompt.block_tokens, prompt.tokens)
