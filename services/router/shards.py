"""Which kvstore a router asks: the home of a session, or of a prompt's blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.shards import ShardView


def home_of(view: ShardView | None, stores: Sequence[Instance], home: bytes) -> Instance | None:
    """The kvstore that a view gives a key to; None while it is away, or while no view is known.

    A kvstore that is no shard stands alone, and is asked whatever it is about.
    """
    return shard_of(stores, view.home(home) if view is not None else "")


def shard_of(stores: Sequence[Instance], name: str) -> Instance | None:
    """Of `stores`, the best first, the process that has the shard: those that died stay in the registry for
    some seconds."""
    lives = [store for store in stores if store.shard.name == name]
    if not name:
        return lives[0] if lives else None
    return max(lives, key=lambda store: store.started_ms, default=None)
