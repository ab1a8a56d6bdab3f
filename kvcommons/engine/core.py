"""A loaded model and the blocks that its KV lies in: what an engine computes with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Backend, Sum
from kvcommons.backend.memory import BlockMemory
from kvcommons.backend.product_choice import ProductWork, chosen_products
from kvcommons.backend.products import Products
from kvcommons.engine.request import Request
from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import InvalidInput
from kvcommons.grammar.compiled import Vocabulary
from kvcommons.grammar.grammars import Constraint, Grammars
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, fingerprint, model_info, resolve_folder
from kvcommons.model.tensor_rank import ALONE, TensorRank
from kvcommons.model.weights import torch_dtype
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """`memory` has `allocator.total` blocks; `info` is what the instance registers. `layout` is of the heads
    that are computed here."""

    model: Model
    info: pb.ModelInfo
    layout: Layout
    memory: BlockMemory
    allocator: BlockAllocator
    grammars: Grammars | None = None  # None: without the folder, whose tokenizer they need

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    @property
    def layers(self) -> range:
        """Those that are computed here, by their numbers in the model."""
        return self.model.layers

    @property
    def heads(self) -> HeadPart | None:
        """The KV heads that are here; None: all of the model's."""
        return self.model.rank.kv_part(self.info.kv_heads)

    @property
    def keeps(self) -> bool:
        """Whether this process is the one that saves and sends the KV that it computes."""
        return self.model.rank.keeps(self.info.kv_heads)

    @property
    def block_bytes(self) -> int:
        """Of one block in the layers that are computed here."""
        return len(self.layers) * self.layout.object_bytes

    async def check_grammar(self, request: Request) -> None:
        """Returns once the request's grammar, if it has one, is compiled. Raises InvalidInput, Overloaded and
        DeadlineExceeded."""
        if not request.grammar:
            return
        if self.grammars is None:
            raise InvalidInput("grammars need the tokenizer of the model's folder", param="grammar")
        if not request.stop_token_ids:
            raise InvalidInput("an answer with a grammar needs a token that ends it", param="stop_token_ids")
        await self.grammars.ready(request.tenant, request.grammar)

    def constraint(self, request: Request) -> Constraint | None:
        """Of a sequence by its grammar, which was checked; None where it has none, or is sampled
        elsewhere."""
        if not request.grammar or self.grammars is None or not self.model.last:
            return None
        return self.grammars.constrain(
            request.tenant, request.grammar, request.stop_token_ids, request.prompt_tokens
        )

    @property
    def backend(self) -> Backend:
        """What computes, for the model and over the memory."""
        return self.model.backend


def load_core(
    settings: EngineSettings,
    layers: range | None = None,
    rank: TensorRank = ALONE,
    sum_ranks: Sum | None = None,
) -> Core:
    """Reads the model and makes its block memory; seconds to minutes, so never on an event loop. `layers`:
    which of them a pipeline stage has; None: all. `rank` and `sum_ranks`: as at `Model.load`.

    Raises InvalidInput for a model or device that cannot be served.
    """
    torch.set_num_threads(settings.threads)
    return on_own_thread("load", settings, partial(_load, settings, layers, rank, sum_ranks))


def on_own_thread(name: str, settings: EngineSettings, work: Callable[[], T]) -> T:
    """What `work` returns, computed on a thread that ends. OpenMP has a team for each thread that has ever
    computed, and where all of them are more than the cores, no team waits awake for its next operation: 28 ms
    a token instead of 20."""

    def bounded() -> T:
        torch.set_num_threads(settings.threads)
        return work()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix=name) as thread:
        return thread.submit(bounded).result()


def backend_of(settings: EngineSettings, spec: ModelSpec) -> Backend:
    """What computes a model here. Raises InvalidInput."""
    return choose(settings.device, _products(settings, spec))


