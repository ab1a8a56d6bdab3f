"""A sequence whose prompt is computed here, on its way to its first token. Values and bookkeeping, no I/O."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvcommons.engine.chunk_rows import ChunkRows
from kvcommons.engine.history import Load
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import Sequence
from kvcommons.errors import DataLoss, KVCommonsError
from kvcommons.pb import common_pb2 as pb
from kvcommons.pb import prefill_pb2

NOT_HERE = -1  # in a prompt's blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A prompt's result: the token that follows it, and where its KV came from."""

    token: pb.SampledToken
    cached_tokens: int  # whose KV was found
    device_tokens: int  # of those, in this instance's own memory
    queue_us: int
    compute_us: int
    load_wait_us: int

    def message(self) -> prefill_pb2.PrefillFirst:
        return prefill_pb2.PrefillFirst(
            token=self.token,
            cached_tokens=self.cached_tokens,
            device_tokens=self.device_tokens,
            queue_us=self.queue_us,
            compute_us=self.compute_us,
            load_wait_us=self.load_wait_us,
        )


class PromptSink(Protocol):
    """Where a prompt's KV goes and what becomes of it when it is computed: what differs between an instance
    that hands prompts over and one that goes on with them. Called on the engine's thread, in the context of
    the call that asked for the prompt; nothing here may block."""

    @property
    def failure(self) -> KVCommonsError | None:
        """Why nobody wants the prompt any more; its computation ends with that."""

    @property
    def goes_on(self) -> bool:
        """Whether the sequence generates here when its prompt is computed; else it holds nothing here any
        more."""

    def began(self, prompt: Prompt, queued_us: int) -> None:
        """Its first chunk is computed next."""

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        """One layer of these blocks of the sequence is final."""

    def scored(self, prompt: Prompt, logprobs: pb.PromptLogprobs) -> None:
        """Of its own tokens, in order and before the end, where its request asks for them."""

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        """All of it is computed."""

    def refused(self, error: KVCommonsError) -> None:
        """It was not taken: its sequence is still the caller's."""

    def failed(self, error: KVCommonsError) -> None:
        """It ended without a token."""

    def cancelled(self) -> None:
        """Nobody wants it any more."""


class StaysHere:
    """The `PromptSink` of a prompt whose sequence generates on the instance that computed it: its KV is where
    it belongs."""

    goes_on = True

    def __init__(self, job: pb.Job | None = None) -> None:
        """`job`: as it came, where other stages have to be told of it."""
        self.job = job

    @property
    def failure(self) -> KVCommonsError | None:
        return None

    def began(self, prompt: Prompt, queued_us: int) -> None:
        """Nothing to do: the result says how long the prompt was queued."""

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        """Nothing to do: the blocks are where they belong."""

    def scored(self, prompt: Prompt, logprobs: pb.PromptLogprobs) -> None:
        raise AssertionError("a prompt whose logprobs are asked for is not taken")

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        """Nothing to do: its sequence goes on."""

    def refused(self, error: KVCommonsError) -> None:
        """Nothing to do: nobody asked."""

    def failed(self, error: KVCommonsError) -> None:
        """Nothing to do: its sequence ends."""

    def cancelled(self) -> None:
        """Nothing to do: the caller that cancels knows."""


