"""A session's context: which of its tokens a turn sees, and what the KV of each was computed with. Pure.

AttentionStore, section 3.4; docs/truncation.md is its page. A truncation drops the oldest blocks behind the
system prompt. What is left keeps its KV, which was computed with the dropped tokens in view; tokens that come
later see the shorter context. So a session has excerpts, one more than truncations, and its KV can be made
again only by computing them in turn. A truncation at token 0 says that it was not worth that: what is kept
then was computed anew, as a plain prompt, and excerpts are counted from there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from kvcommons.pb import common_pb2
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.rblock.identity import IdentityChain, block_id, reusable_blocks
from kvcommons.token_ids import token_array

# An answer whose length the request does not bound is expected to need this share of the window.
_ANSWER_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """As TruncationRecord in kvstore.proto: in tokens, all multiples of a block."""

    at_token: int
    head_tokens: int
    dropped_tokens: int

    @classmethod
    def of(cls, record: pb.TruncationRecord) -> Truncation:
        return cls(
            at_token=record.at_token,
            head_tokens=record.kept_head_tokens,
            dropped_tokens=record.dropped_tokens,
        )

    def record(self) -> pb.TruncationRecord:
        return pb.TruncationRecord(
            at_token=self.at_token,
            kept_head_tokens=self.head_tokens,
            dropped_tokens=self.dropped_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """What is in sight between two truncations: `tokens`, the head and then the rest, and the identities of
    their full blocks. Those from `since_token` on were computed in this excerpt. `dropped_tokens`: see
    Truncated in common.proto."""

    tokens: Sequence[int]
    ids: Sequence[bytes]
    head_tokens: int
    dropped_tokens: int
    since_token: int
    parent: bytes  # of the block at since_token
    block_tokens: int

    @property
    def since_block(self) -> int:
        """Blocks before it can only be found."""
        return self.since_token // self.block_tokens

    def message(self) -> common_pb2.Truncated | None:
        """None for a plain prompt."""
        if not self.dropped_tokens:
            return None
        return common_pb2.Truncated(
            head_tokens=self.head_tokens,
            dropped_tokens=self.dropped_tokens,
            since_token=self.since_token,
            block_ids=self.ids[: self.since_block],
            parent=self.parent,
        )


class Context:
    """The excerpts of a sequence. `kv` says what became of a turn's history: "kept", "replayed" where
    excerpts were computed again, "recomputed" where the turn begins with a truncation at token 0."""

    def __init__(
        self,
        *,
        salt: bytes,
        model: ModelInfo,
        tokens: Sequence[int],
        truncations: Sequence[Truncation] = (),
        known_ids: Sequence[bytes] = (),
    ) -> None:
        """`tokens`: all that the session ever had, and the turn's new ones. `known_ids`: of the session's
        full blocks, as its record has them; to compute those of 100,000 tokens would hold up everybody."""
        self.kv = "kept"
        self.dropped_tokens = sum(one.dropped_tokens for one in truncations)
        self._salt = salt
        self._model = model
        plain = max((at + 1 for at, one in enumerate(truncations) if not one.at_token), default=0)
        head = truncations[-1].head_tokens if truncations else 0
        gone = sum(one.dropped_tokens for one in truncations[:plain])
        self._known_ids = known_ids if not truncations else ()
        whole = token_array(tokens)
        self.excerpts = self._excerpts(whole[:head] + whole[head + gone :], gone, truncations[plain:])

    def _excerpts(self, tokens: array[int], gone: int, truncations: Sequence[Truncation]) -> list[Excerpt]:
        """`tokens` are those of the session but for `gone` ones, whose KV nobody needs any more."""
        size = self._model.block_tokens
        first = block_id(self._salt, self._model.fingerprint, b"", tokens[:size])
        # Where secret, model and layout are what they were, so is the first identity, and so are all others.
        known = self._known_ids if first in self._known_ids[:1] else ()
        chain = IdentityChain(self._salt, self._model.fingerprint, size, ids=known)
        starts, dropped, parents = [0], [0], [b""]
        for one in truncations:
            starts.append(one.at_token - gone)
            dropped.append(dropped[-1] + one.dropped_tokens)
            chain.extend(tokens[chain.tokens : starts[-1]])
            chain.truncate(head_tokens=one.head_tokens, dropped_tokens=dropped[-1])
            parents.append(chain.parent)
        chain.extend(tokens[chain.tokens :])
        excerpts = []
        for number, start in enumerate(starts):
            head = truncations[0].head_tokens if number else 0
            rest = head + dropped[number]
            end = starts[number + 1] if number + 1 < len(starts) else len(tokens)
            excerpts.append(
                Excerpt(
                    tokens=tokens[:head] + tokens[rest:end],
                    ids=[*chain.ids[: head // size], *chain.ids[rest // size : end // size]],
                    head_tokens=head,
                    dropped_tokens=dropped[number],
                    since_token=start - dropped[number],
                    parent=parents[number],
                    block_tokens=size,
                )
            )
        return excerpts

    @property
    def truncated(self) -> bool:
        """Something was dropped, or what was kept was computed anew."""
        return bool(self.dropped_tokens) or self.kv != "kept"

    @property
    def now(self) -> Excerpt:
        """What the turn sees."""
        return self.excerpts[-1]

    def up_to(self, tokens: int) -> Context:
        """The same for a turn that sees the first `tokens` of these; no earlier excerpt has all of them."""
        cut, now = copy(self), self.now
        ids = now.ids[: tokens // now.block_tokens]
        cut.excerpts = [*self.excerpts[:-1], replace(now, tokens=now.tokens[:tokens], ids=ids)]
        return cut

    def chain(self) -> IdentityChain:
        """Of the turn's tokens; to be extended."""
        now = self.now
        parent = now.parent if len(now.ids) == now.since_block else b""
        chain = IdentityChain(
            self._salt, self._model.fingerprint, self._model.block_tokens, parent=parent, ids=now.ids
        )
        chain.extend(now.tokens[chain.tokens :])
        return chain


