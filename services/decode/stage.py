"""Decode in stages and ranks: which layers and heads a process has, and what one beside the first is."""

from __future__ import annotations

from kvcommons.engine.core import Core
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.rpc.process import Process
from kvcommons.stages.formation import StageShare
from kvcommons.stages.ranks import RankGroup
from kvcommons.stages.service import load_share, serve_stage
from services.decode.config import DecodeConfig


def load_stage(config: DecodeConfig, dialer: Dialer = UNSECURED) -> tuple[StageShare, Core, RankGroup | None]:
    """Of a batch all rows meet the head. Raises InvalidInput for more stages than layers."""
    rows = config.max_batch
    return load_share(config.engine, config.shape, "decode", rows=rows, sampled=rows, dialer=dialer)


async def serve_decode_stage(config: DecodeConfig, process: Process) -> None:
    await serve_stage(
        process,
        lambda: load_stage(config, process.dialer()),
        node=config.node,
        ledger=config.ledger,
        data_listen=config.data_plane.data_listen,
        advertise_data=config.data_plane.advertise_data,
        save_buffer_bytes=config.save_buffer_bytes,
        push_deadline_s=config.push_deadline_s,
        attend_deadline_s=config.attend_deadline_s,
    )
