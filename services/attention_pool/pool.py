"""The pool's memory, and what it knows of the model whose KV it holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kvcommons.backend.choice import choose
from kvcommons.backend.memory import BlockMemory
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import InvalidInput
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.model.spec import ModelSpec, fingerprint, model_info, resolve_folder
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    holder: Holder
    info: pb.ModelInfo  # of the whole model


def head_part(heads: str | None, head_group: str | None) -> HeadPart | None:
    """Which part of the KV heads a pool is set up for; None: all of them. Raises InvalidInput."""
    if heads is None and head_group is None:
        return None
    if heads is None:
        raise InvalidInput(
            f'head_group = {head_group!r} needs heads, this pool\'s part of the group: "0/2", for instance',
            param="heads",
        )
    if not head_group:
        raise InvalidInput(
            f"heads = {heads!r} needs head_group: a name that all parts of the group have in common",
            param="head_group",
        )
    return HeadPart.parse(heads)


def open_pool(settings: EngineSettings, instance_id: str, part: HeadPart | None = None) -> Pool:
    """Reads the model folder (its weights too, for the fingerprint, but keeps none). Seconds: never on an
    event loop. With a `part` it has room for as many tokens in a share of the memory.

    Raises InvalidInput for a model or device that cannot be served, too little capacity, or heads that cannot
    be divided so.
    """
    torch.set_num_threads(settings.threads)
    backend = choose(settings.device)
    folder = resolve_folder(settings.model)
    spec = ModelSpec.read(folder)
    identity = fingerprint(folder, spec, settings.dtype, settings.block_tokens)
    name = settings.model_name or (folder.name if settings.model == str(folder) else settings.model)
    info = model_info(name, spec, identity, settings.dtype, settings.block_tokens)
    blocks = settings.capacity_tokens // settings.block_tokens
    if not blocks:
        raise InvalidInput(
            f"capacity_tokens = {settings.capacity_tokens} is less than one block of {settings.block_tokens}",
            param="capacity_tokens",
        )
    layout, held = Layout.of(info), identity
    if part is not None:
        layout, held = part.layout(layout), part.model(identity)
    try:
        memory = BlockMemory(layout, blocks, backend)
        if settings.touch_memory:
            memory.touch()
    except (RuntimeError, AssertionError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidInput(
            f"no room for {blocks} blocks on device {settings.device!r}: {reason}", param="device"
        ) from error
    model = HeldModel(fingerprint=held, scale=spec.head_dim**-0.5, windows=spec.windows)
    log.info("memory ready", extra={"model": name, "blocks": blocks, "heads": str(part or "all")})
    holder = Holder(memory, BlockAllocator(blocks), model, instance_id=instance_id)
    return Pool(holder=holder, info=info)