def _load(
    settings: EngineSettings,
    layers: range | None,
    rank: TensorRank,
    sum_ranks: Sum | None,
) -> Core:
    started = time.monotonic()
    folder = resolve_folder(settings.model)
    spec = ModelSpec.read(folder)
    rank.check(spec)
    backend = backend_of(settings, spec)
    own = range(spec.layers) if layers is None else layers
    identity = fingerprint(folder, spec, settings.dtype, settings.block_tokens)
    name = settings.model_name or (folder.name if settings.model == str(folder) else settings.model)
    info = model_info(name, spec, identity, settings.dtype, settings.block_tokens)
    core = make_core(
        Model.load(folder, dtype=settings.dtype, backend=backend, layers=own, rank=rank, sum_ranks=sum_ranks),
        info,
        capacity_tokens=settings.capacity_tokens,
        grammars=Grammars(partial(Vocabulary.read, folder)),
    )
    if settings.touch_memory:
        core.memory.touch()
    _warm_up(core)
    log.info(
        "model loaded",
        extra={
            "model": name,
            "layers": f"{own.start}-{own.stop - 1}",
            "blocks": core.allocator.total,
            "products": backend.operators.multiplies,
            "seconds": round(time.monotonic() - started, 2),
        },
    )
    return core


def _products(settings: EngineSettings, spec: ModelSpec) -> Products:
    if not settings.device.startswith("cpu"):
        return Products.NATIVE  # of no meaning elsewhere
    heads = spec.query_heads * spec.head_dim
    matrices = (
        (heads + 2 * spec.kv_heads * spec.head_dim, spec.hidden),
        (spec.hidden, heads),
        (2 * spec.mlp, spec.hidden),
        (spec.hidden, spec.mlp),
    )
    work = ProductWork(
        matrices=matrices, layers=spec.layers, dtype=torch_dtype(settings.dtype), threads=settings.threads
    )
    return chosen_products(settings.products, work)


def make_core(
    model: Model, info: pb.ModelInfo, *, capacity_tokens: int, grammars: Grammars | None = None
) -> Core:
    """A model that is in memory already, with blocks for `capacity_tokens`."""
    layout = model.rank.layout(Layout.of(info))
    blocks = capacity_tokens // info.block_tokens
    if blocks < 1:
        raise InvalidInput(
            f"capacity_tokens = {capacity_tokens} is less than one block of {info.block_tokens} tokens",
            param="capacity_tokens",
        )
    memory = BlockMemory(layout, blocks, model.backend, model.layers)
    return Core(
        model=model,
        info=info,
        layout=layout,
        memory=memory,
        allocator=BlockAllocator(blocks),
        grammars=grammars,
    )


def _warm_up(core: Core) -> None:
    """Chunks and a decode step, so that the first request does not pay for what is made lazily: on a GPU that
    is a kernel for each of several lengths of chunks."""
    model, layout, attention, device = core.model, core.layout, core.backend.attention, core.backend.device
    blocks = core.allocator.allocate(1)
    rows = max(1, min(8, core.block_tokens - 1))
    longer = () if device.host else tuple(range(16, core.block_tokens, 16))
    try:
        with torch.inference_mode():
            table = torch.tensor(blocks)
            for first, count in (*((0, more) for more in (rows, *longer)), (rows, 1)):
                positions = torch.arange(first, first + count)
                rotated_for = device.upload(positions)
                if model.first:
                    state = model.begin(device.upload(torch.zeros(count, dtype=torch.long)), rotated_for)
                else:
                    hidden = torch.zeros((count, model.spec.hidden), dtype=model.dtype)
                    state = model.enter(device.upload(hidden), rotated_for)
                length = first + count
                for layer in model.layers:
                    slots = positions % core.block_tokens + blocks[0] * core.block_tokens
                    core.memory.write_tokens(layer, slots, state.k, state.v)
                    kv, window = core.memory.layer(layer), model.window(layer)
                    if count > 1:
                        chunk = attention.plan_chunk(
                            kv, layout.query_heads, table, length,
                            first_key_position=0, query_positions=range(first, length), window=window,
                        )  # fmt: skip
                        out = chunk.attend(state.q, kv, model.scale).out
                    else:
                        batch = attention.plan_batch(
                            kv, table.view(1, 1), torch.tensor([length]),
                            first_key_positions=torch.zeros(1, dtype=torch.long),
                            query_positions=positions, window=window,
                        )  # fmt: skip
                        out = batch.attend(state.q, kv, model.scale).out
                    if layer < model.layers[-1]:
                        state = model.advance(layer, state, out)
                if model.last:
                    model.end(state, out, [count - 1])
                else:
                    model.leave(state, out)
    finally:
        core.allocator.release(blocks)
