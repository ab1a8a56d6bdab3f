"""What the kvstore has of a prompt's blocks (`Match`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvcommons.errors import KVCommonsError
from kvcommons.pb import kvstore_pb2
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.fleet.fleet import Fleet

log = logging.getLogger(__name__)

# A store that is slow to say what it has costs more than computing does.
_MATCH_S = 2.0


async def stored_blocks(
    fleet: Fleet, model: ModelInfo, ids: Sequence[bytes], *, timeout_s: float, peek: bool = False
) -> int | None:
    """How many leading ones the kvstore has; None where it cannot say."""
    tiers = await stored_tiers(fleet, model, ids, timeout_s=timeout_s, peek=peek)
    return None if tiers is None else len(tiers)


async def stored_tiers(
    fleet: Fleet, model: ModelInfo, ids: Sequence[bytes], *, timeout_s: float, peek: bool = False
) -> list[kvstore_pb2.Tier.ValueType] | None:
    """Where the kvstore has the leading ones; None where it cannot say."""
    store = fleet.store()
    if store is None:
        return None
    if not ids:
        return []
    request = kvstore_pb2.MatchRequest(model=model.fingerprint, block_ids=ids, peek=peek)
    try:
        reply = await fleet.blocks(store).Match(request, timeout=min(_MATCH_S, timeout_s))
    except KVCommonsError as error:
        log.info("nothing is known of stored blocks, so they are computed: %s", error)
        return None
    return list(reply.tiers)[: len(ids)]
