"""The compiled kernel's chunks against plain softmax in float64, for each instruction set that is here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvcommons.backend.interface import Partial
from tests.backends import attend_chunk
from tests.unit.backend.kernels import chosen, needs_compiler, variants

pytestmark = needs_compiler

EXACT = 4e-6
# Weights are rounded to bfloat16 where the processor multiplies them so: of values about 1, half a unit.
ROUNDED = 2**-8


@pytest.fixture(params=variants())
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return chosen(request.param, monkeypatch).variant


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A sequence in shuffled blocks of a layer; what no row sees is NaN. Row r is the query of key
    `first_query` + r."""

    q: Tensor
    kv: Tensor
    table: Tensor
    length: int
    first_query: int
    window: int | None
    keys: Tensor
    values: Tensor

    def hidden(self) -> Tensor:
        """[rows, length]"""
        key = torch.arange(self.length)
        query = self.first_query + torch.arange(len(self.q)).unsqueeze(1)
        hidden = key > query
        return hidden if self.window is None else hidden | (key <= query - self.window)

    def part(self) -> Partial:
        return attend_chunk(
            self.q, self.kv, self.table, self.length, first_key_position=40, scale=self.q.shape[-1] ** -0.5,
            query_positions=torch.arange(len(self.q)) + self.first_query + 40, window=self.window,
        )  # fmt: skip

    def check(self, part: Partial, tolerance: float) -> None:
        group = self.q.shape[1] // self.kv.shape[2]
        k, v = (one.double().repeat_interleave(group, 1) for one in (self.keys, self.values))
        scores = torch.einsum("thd,lhd->thl", self.q.double(), k) * self.q.shape[-1] ** -0.5
        scores.masked_fill_(self.hidden().unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        out = torch.einsum("thl,lhd->thd", scores.softmax(-1).nan_to_num(), v)
        scale = float(v.abs().max()) if v.numel() else 1.0
        torch.testing.assert_close(part.out.double(), out, rtol=0, atol=tolerance * scale)
        torch.testing.assert_close(part.lse.double(), lse, rtol=EXACT, atol=2 * EXACT)


def make(
    seed: int,
    rows: int,
    length: int,
    first_query: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_dtype: torch.dtype | None = None,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 32,
    block_tokens: int = 16,
    window: int | None = None,
) -> Chunk:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(length, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    blocks = torch.randperm(-(-length // block_tokens) + 3, generator=generator)
    kv = torch.full((len(blocks), 2, kv_heads, block_tokens, dim), torch.nan).to(dtype)
    chunk = Chunk(
        # Rows of a wider tensor, as a model's are.
        q=torch.randn(rows, kv_heads * group + 2, dim, generator=generator)[:, 1:-1].to(query_dtype or dtype),
        kv=kv, table=blocks[2:], length=length, first_query=first_query, window=window, keys=keys,
        values=values,
    )  # fmt: skip
    seen = (~chunk.hidden()).any(0).nonzero().squeeze(1)
    block, slot = chunk.table[seen // block_tokens], seen % block_tokens
    kv[block, 0, :, slot], kv[block, 1, :, slot] = keys[seen], values[seen]
    return chunk


def tolerance(variant: str, chunk: Chunk) -> float:
    pairs = variant == "avx512bf16" and chunk.kv.dtype == torch.bfloat16 and chunk.q.shape[-1] % 32 == 0
    return ROUNDED if pairs else EXACT


@pytest.mark.parametrize("seed", range(40))
def test_random_chunks_are_exact(variant: str, seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.choice((1, 2, 3, 5, 6, 7, draw.randint(8, 40), draw.randint(60, 300)))
    before = draw.choice((0, 1, 63, 64, draw.randint(2, 1000)))
    chunk = make(
        seed,
        rows,
        before + draw.choice((rows, rows, 0, rows // 2, rows + 20)),
        before,
        dtype=draw.choice((torch.float32, torch.bfloat16)),
        query_dtype=draw.choice((None, torch.float32, torch.bfloat16)),
        kv_heads=draw.randint(1, 4),
        group=draw.randint(1, 7),
        dim=draw.choice((8, 16, 32, 48, 64, 80, 96, 128, 192, 256)),
        block_tokens=draw.choice((1, 4, 16, 48, 64, 100)),
        window=draw.choice((None, None, 1, 40, 600)),
    )
    chunk.check(chunk.part(), tolerance(variant, chunk))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_long_history_is_divided_and_put_together_the_same_on_any_number_of_threads(
    variant: str, threads: None, dtype: torch.dtype
) -> None:
    chunk = make(3, 20, 9000, 8980, dtype=dtype, kv_heads=1, group=2, dim=64, block_tokens=64)
    torch.set_num_threads(1)
    first = chunk.part()
    chunk.check(first, tolerance(variant, chunk))
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        again = chunk.part()
        assert torch.equal(first.out, again.out)
        assert torch.equal(first.lse, again.lse)


def test_queries_of_bfloat16_that_come_as_float32_have_the_same_result(variant: str) -> None:
    """As holders have them; one that is no bfloat16 is not rounded to one."""
    chunk = make(9, 30, 500, 470, kv_heads=2, group=4, dim=64)
    wide = replace(chunk, q=chunk.q.float())
    assert torch.equal(wide.part().out, chunk.part().out)
    wide.q[3] += 1e-4
    wide.check(wide.part(), EXACT)


@pytest.mark.parametrize("hidden", [10, 64, 300])
def test_keys_whose_scores_are_minus_infinity_weigh_nothing(variant: str, hidden: int) -> None:
    chunk = make(5, 12, 400, 388, dtype=torch.float32)
    q = chunk.q.abs() + 0.1
    for token in range(hidden):
        block, slot = divmod(token, chunk.kv.shape[3])
        chunk.kv[chunk.table[block], 0, :, slot, 0] = -torch.inf
    part = replace(chunk, q=q).part()
    behind = replace(
        chunk, q=q, keys=chunk.keys[hidden:], values=chunk.values[hidden:], length=400 - hidden,
        first_query=388 - hidden,
    )  # fmt: skip
    behind.check(part, EXACT)


def test_scores_that_rise_from_key_to_key_are_exact(variant: str) -> None:
    """Each tile has a greater score than those before it."""
    chunk = make(6, 40, 700, 660, dtype=torch.float32, kv_heads=1, group=1, dim=32)
    rising = torch.linspace(0.0, 60.0, 700)
    for token in range(700):
        block, slot = divmod(token, chunk.kv.shape[3])
        chunk.kv[chunk.table[block], 0, 0, slot] = rising[token]
        chunk.keys[token] = rising[token]
    steep = replace(chunk, q=torch.ones_like(chunk.q))
    part = steep.part()
    torch.testing.assert_close(part.lse.double(), _lse(steep), rtol=1e-5, atol=0)


def _lse(chunk: Chunk) -> Tensor:
    scores = torch.einsum("thd,lhd->thl", chunk.q.double(), chunk.keys.double()) * chunk.q.shape[-1] ** -0.5
    return scores.masked_fill(chunk.hidden().unsqueeze(1), -torch.inf).logsumexp(-1)