class PromptMemory(Protocol):
    """How a prompt comes by the blocks that its KV is computed in."""

    @property
    def keeps(self) -> bool:
        """Whether blocks stay here for others to find; else they are here only while their chunk is."""

    def check(self, prompt: Prompt) -> None:
        """Raises CapacityExhausted for a prompt that can never be computed here."""

    def take(self, prompt: Prompt) -> bool:
        """Finds what can be reused (`device_blocks`) and allocates the rest. False: ask again later. Raises
        CapacityExhausted."""

    def chunk(self, prompt: Prompt, tokens: int) -> range:
        """Positions of its next chunk, of so many tokens at most."""

    def work(self, chunk: range) -> IterationWork:
        """Of a chunk of these positions, by where what is before it lies."""

    def open(self, prompt: Prompt, chunk: range) -> bool:
        """Whether the chunk can be computed now. Raises what ends the prompt."""

    def rows(self, prompt: Prompt, chunk: range) -> ChunkRows: ...

    def close(self, prompt: Prompt) -> None:
        """A chunk has ended, or the prompt."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt:
    """Its sequence's leading tokens are reused from this instance's memory (`device_blocks`), then from the
    store (`loaded_blocks`), or lie where the sequence's other holders are (`placed_blocks`); the rest is
    computed. `sequence.computed` counts reused tokens as soon as it is decided that they are reused."""

    sequence: Sequence
    sink: PromptSink
    memory: PromptMemory
    deadline_s: float
    submitted_s: float
    blocks: list[int] = field(default_factory=list)  # physical, by index in the sequence; NOT_HERE: elsewhere
    table: Tensor | None = None  # all of them, where they are here from the first chunk to the end
    device_blocks: int = 0
    loaded_blocks: int = 0
    placed_blocks: int = 0
    save_from: int = 0  # the store is not known to have blocks from here on
    admitted_s: float = 0.0
    compute_s: float = 0.0
    load_wait_s: float = 0.0
    load: Load | None = None
    released: bool = False  # its load may read all layers
    ahead_bytes: int = 0  # of the read buffer, while its load is held back
    waited_before_s: float = 0.0  # of `load_wait_s`: for a load of more blocks, which fell behind

    @property
    def key(self) -> int:
        return self.sequence.key

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def block_tokens(self) -> int:
        return self.sequence.block_tokens

    @property
    def ids(self) -> Items[bytes]:
        """Identities of all full blocks."""
        return self.sequence.chain.ids

    @property
    def tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def tokens_left(self) -> int:
        return self.tokens - self.sequence.computed

    @property
    def total_blocks(self) -> int:
        """The last one maybe partly filled."""
        return -(-self.tokens // self.block_tokens)

    @property
    def reused_blocks(self) -> int:
        return self.device_blocks + self.loaded_blocks + self.placed_blocks

    @property
    def reused_tokens(self) -> int:
        return self.reused_blocks * self.block_tokens

    def reusable(self) -> Items[bytes]:
        """Identities of the blocks that may be found instead of computed: the last token is always
        computed."""
        return self.ids[: self.request.reusable(self.block_tokens)]

    @property
    def lacks_history(self) -> bool:
        """What was found ends before the part of a truncated sequence that can be computed."""
        return self.sequence.computed < self.request.truncated.since_token

    @property
    def needs_loaded(self) -> bool:
        """What is loaded cannot be computed: it is from before a truncation."""
        return self.device_blocks * self.block_tokens < self.request.truncated.since_token

    def check_history(self) -> None:
        """Raises DataLoss where it lacks."""
        if self.lacks_history:
            raise DataLoss(
                f"{self.request.truncated.since_token} tokens were computed before a truncation, and KV of "
                f"{self.sequence.computed} is there: make it again by a replay"
            )

    def loadable_blocks(self) -> int:
        """Blocks to ask the store for, after those that this instance has."""
        if not self.request.store_data:
            return 0
        return max(0, min(self.request.matched_blocks, len(self.reusable())) - self.device_blocks)

    def reuse(
        self, *, device: int | None = None, loaded: int | None = None, placed: int | None = None
    ) -> None:
        """So many blocks are reused: what follows them is computed. None: as many as before."""
        self.device_blocks = self.device_blocks if device is None else device
        self.loaded_blocks = self.loaded_blocks if loaded is None else loaded
        self.placed_blocks = self.placed_blocks if placed is None else placed
        self.sequence.computed = self.reused_tokens

    def chunk(self, tokens: int) -> range:
        """Positions of the next chunk. It ends at a block's border where it reaches one."""
        first = self.sequence.computed
        end = min(first + tokens, self.tokens)
        border = end // self.block_tokens * self.block_tokens
        return range(first, border if first < border and end < self.tokens else end)

    def completed_blocks(self, chunk: range) -> range:
        """Blocks that are final once the chunk is computed; with the last chunk the last one, maybe partly
        filled, is too."""
        last = -(-chunk.stop // self.block_tokens)
        if chunk.stop < self.tokens:
            last = chunk.stop // self.block_tokens
        return range(chunk.start // self.block_tokens, last)

    def result(self, token: pb.SampledToken) -> FirstToken:
        return FirstToken(
            token=token,
            cached_tokens=self.reused_tokens,
            device_tokens=self.device_blocks * self.block_tokens,
            queue_us=int((self.admitted_s - self.submitted_s) * 1e6),
            compute_us=int(self.compute_s * 1e6),
            load_wait_us=int(self.load_wait_s * 1e6),
        )
