"""Prefill in stages and ranks: which layers and heads a process has, and what one beside the first is."""

from __future__ import annotations

from kvcommons.engine.core import Core
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.rpc.process import Process
from kvcommons.stages.formation import StageShare
from kvcommons.stages.ranks import RankGroup
from kvcommons.stages.service import load_share, serve_stage
from services.prefill.config import PrefillConfig


def load_stage(
    config: PrefillConfig, dialer: Dialer = UNSECURED
) -> tuple[StageShare, Core, RankGroup | None]:
    """Of a prompt's chunk one row at most meets the head. Raises InvalidInput for more stages than
    layers."""
    return load_share(
        config.engine, config.shape, "prefill", rows=config.chunk_tokens, sampled=1, dialer=dialer
    )


async def serve_prefill_stage(config: PrefillConfig, process: Process) -> None:
    assert config.data_listen is not None, "the settings were checked"
    await serve_stage(
        process,
        lambda: load_stage(config, process.dialer()),
        node=config.node,
        ledger=config.ledger,
        data_listen=config.data_listen,
        advertise_data=config.advertise_data,
        save_buffer_bytes=config.save_buffer_bytes,
        push_deadline_s=config.push_deadline_s,
        attend_deadline_s=config.push_deadline_s,
    )
