"""KV that was lost behind a truncation, made again: excerpt by excerpt, each a prefill without a decode.

What an excerpt computes stays in that prefill's memory and goes to the kvstore, where the next one finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvcommons.pb import common_pb2, prefill_pb2
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.token_ids import packed
from services.router.fleet.fleet import Fleet
from services.router.fleet.stored import stored_blocks
from services.router.sessions.truncation import Context, Excerpt, replay_costs

log = logging.getLogger(__name__)


async def stored_of_excerpts(
    fleet: Fleet, model: ModelInfo, excerpts: Sequence[Excerpt], *, timeout_s: float
) -> list[int] | None:
    """Leading blocks of each that are stored; those of excerpts before the last that suffices are not asked
    for. None where the kvstore cannot say."""
    found = [0] * len(excerpts)
    for number in range(len(excerpts) - 1, -1, -1):
        excerpt = excerpts[number]
        stored = await stored_blocks(fleet, model, excerpt.ids, timeout_s=timeout_s, peek=True)
        if stored is None:
            return None
        found[number] = stored
        if found[number] >= excerpt.since_block:
            break
    return found


async def replay(
    fleet: Fleet, prefill: Instance, turn: common_pb2.Job, context: Context, model: ModelInfo,
    *, timeout_s: float,
) -> None:  # fmt: skip
    """Computes the excerpts before the last, from the first one on that lacks KV. `turn` is the job
    whose history is made. Raises what prefill raises."""
    known = await stored_of_excerpts(fleet, model, context.excerpts, timeout_s=timeout_s)
    found = known or [0] * len(context.excerpts)
    first, tokens = replay_costs(context.excerpts, found)
    context.kv = "replayed"
    log.info(
        "a truncated session is replayed", extra={"excerpts": len(context.excerpts) - first, "tokens": tokens}
    )
    for number in range(first, len(context.excerpts) - 1):
        excerpt = context.excerpts[number]
        job = common_pb2.Job(
            request_id=f"{turn.request_id}-excerpt-{number}",
            session_id=turn.session_id,
            tenant=turn.tenant,
            salt=turn.salt,
            model=turn.model,
            tokens=packed(excerpt.tokens),
            prompt_tokens=len(excerpt.tokens),
            sampling=common_pb2.Sampling(temperature=0.0, top_p=1.0),
            history=turn.history,
            truncated=excerpt.message(),
        )
        job.history.matched_blocks = found[number]
        request = prefill_pb2.PrefillRequest(job=job)
        call = fleet.prefill(prefill).Compute(request, timeout=timeout_s)
        try:
            async for event in call:
                if event.WhichOneof("event") == "first":
                    break
        finally:
            call.cancel()
