"""The compiled kernel against plain softmax in float64, for every instruction set of this processor."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcommons.attention.native import build, library
from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Partial
from kvcommons.errors import InvalidInput
from tests.backends import attend_batch, merge
from tests.unit.backend.kernels import chosen, needs_compiler, variants

EXACT = 2e-6


pytestmark = needs_compiler


@pytest.fixture(params=variants())
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return chosen(request.param, monkeypatch).variant


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences in shuffled blocks of a layer; whatever no query sees is NaN."""

    q: Tensor
    kv: Tensor
    tables: Tensor
    lengths: Tensor
    firsts: Tensor
    positions: Tensor
    window: int | None
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def seen(self, row: int) -> range:
        distance = int(self.positions[row] - self.firsts[row])
        first = 0 if self.window is None else max(distance - self.window + 1, 0)
        return range(first, max(min(int(self.lengths[row]), distance + 1), first))

    def expected(self, row: int) -> tuple[Tensor, Tensor]:
        """out [H, D], lse [H] in float64."""
        seen = self.seen(row)
        group = self.q.shape[1] // self.kv.shape[2]
        k, v = (kv[row][seen].double().repeat_interleave(group, 1) for kv in (self.keys, self.values))
        scores = torch.einsum("hd,lhd->hl", self.q[row].double(), k) * self.scale
        return torch.einsum("hl,lhd->hd", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)

    def part(self, rows: slice = slice(None)) -> Partial:
        return attend_batch(
            self.q[rows], self.kv, self.tables[rows], self.lengths[rows], scale=self.scale,
            first_key_positions=self.firsts[rows], query_positions=self.positions[rows], window=self.window,
        )  # fmt: skip

    def check(self, part: Partial) -> None:
        for row in range(len(self.q)):
            out, lse = self.expected(row)
            torch.testing.assert_close(part.out[row].double(), out, rtol=0, atol=EXACT)
            torch.testing.assert_close(part.lse[row].double(), lse, rtol=EXACT, atol=EXACT)


