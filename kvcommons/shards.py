"""Which kvstore has which session and which blocks: rendezvous hashing over the shards of a view. Pure.

Every shard gets a score for every key; the highest scores own it (Thaler and Ravishankar, "Using name-based
mappings to increase hit rates", 1998). A shard that comes or goes moves only the keys that it wins or loses.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvcommons.pb import shards_pb2 as pb

COPIES = 2  # of a session's record, where there are so many shards


def session_key(tenant: str, session_id: str) -> bytes:
    """Also the session's key on disk: docs/formats/session-record.md."""
    name = tenant.encode()
    return struct.pack(">H", len(name)) + name + session_id.encode()


def owners(key: bytes, shards: Collection[str], count: int = COPIES) -> tuple[str, ...]:
    """The first `count` shards for a key, best first. The order of `shards` does not matter."""
    if len(shards) <= 1:
        return tuple(shards)
    digest = blake2b(key, digest_size=16).digest()

    def score(shard: str) -> tuple[bytes, str]:
        return blake2b(digest + shard.encode(), digest_size=16).digest(), shard

    return tuple(sorted(shards, key=score, reverse=True)[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """Who serves: of all views, the one with the highest epoch counts. See shards.proto."""

    epoch: int
    serving: tuple[str, ...]
    joining: tuple[str, ...] = ()
    settled: bool = True
    stack: str = ""

    def home(self, key: bytes) -> str:
        """The shard that answers for a key."""
        return owners(key, self.serving, 1)[0]

    def holders(self, key: bytes) -> tuple[str, ...]:
        """All that have to know of a change: the owners, home first, then whoever will be one."""
        now = owners(key, self.serving)
        if not self.joining:
            return now
        later = owners(key, (*self.serving, *self.joining))
        return now + tuple(shard for shard in later if shard in self.joining)

    @property
    def members(self) -> tuple[str, ...]:
        """Those that serve, then those that join."""
        return (*self.serving, *self.joining)

    @property
    def alone(self) -> bool:
        """One shard serves and none is about to."""
        return len(self.serving) == 1 and not self.joining


def encode_view(view: ShardView) -> pb.ShardView:
    return pb.ShardView(
        epoch=view.epoch, serving=view.serving, joining=view.joining, settled=view.settled, stack=view.stack
    )


def decode_view(message: pb.ShardView) -> ShardView | None:
    """None for a message that was not set."""
    if not message.epoch or not message.serving:
        return None
    return ShardView(
        epoch=message.epoch,
        serving=tuple(message.serving),
        joining=tuple(message.joining),
        settled=message.settled,
        stack=message.stack,
    )


def newest(views: Sequence[ShardView | None]) -> ShardView | None:
    """The one with the highest epoch."""
    return max((view for view in views if view is not None), key=lambda view: view.epoch, default=None)
