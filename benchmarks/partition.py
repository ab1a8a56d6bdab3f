"""`kvcommons bench partition`: attention of a batch divided among pools by requests, and by heads.

Lamina, section 5.2 and figure 9. As many pools either way, with a thread each. By requests each sequence lies
on one pool, the one that has fewest tokens when it comes; by heads all lie on all pools, with a share of the
KV heads each. Queries go out and partials come back, layer by layer, without slices between; the two take
turns, an iteration each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.holders import CALL_S, fill_with, holder_process
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    from torch import Tensor

    from kvcommons.holder.head_group import Creditor
    from kvcommons.holder.plan import PlanRow
    from kvcommons.holder.segments import SegmentRef
    from kvcommons.rblock.layout import Layout

Progress = Callable[[str], None]
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    pools: int
    long: int
    short: int
    number: int
    rounds: int

    @property
    def batches(self) -> dict[str, list[int]]:
        """Tokens of each sequence, by what the batch is called."""
        return {
            f"1 of {self.long:,}": [self.long],
            f"1 of {self.long:,}, {self.number} of {self.short:,}": [self.long] + [self.short] * self.number,
            f"{2 * self.number} of {self.short:,}": [self.short] * 2 * self.number,
        }

    @property
    def capacity_tokens(self) -> int:
        """Of a pool of either kind: more than any batch takes."""
        return max(sum(lengths) + len(lengths) * 2 * BLOCK_TOKENS for lengths in self.batches.values())


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("partition", help="attention divided by requests, and by heads")
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights: 7m or 246m")
    parser.add_argument("--pools", type=int, default=2, metavar="N", help="they divide the KV heads")
    parser.add_argument("--long", type=int, default=32_768, metavar="TOKENS")
    parser.add_argument("--short", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--number", type=int, default=6, metavar="N", help="short ones beside the long one")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    setting = Setting(
        pools=options.pools,
        long=options.long,
        short=options.short,
        number=options.number,
        rounds=options.rounds,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        window = setting.long + 4096
        model = write_random_model(Path(name), options.random_model, progress, window_tokens=window)
        rows = asyncio.run(_measure(Path(name), model, setting, progress))
    return Report(
        title="one layer's attention over a batch, ms",
        ratios={str(row["batch"]): float(row["by requests"]) / float(row["by heads"]) for row in rows},
        rows=rows,
    )


async def _measure(folder: Path, model: Path, setting: Setting, progress: Progress) -> list[Row]:
    import torch

    from kvcommons.blockstore.saver import BlockSaver
    from kvcommons.holder.head_group import HeadGroup
    from kvcommons.holder.head_store import WholeStore
    from kvcommons.model.spec import ModelSpec, fingerprint, model_info
    from kvcommons.rblock.heads import divided
    from kvcommons.rblock.layout import Layout
    from kvcommons.transport.deadline import Deadline

    torch.set_num_threads(1)
    spec = ModelSpec.read(model)
    identity = fingerprint(model, spec, "bfloat16", BLOCK_TOKENS)
    layout = Layout.of(model_info("bench", spec, identity, "bfloat16", BLOCK_TOKENS))
    settings = {
        "model": model,
        "block_tokens": BLOCK_TOKENS,
        "threads": 1,
        "capacity_tokens": setting.capacity_tokens,
    }
    saver = BlockSaver("bench")
    store = WholeStore(model=identity, layout=layout, condemn=lambda one: None, saver=saver)
    async with AsyncExitStack() as stack:

        async def pool(name: str, identity: bytes, **heads: str) -> Creditor:
            opened = holder_process(
                "attention_pool", folder, name, f"unix:{folder}/{name}.d", identity, settings | heads,
                environment={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            return (await stack.enter_async_context(opened)).holder

        progress("starting pools")
        parts = divided(setting.pools)
        whole = [await pool(f"whole-{part.number}", identity) for part in parts]
        divided_ = [
            await pool(f"part-{part.number}", part.model(identity), heads=str(part), head_group="bench")
            for part in parts
        ]
        group = HeadGroup(
            [(one.control_address, one.data_address) for one in divided_],
            layout,
            owner="bench",
            model=identity,
            store=store,
            lost=lambda refs: None,
        )
        rows: list[Row] = []
        try:
            for name, lengths in setting.batches.items():
                progress(name)
                kinds = {"by requests": _by_requests(whole, lengths), "by heads": [_Asked(group, lengths)]}
                rows.append({"batch": name, **await _compare(layout, kinds, setting)})
        finally:
            await group.close()
            store.close(Deadline.after(1))
            saver.close(Deadline.after(1))
    return rows


@dataclass(frozen=True, slots=True)
class _Asked:
    """A creditor, and tokens of the sequences that lie there."""

    holder: Creditor
    lengths: list[int]


def _by_requests(pools: Sequence[Creditor], lengths: Sequence[int]) -> list[_Asked]:
    """Each sequence on the pool that has fewest tokens."""
    shares: list[list[int]] = [[] for _ in pools]
    for length in lengths:
        min(shares, key=sum).append(length)
    return [_Asked(pool, share) for pool, share in zip(pools, shares, strict=True) if share]


@dataclass(frozen=True, slots=True)
class _Share:
    """What one creditor is asked for, layer by layer."""

    holder: Creditor
    refs: list[SegmentRef]
    rows: list[PlanRow]
    queries: Tensor
    appended: Tensor


async def _compare(layout: Layout, kinds: dict[str, list[_Asked]], setting: Setting) -> dict[str, float]:
    """Medians of a layer's time, and of what the slowest pool computes of it, ms."""
    shares: dict[str, list[_Share]] = {kind: [] for kind in kinds}
    taken_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    computed_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    try:
        for kind, asked in kinds.items():
            for one in asked:
                shares[kind].append(await _placed(layout, one.holder, one.lengths))
        for round_ in range(setting.rounds + 1):
            for kind, some in shares.items():
                seconds, computed = await asyncio.to_thread(_iterate, layout, some)
                if round_:  # the first one warms up
                    taken_s[kind].append(seconds / layout.layers)
                    computed_s[kind].append(computed / layout.layers)
    finally:
        for some in shares.values():
            for share in some:
                await share.holder.release(share.refs, timeout_s=CALL_S)
    whole = {kind: p50(seconds) * 1e3 for kind, seconds in taken_s.items()}
    return whole | {f"{kind}, computing": p50(seconds) * 1e3 for kind, seconds in computed_s.items()}


