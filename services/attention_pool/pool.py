"""The pool's memory, and what it knows of the model whose KV it holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kvcommons.attention.memory import BlockMemory
from kvcommons.attention.native import library
from kvcommons.engine.core import EngineSettings
from kvcommons.errors import InvalidInput
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.model.spec import ModelSpec, fingerprint, model_info, resolve_folder
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.layout import Layout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    holder: Holder
    info: pb.ModelInfo


def open_pool(settings: EngineSettings, instance_id: str) -> Pool:
    """Reads the model folder (its weights too, for the fingerprint, but keeps none). Seconds: never on an
    event loop.

    Raises InvalidInput for a model or device that cannot be served, or too little capacity.
    """
    torch.set_num_threads(settings.threads)
    library.chosen()  # compiled, if it has to be, before anybody waits for attention
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
    try:
        memory = BlockMemory(Layout.of(info), blocks, settings.device)
    except (RuntimeError, AssertionError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidInput(
            f"no room for {blocks} blocks on device {settings.device!r}: {reason}", param="device"
        ) from error
    model = HeldModel(fingerprint=identity, scale=spec.head_dim**-0.5, windows=spec.windows)
    log.info("memory ready", extra={"model": name, "blocks": blocks})
    holder = Holder(memory, BlockAllocator(blocks), model, instance_id=instance_id)
    return Pool(holder=holder, info=info)
