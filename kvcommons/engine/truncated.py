"""A sequence behind truncations, as prefill and decode see it (AttentionStore, section 3.4; see
docs/truncation.md).

Its tokens are those of its context: a head that was kept, then the rest. Everything here counts in these
tokens. The KV of the rest is rotated for positions `dropped_tokens` further on, for it was computed before
others were dropped, or behind KV that was; the head's is rotated for its place. So rows of the rest are
rotated `dropped_tokens` further on, and meet the head with a query rotated for their place (the head's
shift). Scores depend on distances only: nothing of what is stored changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.errors import InvalidInput
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.identity import ID_BYTES, IdentityChain


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated:
    """All zero: nothing was dropped. Tokens from `since_token` on were, or are to be, computed in this
    context; the KV of those before can only be found, for they saw more. `ids` are of the leading full
    blocks, and `parent` is what the next one is chained from."""

    head_tokens: int = 0
    dropped_tokens: int = 0
    since_token: int = 0
    ids: tuple[bytes, ...] = ()
    parent: bytes = b""

    @classmethod
    def of(cls, message: pb.Truncated, tokens: int, block_tokens: int) -> Truncated:
        """Of a request with so many tokens. Raises InvalidInput."""
        counts = (message.head_tokens, message.dropped_tokens, message.since_token)
        if any(count % block_tokens for count in counts):
            raise InvalidInput(f"truncated: counts are of blocks of {block_tokens} tokens", param="truncated")
        known = len(message.block_ids) * block_tokens
        if not message.head_tokens <= message.since_token <= known <= tokens:
            raise InvalidInput(
                "truncated: the head ends before since_token, and all blocks before that have identities",
                param="truncated",
            )
        if any(len(one) not in (0, ID_BYTES) for one in (*message.block_ids, message.parent)):
            raise InvalidInput(f"truncated: an identity has {ID_BYTES} bytes", param="truncated")
        return cls(
            head_tokens=message.head_tokens,
            dropped_tokens=message.dropped_tokens,
            since_token=message.since_token,
            ids=tuple(message.block_ids),
            parent=message.parent,
        )

    @property
    def shifted_head_tokens(self) -> int:
        """Tokens whose KV is met with a query of its own."""
        return self.head_tokens if self.dropped_tokens else 0

    def chain(self, salt: bytes, model: bytes, block_tokens: int, tokens: Sequence[int]) -> IdentityChain:
        """Identities of all full blocks of `tokens`."""
        chain = IdentityChain(salt, model, block_tokens, parent=self.parent, ids=self.ids)
        chain.extend(tokens[chain.tokens :])
        return chain


WHOLE = Truncated()