def answer_tokens_of(max_tokens: int | None, window: int) -> int:
    """Tokens that an answer wants."""
    return window // _ANSWER_SHARE if max_tokens is None else max_tokens


def truncation_for(
    *,
    kept_tokens: int,
    dropped_tokens: int,
    head_tokens: int,
    new_tokens: int,
    answer_tokens: int,
    window: int,
    ratio: float,
    block_tokens: int,
) -> Truncation | None:
    """The truncation that a turn of `new_tokens` begins with; None where all fits, or nothing can go.

    `kept_tokens` of the history are in sight and `dropped_tokens` not any more. What goes is `ratio` of the
    window, or as much as the turn needs, of the blocks after the head whose KV is complete. Whether the turn
    fits then is for the caller to see.
    """
    short = kept_tokens + new_tokens + answer_tokens - window
    if short <= 0:
        return None
    complete = reusable_blocks(kept_tokens, block_tokens) * block_tokens
    wanted = math.ceil(max(ratio * window, short) / block_tokens) * block_tokens
    dropped = min(wanted, complete - head_tokens)
    if dropped <= 0:
        return None
    return Truncation(at_token=complete + dropped_tokens, head_tokens=head_tokens, dropped_tokens=dropped)


def recomputed(truncations: Sequence[Truncation], new: Truncation | None) -> Truncation:
    """Stands for `new`, where there is one: the turn begins with a plain prompt of what is kept."""
    head = new.head_tokens if new is not None else truncations[-1].head_tokens
    return Truncation(
        at_token=0, head_tokens=head, dropped_tokens=new.dropped_tokens if new is not None else 0
    )


def replay_costs(excerpts: Sequence[Excerpt], found: Sequence[int]) -> tuple[int, int]:
    """From which excerpt on a replay begins, and how many tokens it and the turn compute. `found`: leading
    blocks of each excerpt that are stored."""
    first = len(excerpts) - 1
    while found[first] < excerpts[first].since_block:
        first -= 1
    cost = 0
    for number in range(first, len(excerpts)):
        excerpt = excerpts[number]
        # What an earlier excerpt of the replay has computed need not be computed again.
        have = max(found[number], excerpt.since_block) * excerpt.block_tokens
        cost += len(excerpt.tokens) - min(have, len(excerpt.tokens))
    return first, cost