def make(
    seed: int,
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 32,
    block_tokens: int = 16,
    window: int | None = None,
    late: int = 0,
) -> Case:
    """Queries stand at the last key, or `late` after it (before it, where negative)."""
    generator = torch.Generator().manual_seed(seed)
    widest = max(1, -(-max(lengths) // block_tokens)) + 1
    blocks = torch.randperm(len(lengths) * widest + 1, generator=generator)
    tables = blocks[: len(lengths) * widest].view(len(lengths), widest)
    kv = torch.full((len(blocks), 2, kv_heads, block_tokens, dim), torch.nan).to(dtype)
    keys, values = (
        [torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in lengths] for _ in range(2)
    )
    firsts = torch.arange(len(lengths)) * 7
    case = Case(
        # Rows of a wider tensor, as a model's are.
        q=torch.randn(len(lengths), kv_heads * group + 2, dim, generator=generator)[:, 1:-1].to(query_dtype),
        kv=kv, tables=tables, lengths=torch.tensor(lengths), firsts=firsts,
        positions=firsts + torch.tensor(lengths) - 1 + late, window=window, keys=keys, values=values,
    )  # fmt: skip
    for row in range(len(lengths)):
        seen = torch.tensor(list(case.seen(row)), dtype=torch.long)
        block, slot = tables[row, seen // block_tokens], seen % block_tokens
        kv[block, 0, :, slot], kv[block, 1, :, slot] = keys[row][seen], values[row][seen]
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_long_and_short_sequences_of_a_model_are_exact(variant: str, dtype: torch.dtype) -> None:
    case = make(1, [3000, 1, 0, 513, 64], dtype=dtype, kv_heads=4, group=4, dim=128, block_tokens=64)
    case.check(case.part())


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_are_exact(variant: str, seed: int) -> None:
    draw = random.Random(seed)
    case = make(
        seed,
        [draw.choice((0, 1, draw.randint(1, 90), draw.randint(1, 900))) for _ in range(draw.randint(1, 6))],
        dtype=draw.choice((torch.float32, torch.bfloat16)),
        query_dtype=draw.choice((torch.float32, torch.bfloat16)),
        kv_heads=draw.randint(1, 5),
        group=draw.randint(1, 9),
        dim=draw.choice((8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256)),
        block_tokens=draw.choice((1, 4, 16, 48, 64, 100, 256)),
        window=draw.choice((None, None, 1, 40, 600)),
        late=draw.choice((0, 0, 5, -30)),
    )
    case.check(case.part())


def test_a_sequence_has_the_same_result_in_every_batch_and_on_any_number_of_threads(
    variant: str, threads: None
) -> None:
    case = make(2, [5000, 40, 700, 1300, 2], kv_heads=3, group=4, dim=64)
    torch.set_num_threads(1)
    first = case.part()
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        again = case.part()
        assert torch.equal(first.out, again.out)
        assert torch.equal(first.lse, again.lse)
    for row in range(len(case.q)):
        alone = case.part(slice(row, row + 1))
        assert torch.equal(first.out[row], alone.out[0])
        assert torch.equal(first.lse[row], alone.lse[0])


def test_a_plan_serves_layer_after_layer(variant: str) -> None:
    cases = [make(seed, [400, 30], kv_heads=2, group=2) for seed in (3, 4)]
    one = cases[0]
    plan = choose().attention.plan_batch(
        one.kv, one.tables, one.lengths, first_key_positions=one.firsts, query_positions=one.positions
    )
    one.lengths.add_(5)  # of the next iteration, for which another plan is made
    layers = [plan.attend(one.q, one.kv, one.scale), plan.attend(2 * one.q, one.kv, one.scale)]
    one.lengths.sub_(5)
    one.check(layers[0])
    assert not torch.equal(layers[0].out, layers[1].out)
    one.check(plan.attend(one.q, one.kv, one.scale))


def test_threads_call_it_at_the_same_time(variant: str) -> None:
    cases = [make(seed, [900 + seed, 17], kv_heads=2, group=4, dim=64) for seed in range(4)]
    parts: dict[int, list[Partial]] = {index: [] for index in range(len(cases))}

    def work(index: int) -> None:
        for _ in range(20):
            parts[index].append(cases[index].part())

    workers = [threading.Thread(target=work, args=(index,)) for index in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index, case in enumerate(cases):
        assert len(parts[index]) == 20
        assert all(torch.equal(part.out, parts[index][0].out) for part in parts[index])
        case.check(parts[index][0])


def test_scores_far_apart_neither_overflow_nor_vanish(variant: str) -> None:
    case = make(5, [300], dtype=torch.float32, kv_heads=1, group=1, dim=32)
    case.q.mul_(200)
    part = case.part()
    out, lse = case.expected(0)
    torch.testing.assert_close(part.out[0].double(), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(part.lse[0].double(), lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scores_that_rise_from_key_to_key_are_exact(variant: str, dtype: torch.dtype) -> None:
    """What weights are relative to changes again and again, within tiles and between them."""
    case = make(8, [700], dtype=dtype, kv_heads=1, group=5, dim=64, block_tokens=100)
    case.q.abs_()
    case.keys[0].abs_().mul_(torch.linspace(0, 40, 700).view(-1, 1, 1))
    index = torch.arange(700)
    case.kv[case.tables[0, index // 100], 0, :, index % 100] = case.keys[0]
    part = case.part()
    out, lse = case.expected(0)
    assert float(lse.min()) > 100
    torch.testing.assert_close(part.out[0].double(), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(part.lse[0].double(), lse, rtol=1e-5, atol=0)


def test_queries_of_bfloat16_that_come_as_float32_have_the_same_result(variant: str) -> None:
    """As holders have them: exactly, and in batches with others that are no bfloat16s."""
    case = make(9, [1500, 70], query_dtype=torch.bfloat16, kv_heads=2, group=4, dim=64, block_tokens=64)
    bf16, wide = case.part(), replace(case, q=case.q.float())
    case.check(bf16)
    assert torch.equal(wide.part().out, bf16.out)
    wide.q[1] += 1e-4
    mixed = wide.part()
    assert torch.equal(mixed.out[0], bf16.out[0])
    wide.check(mixed)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 4, 64), (3, 5, 24), (700, 8, 33)])
@pytest.mark.parametrize("count", [2, 3, 17])
def test_partials_are_merged_as_by_float64(variant: str, rows: int, heads: int, dim: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    outs = torch.randn(count, rows, heads, dim, generator=generator)
    lses = torch.randn(count, rows, heads, generator=generator) * 8
    lses[torch.rand(lses.shape, generator=generator) < 0.3] = -torch.inf
    lses[:, 0, 0] = -torch.inf
    outs[lses.isneginf()] = 0
    merged = merge([Partial(out=out, lse=lse) for out, lse in zip(outs, lses, strict=True)])
    weights = lses.double().softmax(0).nan_to_num()
    expected = (weights.unsqueeze(-1) * outs.double()).sum(0)
    torch.testing.assert_close(merged.out.double(), expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(merged.lse.double(), lses.double().logsumexp(0), rtol=EXACT, atol=EXACT)


def test_what_the_kernel_cannot_take_goes_to_torch() -> None:
    case = make(6, [50, 9], kv_heads=1, group=2, dim=12)
    assert not library.serves(case.kv)
    part = case.part()
    torch.testing.assert_close(part.out[0].double(), case.expected(0)[0], rtol=2e-2, atol=2e-2)


def test_a_variant_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "avx9000")
    with pytest.raises(InvalidInput, match="avx9000"):
        library.chosen()


def test_without_a_compiler_torch_computes_and_a_warning_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "SOURCES", sources(tmp_path))
    for name, value in (
        ("PATH", str(tmp_path)),
        ("CXX", ""),
        ("HOME", str(tmp_path)),
        ("XDG_CACHE_HOME", ""),
    ):
        monkeypatch.setenv(name, value)
    library._load.cache_clear()
    try:
        case = make(7, [50, 200])
        for _ in range(2):
            part = case.part()
            torch.testing.assert_close(part.out[1].double(), case.expected(1)[0], rtol=2e-2, atol=2e-2)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no C++ compiler" in caplog.records[0].__dict__["reason"]
    finally:
        library._load.cache_clear()


def quick_compiler(folder: Path, before: str = "") -> str:
    """One that does not optimize: what comes out is loaded only. `before` is what its script does first."""
    compiler = folder / "quick-c++"
    compiler.write_text(f'#!/bin/sh\n{before}\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    return str(compiler)


def test_processes_that_start_at_once_compile_one_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the cache, where the package's folder cannot be written to."""
    environ = {"PATH": os.environ["PATH"], "CXX": quick_compiler(tmp_path)}
    monkeypatch.setattr(build, "folders", lambda _: [Path("/dev/null/package"), tmp_path / "cache"])
    built: list[Path] = []
    workers = [threading.Thread(target=lambda: built.append(build.find_or_build(environ))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert built == [tmp_path / "cache" / build.file_name()] * 3
    assert [path.name for path in (tmp_path / "cache").glob("*.so")] == [build.file_name()]
    assert library.Kernel(built[0]).variants() == variants()


def test_a_library_of_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied = sources(tmp_path)
    (copied / build.file_name()).write_bytes(b"")
    monkeypatch.setattr(build, "SOURCES", copied)
    assert build.find({}) == copied / build.file_name()
    (copied / "kernel.cpp").write_text("// changed\n")
    assert build.find({}) is None


def sources(folder: Path) -> Path:
    """A copy without what was compiled from them."""
    copied = folder / "native"
    shutil.copytree(
        build.SOURCES, copied, ignore=shutil.ignore_patterns("*.so", "__pycache__", ".kernel.lock")
    )
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [17, 64, 700])
def test_keys_whose_scores_are_minus_infinity_weigh_nothing(
    variant: str, dtype: torch.dtype, hidden: int
) -> None:
    """However many come first: a whole step of the kernel, a whole tile, a whole unit."""
    case = make(3, [800], dtype=dtype)
    q = case.q.abs() + 0.1
    kv = case.kv.clone()
    for token in range(hidden):
        block, inside = divmod(token, kv.shape[3])
        kv[case.tables[0, block], 0, :, inside, 0] = -torch.inf
    keys = [case.keys[0].clone()]
    keys[0][:hidden, :, 0] = -torch.inf
    expected = replace(case, q=q, kv=kv, keys=keys)
    out, lse = expected.expected(0)
    part = expected.part()
    tolerance = EXACT if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(part.out[0].double(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part.lse[0].double(), lse, rtol=tolerance, atol=tolerance)


def test_a_row_that_sees_minus_infinity_alone_is_empty(variant: str) -> None:
    case = make(3, [100], dtype=torch.float32)
    kv = case.kv.clone()
    kv[:, 0] = -torch.inf
    part = replace(case, q=case.q.abs() + 0.1, kv=kv).part()
    assert bool(part.lse.isneginf().all())
    assert not bool(part.out.any())


def test_an_assembler_without_an_instruction_costs_its_variant_alone(tmp_path: Path) -> None:
    """A compiler that refuses what an older assembler does not know."""
    compiler = quick_compiler(tmp_path, 'case "$*" in *KVC_PAIRS*) exit 1;; esac')
    environ = {"PATH": os.environ["PATH"], "CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", sources(tmp_path))
        built = build.find_or_build(environ)
    assert library.Kernel(built).variants() == [name for name in variants() if name != "avx512bf16"]