async def _placed(layout: Layout, holder: Creditor, lengths: Sequence[int]) -> _Share:
    """With KV of no value, but written: pages that never were read too quickly."""
    import torch

    from kvcommons.backend.memory import TORCH_DTYPES
    from kvcommons.holder.plan import PlanRow

    content = bytes(byte & 0x3F for byte in os.urandom(layout.object_bytes))  # small numbers, none is NaN
    refs, parts = [], []
    for length in lengths:
        blocks = layout.blocks_of(length)
        ref = await holder.reserve("bench", blocks, first_position=0, timeout_s=CALL_S)
        refs.append(ref)
        await asyncio.to_thread(
            fill_with, holder, ref, layout.layers, blocks, lambda layer, some: [content] * len(some)
        )
        parts.append(PlanRow.of(ref, position=length - 1, length=length, append=True))
    return _Share(
        holder,
        refs,
        parts,
        torch.randn(len(parts), layout.query_heads, layout.head_dim),
        torch.randn(len(parts), 2, layout.kv_heads, layout.head_dim).to(TORCH_DTYPES[layout.kv_dtype]),
    )


def _iterate(layout: Layout, shares: Sequence[_Share]) -> tuple[float, float]:
    """Seconds, and of these what the slowest of each layer computed."""
    from kvcommons.backend.choice import choose
    from kvcommons.holder.attend_call import begin_attend
    from kvcommons.transport.deadline import Deadline

    backend = choose()
    began_s, computed_us = time.monotonic(), 0
    for layer in range(layout.layers):
        deadline = Deadline.after(CALL_S)
        asked = [
            begin_attend(
                layout,
                backend,
                share.holder.recipients(share.rows),
                layer,
                share.queries,
                share.appended,
                deadline,
            )
            for share in shares
        ]
        computed_us += max(call.finish()[1].computed_us for call in asked)
    return time.monotonic() - began_s, computed_us / 1e6


def _draw(path: Path, report: Report) -> None:
    groups = [
        (str(row["batch"]), [(kind, 1e3 * float(row[kind])) for kind in ("by requests", "by heads")])
        for row in report.rows
    ]
    panels(path, "one layer's attention over a batch", groups, "µs")
