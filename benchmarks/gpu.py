"""`kvcommons bench gpu`: the kernels for GPUs against what the GPU can do, and against torch's operators.

Attention of single rows, and products with a few, read memory: their limit is the rate at which the GPU
reads. A chunk's attention computes: its limit is the rate of a large product. Both are launched as graphs,
for the small ones take less time than their launches. What lies between two layers' attention reads a
layer's weights, and is launched as an engine does it. Ours, torch's operators and the limit take turns, so
that ratios are of neighbours in time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot import panels
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    from torch import Tensor

    from kvcommons.backend.interface import AttentionBackend, Backend, BatchPlan, LayerWeights, Operators

Progress = Callable[[str], None]
Work = Callable[[], object]
_LEAST_S = 0.02  # that work is repeated for
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model's layer, and of the memory for its KV. By default those of an 8B model of Llama's shape."""

    hidden: int = 4096
    mlp: int = 14336
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_tokens: int = 64
    pool_bytes: int = 8 << 30
    weights_bytes: int = 1 << 30  # of one shape, more than any cache holds
    product: int = 8192  # rows, columns and depth of the product that is the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`amount`: bytes or operations of one call."""

    name: str
    ours: Work
    torch: Work
    amount: float
    computes: bool = False  # and is not bound by memory
    captured: bool = True  # launched as one graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Bytes or operations a second, of neighbours in time."""

    ours: float
    torch: float
    limit: float


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "gpu", help="the kernels for GPUs against the GPU's limits and against torch"
    )
    parser.add_argument("--device", default="cuda", metavar="NAME", help="as torch names it")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="sequences")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32768], metavar="N")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[128, 512, 2048], metavar="N", help="of a chunk"
    )
    parser.add_argument("--pool-mib", type=int, default=Sizes().pool_bytes >> 20, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    from kvcommons.backend.choice import choose

    bench = Gpu(choose(options.device), Sizes(pool_bytes=options.pool_mib << 20), options.dtype)
    found = bench.measure(options.batch, options.context, options.rows, options.rounds, progress)
    return summarise(f"Kernels on {options.device}, {options.dtype}, a layer of an 8B model", found)


class Gpu:
    def __init__(self, backend: Backend, sizes: Sizes, dtype: str) -> None:
        import torch

        from kvcommons.backend.memory import TORCH_DTYPES
        from kvcommons.backend.torch_attention import TorchAttention
        from kvcommons.backend.torch_operators import TorchOperators

        self._backend, self._sizes, self._dtype = backend, sizes, TORCH_DTYPES[dtype]
        self._torch_attention, self._torch = TorchAttention(backend.device), TorchOperators()
        block = 2 * sizes.kv_heads * sizes.block_tokens * sizes.head_dim
        blocks = max(sizes.pool_bytes // (block * self._dtype.itemsize), 1)
        self._kv = backend.device.allocate(
            (blocks, 2, sizes.kv_heads, sizes.block_tokens, sizes.head_dim), self._dtype
        )
        self._kv.normal_()
        self._order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))

    def measure(
        self, batches: list[int], contexts: list[int], chunks: list[int], rounds: int, progress: Progress
    ) -> dict[str, list[Round]]:
        """By the names of cases."""
        import torch

        with torch.inference_mode():
            reading, product = self._reading(), self._product()
            found = {}
            for case in self._cases(batches, contexts, chunks):
                progress(case.name)
                limit = product if case.computes else reading
                ours, theirs = case.ours, case.torch
                if case.captured:
                    ours, theirs = self._captured(ours), self._captured(theirs)
                found[case.name] = [
                    Round(
                        ours=case.amount / self._seconds(ours),
                        torch=case.amount / self._seconds(theirs), limit=limit(),
                    )
                    for _ in range(rounds)
                ]  # fmt: skip
        return found

    def _seconds(self, work: Work) -> float:
        """Of one call."""
        work()  # what is compiled, captured or tuned has been by then
        times = 1
        while True:
            self._backend.device.record().wait()
            began_s = time.perf_counter()
            for _ in range(times):
                work()
            self._backend.device.record().wait()
            spent_s = time.perf_counter() - began_s
            if spent_s >= _LEAST_S:
                return spent_s / times
            times = max(2 * times, int(times * _LEAST_S / max(spent_s, 1e-6)))

    def _captured(self, work: Work) -> Work:
        """As one graph; as it is where there are none."""
        from kvcommons.backend.cuda_device import CudaDevice

        device = self._backend.device
        return device.captured(work) if isinstance(device, CudaDevice) else work

    def _reading(self) -> Callable[[], float]:
        """Bytes a second that a sum reads."""
        import torch

        memory = self._kv.view(-1).view(torch.float32)
        return lambda: memory.nbytes / self._seconds(memory.sum)

    def _product(self) -> Callable[[], float]:
        """Operations a second."""
        size = self._sizes.product
        matrix = self._torch.pack(self._random(size, size))
        x = self._random(size, size)
        return lambda: 2 * size**3 / self._seconds(lambda: matrix(x))

    def _random(self, *shape: int) -> Tensor:
        return self._backend.device.allocate(shape, self._dtype).normal_(std=0.02)

    def _cases(self, batches: list[int], contexts: list[int], chunks: list[int]) -> Iterator[Case]:
        for batch in batches:
            for context in contexts:
                yield self._batch_case(batch, context)
        for context in contexts:
            for rows in chunks:
                yield self._chunk_case(rows, context)
        yield from self._product_cases()
        yield from self._slice_cases(batches)

    def _batch_case(self, batch: int, context: int) -> Case:
        """As many calls, one after the other, as it takes to read all of the memory: none finds its blocks in
        a cache."""
        sizes = self._sizes
        width = -(-context // sizes.block_tokens)
        count = max(len(self._order) // (width * batch), 1)
        q = self._random(batch, sizes.query_heads, sizes.head_dim)
        token_bytes = 2 * sizes.kv_heads * sizes.head_dim * self._dtype.itemsize

        def all_of(attention: AttentionBackend, calls: int) -> Work:
            plans = [self._batch_plan(attention, batch, context, number) for number in range(calls)]
            return lambda: [plan.attend(q, self._kv, sizes.head_dim**-0.5) for plan in plans]

        few = max(count // 8, 1)
        theirs = all_of(self._torch_attention, few)
        return Case(
            name=f"attention, {batch} x {context:,}",
            ours=all_of(self._backend.attention, count),
            torch=lambda: [theirs() for _ in range(count // few)],
            amount=float(token_bytes * context * batch * count),
        )

    def _batch_plan(self, attention: AttentionBackend, batch: int, context: int, call: int) -> BatchPlan:
        import torch

        width = -(-context // self._sizes.block_tokens)
        index = torch.arange(width * batch) + call * width * batch
        lengths = torch.full((batch,), context)
        return attention.plan_batch(
            self._kv, self._order[index % len(self._order)].view(batch, width), lengths,
            first_key_positions=torch.zeros_like(lengths), query_positions=lengths - 1,
        )  # fmt: skip

    def _chunk_case(self, rows: int, context: int) -> Case:
        import torch

        sizes = self._sizes
        table = self._order[torch.arange(-(-(context + rows) // sizes.block_tokens)) % len(self._order)]
        q = self._random(rows, sizes.query_heads, sizes.head_dim)
        ours, theirs = (
            attention.plan_chunk(
                self._kv, sizes.query_heads, table, context + rows, first_key_position=0,
                query_positions=range(context, context + rows),
            )
            for attention in (self._backend.attention, self._torch_attention)
        )  # fmt: skip
        pairs = rows * (context + (rows + 1) / 2)
        scale = sizes.head_dim**-0.5
        return Case(
            name=f"chunk of {rows} after {context:,}",
            ours=lambda: ours.attend(q, self._kv, scale),
            torch=lambda: theirs.attend(q, self._kv, scale),
            amount=4 * sizes.head_dim * sizes.query_heads * pairs,
            computes=True,
        )

    def _product_cases(self) -> Iterator[Case]:
        """With one weight after the other, as in a model: none is in a cache from the time before."""
        sizes = self._sizes
        heads = (sizes.query_heads + 2 * sizes.kv_heads) * sizes.head_dim
        for rows in (1, 8, 16):
            for outputs, size in (
                (heads, sizes.hidden), (sizes.hidden, sizes.hidden), (2 * sizes.mlp, sizes.hidden),
                (sizes.hidden, sizes.mlp),
            ):  # fmt: skip
                count = max(sizes.weights_bytes // (outputs * size * self._dtype.itemsize), 1)
                weights = [self._random(outputs, size) for _ in range(count)]
                x = self._random(rows, size)

                def all_of(operators: Operators, x: Tensor, weights: list[Tensor]) -> Work:
                    matrices = [operators.pack(weight) for weight in weights]
                    return lambda: [matrix(x) for matrix in matrices]

                yield Case(
                    name=f"product, {rows} rows, {outputs:,} x {size:,}",
                    ours=all_of(self._backend.operators, x, weights),
                    torch=all_of(self._torch, x, weights),
                    amount=float(sum(weight.nbytes for weight in weights)),
                )

    def _slice_cases(self, batches: list[int]) -> Iterator[Case]:
        """Two layers, so that the weights of each are read."""
        import torch

        sizes = self._sizes
        ours = self._two_layers(self._backend.operators)
        theirs = self._two_layers(self._torch)
        weights = sizes.hidden * (2 * sizes.query_heads + 2 * sizes.kv_heads) * sizes.head_dim
        weights += 3 * sizes.hidden * sizes.mlp
        for rows in batches:
            hidden = self._random(rows, sizes.hidden)
            attended = self._random(rows, sizes.query_heads * sizes.head_dim)
            angles = self._backend.device.allocate((rows, 1, sizes.head_dim // 2), torch.float32)
            yield Case(
                name=f"slice, {rows} rows",
                ours=partial(ours, hidden, attended, angles.cos(), angles.sin()),
                torch=partial(theirs, hidden, attended, angles.cos(), angles.sin()),
                amount=float(2 * weights * self._dtype.itemsize),
                captured=False,
            )

    def _two_layers(self, operators: Operators) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        first, second = (operators.layer(self._weights(operators)) for _ in range(2))

        def advance(hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor) -> None:
            first.advance(second, hidden, attended, cos, sin)
            second.advance(first, hidden, attended, cos, sin)

        return advance

    def _weights(self, operators: Operators) -> LayerWeights:
        import torch

        from kvcommons.backend.interface import LayerWeights

        sizes, pack = self._sizes, operators.pack
        heads = sizes.query_heads + 2 * sizes.kv_heads
        norm = self._backend.device.allocate((sizes.hidden,), torch.float32).fill_(1.0)
        return LayerWeights(
            attention_norm=norm, qkv=pack(self._random(heads * sizes.head_dim, sizes.hidden)), qk_norm=None,
            output=pack(self._random(sizes.hidden, sizes.query_heads * sizes.head_dim)), mlp_norm=norm,
            gate_up=pack(self._random(2 * sizes.mlp, sizes.hidden)),
            down=pack(self._random(sizes.hidden, sizes.mlp)), head_dim=sizes.head_dim,
            rotated_heads=sizes.query_heads + sizes.kv_heads, epsilon=_EPSILON,
        )  # fmt: skip


def summarise(title: str, found: dict[str, list[Round]]) -> Report:
    """Rates are medians over rounds, and ratios medians of each round's."""
    rows: list[Row] = [
        {
            "case": name,
            "ours G/s": p50([one.ours for one in rounds]) / 1e9,
            "limit G/s": p50([one.limit for one in rounds]) / 1e9,
            "of the limit %": 100 * p50([one.ours / one.limit for one in rounds]),
            "over torch": p50([one.ours / one.torch for one in rounds]),
        }
        for name, rounds in found.items()
    ]
    ratios = {
        f"{kind}_of_limit_least": min(
            float(row["of the limit %"]) for row in rows if str(row["case"]).startswith(kind)
        )
        / 100
        for kind in ("attention", "chunk", "product", "slice")
    }
    ratios["over_torch_least"] = min(float(row["over torch"]) for row in rows)
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    groups = [
        (str(row["case"]), [("ours", float(row["ours G/s"])), ("limit", float(row["limit G/s"]))])
        for row in report.rows
    ]
    panels(path, report.title, groups, "GB or GFLOP a second")
