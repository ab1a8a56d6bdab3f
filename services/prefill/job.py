"""A job: one prompt on its way to its first token. Values and bookkeeping, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcommons.engine.request import Request
from kvcommons.errors import DataLoss
from kvcommons.pb import common_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A segment at a holder's data address."""

    data_address: str
    handle: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run of the sequence's blocks at the holder that will attend over them, or at the `parts` of a head
    group: each takes its heads of them."""

    data_address: str
    handle: int
    epoch: int
    first_block: int
    blocks: int
    parts: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """One, or the parts in order."""
        alone = Place(data_address=self.data_address, handle=self.handle, epoch=self.epoch)
        return self.parts or (alone,)

    @classmethod
    def of(cls, placement: pb.Placement) -> Target:
        return cls(
            data_address=placement.data_address,
            handle=placement.handle,
            epoch=placement.epoch,
            first_block=placement.first_block,
            blocks=placement.blocks,
            parts=tuple(
                Place(data_address=part.data_address, handle=part.handle, epoch=part.epoch)
                for part in placement.parts
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """A job's result."""

    token: pb.SampledToken
    cached_tokens: int
    device_tokens: int
    queue_us: int
    compute_us: int
    load_wait_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Blocks `first` … of a job (indices in the sequence) that go to one target."""

    target: Target
    first: int
    count: int


def writes(targets: Iterable[Target], first: int, count: int) -> list[Write]:
    """Which targets blocks [first, first + count) of a sequence go to, and which of them to each."""
    found = []
    for target in targets:
        begin = max(first, target.first_block)
        end = min(first + count, target.first_block + target.blocks)
        if begin < end:
            found.append(Write(target=target, first=begin, count=end - begin))
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Blocks are reused from this instance's memory (`device_blocks`), then from the store (`loaded_blocks`),
    or where the prompt's targets are (`placed_blocks`), and the rest is computed: `done_tokens` have KV so
    far, reused ones included."""

    key: int
    request: Request
    targets: tuple[Target, ...] = ()  # where the blocks go
    push_from: int = 0  # blocks before it are there already, or load there themselves
    block_tokens: int
    deadline_s: float
    submitted_s: float
    ids: list[bytes]  # of all full blocks
    blocks: list[int] = field(default_factory=list)  # physical, in order; held while the job runs
    device_blocks: int = 0
    loaded_blocks: int = 0
    spread: bool = False  # beyond this instance's memory: only a chunk's own blocks are here
    placed_blocks: int = 0  # of a spread job
    save_from: int = 0  # the store is not known to have blocks from here on
    done_tokens: int = 0
    admitted_s: float = 0.0
    compute_s: float = 0.0
    load_wait_s: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def tokens_left(self) -> int:
        return self.tokens - self.done_tokens

    @property
    def total_blocks(self) -> int:
        """The last one maybe partly filled."""
        return -(-self.tokens // self.block_tokens)

    @property
    def push_from_block(self) -> int:
        """A spread job's blocks are attended over where they lie: all that is not there yet is pushed."""
        return self.placed_blocks if self.spread else self.push_from

    @property
    def reused_blocks(self) -> int:
        return self.device_blocks + self.loaded_blocks + self.placed_blocks

    @property
    def reused_tokens(self) -> int:
        return self.reused_blocks * self.block_tokens

    def reusable(self) -> list[bytes]:
        """Identities of the blocks that may be found instead of computed: the last token is always
        computed."""
        return self.ids[: self.request.reusable(self.block_tokens)]

    @property
    def lacks_history(self) -> bool:
        """What was found ends before the part of a truncated sequence that can be computed."""
        return self.done_tokens < self.request.truncated.since_token

    @property
    def needs_loaded(self) -> bool:
        """What is loaded cannot be computed: it is from before a truncation."""
        return self.device_blocks * self.block_tokens < self.request.truncated.since_token

    def check_history(self) -> None:
        """Raises DataLoss where it lacks."""
        if self.lacks_history:
            raise DataLoss(
                f"{self.request.truncated.since_token} tokens were computed before a truncation, and KV of "
                f"{self.done_tokens} is there: make it again by a replay"
            )

    def loadable_blocks(self) -> int:
        """Blocks to ask the store for, after those that this instance has."""
        if not self.request.store_data:
            return 0
        return max(0, min(self.request.matched_blocks, len(self.reusable())) - self.device_blocks)

    def place(self, blocks: int) -> None:
        """So many leading blocks of a spread job lie at its targets."""
        self.placed_blocks = blocks
        self.done_tokens = self.reused_tokens

    def set_back(self, loaded_blocks: int) -> None:
        """Only so many blocks could be loaded: what follows them is computed."""
        self.loaded_blocks = loaded_blocks
        self.done_tokens = self.reused_tokens

    def chunk(self, chunk_tokens: int) -> range:
        """Positions of the next chunk. All but a job's last chunk end at a block's border."""
        return range(self.done_tokens, min(self.done_tokens + chunk_tokens, self.tokens))

    def covered_blocks(self, chunk: range) -> range:
        """Blocks that a chunk fills, the last one maybe partly."""
        return range(chunk.start // self.block_tokens, -(-chunk.stop // self.block_tokens))

    def generated(self) -> dict[int, int]:
        """How often each token after the prompt boundary came, for penalties."""
        counts: dict[int, int] = {}
        for token in self.request.tokens[self.request.prompt_tokens :]:
            counts[token] = counts.get(token, 0) + 1
        return counts
