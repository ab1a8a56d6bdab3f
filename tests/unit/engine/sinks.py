"""A prompt's sink for tests: it keeps what it hears."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvcommons.engine.prompt import FirstToken, Prompt
from kvcommons.errors import KVCommonsError
from kvcommons.pb import common_pb2 as pb


@dataclass(slots=True)
class RecordingSink:
    """`runs`: blocks that became final, each with the layer, in the order in which they did."""

    goes_on: bool = False
    failure: KVCommonsError | None = None
    runs: list[tuple[int, range]] = field(default_factory=list)
    logprobs: list[pb.PromptLogprobs] = field(default_factory=list)
    first: FirstToken | None = None
    error: KVCommonsError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def layers(self) -> list[int]:
        return [layer for layer, _ in self.runs]

    def began(self, prompt: Prompt, queued_us: int) -> None:
        assert queued_us >= 0

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        self.runs.append((layer, blocks))

    def scored(self, prompt: Prompt, logprobs: pb.PromptLogprobs) -> None:
        assert self.first is None
        self.logprobs.append(logprobs)

    def finished(self, prompt: Prompt, first: FirstToken) -> None:
        self.first = first
        self.ended.set()

    def refused(self, error: KVCommonsError) -> None:
        self.failed(error)

    def failed(self, error: KVCommonsError) -> None:
        self.error = error
        self.ended.set()

    def cancelled(self) -> None:
        self.ended.set()
