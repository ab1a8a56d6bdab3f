"""The least time that a machine can take for an iteration. Of each operator it is the longer one of reading
(bytes over the memory's bandwidth) and computing (operations over the rate of products); an iteration takes
their sum, for one operator needs what the one before it gave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.model.spec import ModelSpec

ELEMENT_BYTES = 2  # of weights and KV, in bfloat16


def kv_token_bytes(spec: ModelSpec) -> int:
    """Of one token, in all layers."""
    return 2 * ELEMENT_BYTES * spec.layers * spec.kv_heads * spec.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine was measured to do."""

    read_bytes_s: float
    product_flop_s: float

    def seconds(self, *, read_bytes: float, flop: float) -> float:
        return max(read_bytes / self.read_bytes_s, flop / self.product_flop_s)


def in_words(rates: Sequence[Rates]) -> str:
    """From the least to the most, for a report's title."""
    read = _span([one.read_bytes_s / 1e9 for one in rates], "GB/s")
    products = _span([one.product_flop_s / 1e9 for one in rates], "GFLOP/s")
    return f"memory read at {read}, products at {products}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """New tokens of one sequence: `count` of them, behind `history` tokens whose KV is there."""

    count: int
    history: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of an iteration's operators: of its layers, and of the head, for a row of each sequence."""

    matrices_s: float
    attention_s: float
    head_s: float

    @property
    def seconds(self) -> float:
        return self.matrices_s + self.attention_s + self.head_s


def bound(spec: ModelSpec, rates: Rates, rows: Sequence[Rows]) -> Bound:
    """Of these sequences at once, each of which gets one token sampled."""
    new = sum(one.count for one in rows)
    queries, kv = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrices = [(spec.hidden, queries + 2 * kv), (queries, spec.hidden)]
    matrices += [(spec.hidden, 2 * spec.mlp), (spec.mlp, spec.hidden)]
    return Bound(
        matrices_s=spec.layers * sum(_product_s(rates, matrix, new) for matrix in matrices),
        attention_s=sum(_attention_s(spec, rates, rows, window) for window in spec.windows),
        head_s=_product_s(rates, (spec.hidden, spec.vocab_size), len(rows)),
    )


def iteration_s(spec: ModelSpec, rates: Rates, rows: Sequence[Rows]) -> float:
    """Seconds of all of them."""
    return bound(spec, rates, rows).seconds


def _span(values: Sequence[float], unit: str) -> str:
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{least} {unit}" if least == most else f"{least} to {most} {unit}"


def _product_s(rates: Rates, matrix: tuple[int, int], rows: int) -> float:
    parameters = matrix[0] * matrix[1]
    return rates.seconds(read_bytes=ELEMENT_BYTES * parameters, flop=2 * parameters * rows)


def _attention_s(spec: ModelSpec, rates: Rates, rows: Sequence[Rows], window: int | None) -> float:
    """Of one layer. A row sees what is before it and itself, as far back as the layer's window."""
    keys = pairs = 0
    for one in rows:
        total = one.history + one.count
        if window is None or total <= window:
            keys += total
            pairs += one.count * one.history + one.count * (one.count + 1) // 2
        else:
            keys += min(total, window + one.count - 1)
            pairs += sum(min(one.history + number, window) for number in range(1, one.count + 1))
    return rates.seconds(
        read_bytes=kv_token_bytes(spec) // spec.layers * keys,
        flop=4 * spec.query_heads * spec.head_dim * pairs,
    )
