"""The cells that servers are compared in, and how one is measured over a server's completions API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.peers.bounds import Rates, Rows, iteration_s
from benchmarks.peers.named import RunningServer
from benchmarks.streams import ask, at_once, prompt
from devstack.rest import RestClient
from kvcommons.errors import Unavailable
from kvcommons.model.spec import ModelSpec

Kind = Literal["prefill", "decode", "cached", "restarted"]
_FIXED = 7_000_000  # seeds of prompts that a server has seen before
# Of each answer of a batch, for every answer in it: the last one begins before the first one has ended.
_ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`prefill`: the first token of a prompt that is new. `decode`: a token of each of `batch` answers of
    `answer` tokens at once, behind `tokens` of context. `cached`: the first token of `new` tokens behind
    `tokens` that the server has seen before. `restarted`: the same as the first request of a server that was
    killed since."""

    kind: Kind
    tokens: int
    batch: int = 1
    new: int = 0
    answer: int = 1

    @property
    def name(self) -> str:
        if self.kind == "decode":
            return f"decode, {self.batch} at once, context {self.tokens:,}"
        if self.kind in ("cached", "restarted"):
            killed = ", killed since" if self.kind == "restarted" else ""
            return f"first token of {self.new} after {self.tokens:,} cached{killed}"
        return f"first token of {self.tokens:,}"

    @property
    def made_tokens(self) -> int:
        """Of which a second's number is the cell's speed."""
        return {"prefill": self.tokens, "decode": self.batch}.get(self.kind, self.new)

    def bound_s(self, spec: ModelSpec, rates: Rates) -> float:
        """The least time that this machine needs for what is measured."""
        if self.kind == "decode":
            return iteration_s(spec, rates, [Rows(count=1, history=self.tokens)] * self.batch)
        if self.kind in ("cached", "restarted"):
            return iteration_s(spec, rates, [Rows(count=self.new, history=self.tokens)])
        return iteration_s(spec, rates, [Rows(count=self.tokens, history=0)])

    def prepare(self, client: RestClient) -> None:
        """Once, before it is measured: the server has seen the prompts that are no new ones. A slow one would
        end the first answers of a batch before it has computed the last prompts."""
        for ids in self._seen():
            ask(client, ids, 1)

    def _seen(self) -> list[list[int]]:
        if self.kind == "decode":
            return [prompt(_FIXED + 1 + at, self.tokens) for at in range(self.batch)]
        return [prompt(_FIXED, self.tokens)] if self.kind in ("cached", "restarted") else []

    def measure(self, server: RunningServer, serial: int) -> float:
        """Seconds, to a first token or between two tokens of a batch. No two calls with different serials
        have a new prompt in common; raises what the server refuses."""
        if self.kind == "restarted":
            server.restart()
        client = server.client
        if self.kind == "prefill":
            return ask(client, prompt(serial, self.tokens), 1).first_s
        if self.kind in ("cached", "restarted"):
            return ask(client, self._seen()[0] + prompt(serial, self.new), 1).first_s
        streams = at_once(client, self._seen(), self.answer)
        # While all of them are under way: before it some wait for their prompts, after it fewer are left.
        times_s = [stream.times_s for stream in streams]
        first_s, last_s = max(some[0] for some in times_s), min(some[-1] for some in times_s)
        came = sum(first_s < at_s <= last_s for some in times_s for at_s in some)
        if last_s <= first_s or not came:
            raise Unavailable(
                f"{self.name}: answers of {self.answer} tokens were never all under way at once"
            )
        return (last_s - first_s) * self.batch / came


def grid(window: int, answer_tokens: int) -> list[Cell]:
    """All cells that fit into a context window. `answer_tokens`: where decoding is measured, at least."""
    cells = [Cell(kind="prefill", tokens=8)]
    cells += [Cell(kind="prefill", tokens=tokens) for tokens in (512, 2048, 8192)]
    cells += [
        Cell(kind="decode", batch=batch, tokens=tokens, answer=max(answer_tokens, _ANSWER_TOKENS * batch))
        for batch, contexts in ((1, (512, 2048, 8192)), (8, (512, 2048, 8192)), (32, (512, 2048)))
        for tokens in contexts
    ]
    cells += [Cell(kind=kind, tokens=2048, new=64) for kind in ("cached", "restarted")]
    return [cell for cell in cells if cell.tokens + cell.new + cell.answer <= window]


def kv_tokens(cells: Sequence[Cell]) -> int:
    """Room for the KV of the largest cell, and as much again for what was asked before it."""
    return 2 * max(cell.batch * (cell.tokens + cell.new + cell.answer + 64) for cell in cells)
