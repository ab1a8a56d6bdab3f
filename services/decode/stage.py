"""Decode in stages and ranks: which layers and heads a process has, and what one beside the first is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvcommons.rpc.process import Process
from kvcommons.stages.formation import StageShare
from kvcommons.stages.layer_timing import StageWork
from kvcommons.stages.service import serve_stage, share_of
from services.decode.config import DecodeConfig


def stage_share(config: DecodeConfig, others: Sequence[int] = ()) -> StageShare:
    """`others`: layers of each stage, as others of its group have them. Raises InvalidInput for more stages
    than layers."""
    chunks = config.colocated  # then they are most of what is computed
    work = StageWork(rows=config.chunk_tokens if chunks else config.max_batch, generates=not chunks)
    return share_of(config.engine, config.shape, "decode", work, others)


async def serve_decode_stage(config: DecodeConfig, process: Process) -> None:
    await serve_stage(
        process,
        config.engine,
        config.shape,
        partial(stage_share, config),
        node=config.node,
        ledger=config.ledger,
        data_listen=config.data_plane.data_listen,
        advertise_data=config.data_plane.advertise_data,
        save_buffer_bytes=config.save_buffer_bytes,
        push_deadline_s=config.push_deadline_s,
        attend_deadline_s=config.attend_deadline_s,
    )
