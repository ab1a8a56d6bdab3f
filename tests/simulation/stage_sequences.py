"""What the stages of a schedule compute: prompts and sequences of a token a block."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcommons.engine.prompt import FirstToken, StaysHere
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.sequence import LocalRun
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2, prefill_pb2
from kvcommons.prefill.push import Delivery
from kvcommons.prefill.targets import TargetTable
from kvcommons.stages.epoch import EpochState
from kvcommons.stages.group import StagedHandOver
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from tests.simulation.stage_schedule import StageSchedule

Label = tuple[int, ...]
NOTHING: Label = (-1,)  # what a block has of a sequence that was lost


class SimulatedPrompt:
    """One token a block. `tell` takes the queueing time, then the result. The blocks of one that is `spread`
    are in memory only until they are where they are attended over."""

    block_tokens = 1

    def __init__(self, world: StageSchedule, key: int, tokens: Label, *, spread: bool) -> None:
        self.key, self.tokens, self.spread = key, tokens, spread
        self.targets = TargetTable(())  # a place for each block, which come while it is computed
        self.memory: Any = SimpleNamespace(keeps=not spread)
        self.labels = [tokens[: index + 1] for index in range(len(tokens))]
        self.ids = [bytes(label) for label in self.labels]
        self.reported: list[int | FirstToken | KVCommonsError] = []
        self.delivery = Delivery(Deadline.after(1e6), "")
        asked = prefill_pb2.PrefillRequest()
        self.sink = StagedHandOver(
            world.group, asked, key, world.pusher, self.delivery, self.targets, self.tell
        )
        self.blocks: list[int] = []
        self.device_blocks = self.loaded_blocks = self.placed_blocks = self.save_from = self.computed = 0
        self.leaving: int | None = None  # of a spread one: a block on its way from the first stage
        self.world = world
        self.ended = False

    def join(self, blocks: int) -> None:
        """So many of its leading blocks have places."""
        for block in range(len(self.targets.places), min(blocks, len(self.labels))):
            self.targets.add([common_pb2.SegmentPlace(first_block=block, blocks=1)])

    def tell(self, event: int | FirstToken | KVCommonsError) -> None:
        self.reported.append(event)
        if not isinstance(event, KVCommonsError):
            for number in (*self.world.stage, *([0] if self.spread else [])):
                for label in self.labels:
                    if (number, self.key, label) not in self.world.arrived:
                        raise AssertionError(f"a token, though stage {number} has not delivered {label}")


class SimulatedSequence:
    """It generates here, one token a block; its prompt's KV is written to each process by itself. A token
    follows from those before it."""

    def __init__(self, world: StageSchedule, key: int, prompt: Label, new: int) -> None:
        self.key, self.prompt, self.new = key, prompt, new
        self.tokens = list(prompt)
        self.computed = len(prompt)
        self.physical: list[int] = []
        self.shared = 0
        members = range(world.stages * world.tensor)
        self.unwritten = {(number, index) for number in members for index in range(len(prompt))}
        self.sampled = False  # its first token, by prefill
        self.ended = False
        self.results: list[str] = []

    @property
    def blocks(self) -> int:
        return len(self.physical)

    def local_blocks(self) -> list[int]:
        return list(self.physical)

    @property
    def runs(self) -> list[LocalRun]:
        return self.runs_from(0)

    def runs_from(self, block: int) -> list[LocalRun]:
        return [LocalRun(first_block=block, blocks=self.physical[block:])]

    @property
    def started(self) -> bool:
        """Its prompt is everywhere, and its first token was heard."""
        return len(self.tokens) > len(self.prompt)


class SimulatedLocal(SimulatedSequence):
    """Its prompt is computed here, a token a chunk; before the first one its leading blocks may become
    others'."""

    spread = False

    def __init__(self, world: StageSchedule, key: int, prompt: Label, new: int) -> None:
        super().__init__(world, key, prompt, new)
        self.formed: EpochState | None = None  # the epoch in which it was given its blocks
        self.unwritten.clear()
        self.sampled = True
        self.sequence = self
        self.sink = StaysHere(common_pb2.Job())
        self.memory: Any = SimpleNamespace(keeps=True)
        self.labels = [prompt[: index + 1] for index in range(len(prompt))]
        self.device_blocks = self.loaded_blocks = self.save_from = 0
        self.admitted = False
        self.computed = 0


def following(tokens: Sequence[int]) -> int:
    return (sum(tokens) + len(tokens)) % 2


class SimulatedRows(TokenRows):
    """A token of each of these; of those in `lost` something could not be attended over."""

    def __init__(self, sequences: list[Any], lost: dict[int, KVCommonsError]) -> None:
        self.batch: Any = SimpleNamespace(sequences=sequences)
        self._lost = lost

    @property
    def lost(self) -> dict[int, KVCommonsError]:
        return self._lost


class SimulatedSpan(PromptSpan):
    """The next block of a prompt."""

    def __init__(self, prompt: Any, chunk: range) -> None:
        self.prompt, self.chunk = prompt, chunk
