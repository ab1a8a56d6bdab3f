"""Layers and the attention between them as one graph, for tokens whose KV is in blocks on this GPU alone.

What a step of a batch launches kernel by kernel takes four times as long as a GPU computes. Where nobody else
has to be asked between two layers, an iteration is captured whole: for a number of rows, and for a number of
units that their keys are divided into (kvcommons.attention.cuda.units), both filled up with such as do
nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention.cuda.append import NOWHERE, append
from kvcommons.attention.cuda.attend import attend
from kvcommons.attention.cuda.units import Merge, Units
from kvcommons.backend.cuda_attention import CudaBatch, head_shape
from kvcommons.backend.interface import Layer, Opened, PagedRows, Partial
from kvcommons.backend.plain_layer import PlainLayer
from kvcommons.backend.slice_graphs import ROWS, Capture, Graph, copied, laid_into


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    layers: range
    rows: int
    kv: int  # its address
    plan_of: tuple[int, ...]  # each layer's, by its number among those that differ
    divided: tuple[tuple[int, int | None, bool], ...]  # each plan's units, window, and whether it merges


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Inputs of graphs for a number of rows."""

    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """Those of a plan, for a number of rows."""

    blocks: Tensor  # [rows, as many as there are]
    begins: Tensor
    counts: Tensor


class GraphedForward:
    """A Forward. Thread-safe: inputs, replay and results are of one caller at a time, in the order in which
    the device is given them."""

    def __init__(self, layers: Sequence[PlainLayer], capture: Capture) -> None:
        self._layers, self._capture = layers, capture
        self._lock = threading.Lock()
        self._rows: dict[int, _Rows] = {}
        self._divisions: dict[tuple[int, int], _Division] = {}  # by rows, and the plan's number
        self._tables: dict[tuple[int, int], Tensor] = {}  # by units, and the plan's number
        self._results: dict[int, Opened] = {}  # by rows
        self._graphs: dict[_Key, Graph] = {}

    @classmethod
    def of(cls, layers: Sequence[Layer], capture: Capture) -> GraphedForward | None:
        """None where a layer is none of ours."""
        plain = [one for one in layers if isinstance(one, PlainLayer)]
        return cls(plain, capture) if len(plain) == len(layers) else None

    def __call__(
        self,
        layers: range,
        hidden: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
        rows: PagedRows,
    ) -> tuple[Opened, float] | None:
        """How long attention takes is not told: nobody waits for it."""
        at = bisect_left(ROWS, len(hidden))
        plans = [plan for plan in rows.plans[layers.start : layers.stop] if isinstance(plan, CudaBatch)]
        if at == len(ROWS) or len(plans) < len(layers) or rows.kv.dtype != hidden.dtype:
            return None
        different = list({id(plan): plan.units for plan in plans}.values())
        numbers = {id(units): number for number, units in enumerate(different)}
        key = _Key(
            layers=layers,
            rows=ROWS[at],
            kv=rows.kv.data_ptr(),
            plan_of=tuple(numbers[id(plan.units)] for plan in plans),
            divided=tuple((len(units.table), units.window, units.merge is not None) for units in different),
        )
        with self._lock:
            inputs = self._copied_rows(key.rows, hidden, qkv, rotation, rows.slots)
            units = [
                self._copied_units(key.rows, number, one, rows.kv.shape[1])
                for number, one in enumerate(different)
            ]
            graph = self._graphs.get(key)
            if graph is None:
                of_layers = [units[number] for number in key.plan_of]
                results = self._results.get(key.rows)
                if results is None:
                    results = self._results[key.rows] = copied(self._compute(layers, inputs, rows, of_layers))
                graph = self._graphs[key] = self._capture(
                    lambda: laid_into(results, self._compute(layers, inputs, rows, of_layers))
                )
            graph.replay()
            return copied(graph.opened, len(hidden)), 0.0

    def _compute(self, layers: range, inputs: _Rows, rows: PagedRows, units: Sequence[Units]) -> Opened:
        heads = inputs.q.shape[1]
        shape = head_shape(rows.kv.shape[1:], rows.kv.element_size(), heads)
        opened = Opened(
            hidden=inputs.hidden, qk=inputs.q, v=inputs.v, rotated=torch.cat((inputs.q, inputs.k), dim=1)
        )
        # Each layer's in turn; rows that fill a graph up have no unit, and stay zeros.
        result = Partial(
            out=torch.zeros_like(inputs.q),
            lse=torch.zeros(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device),
        )
        for layer, divided in zip(layers, units, strict=True):
            q, k = opened.rotated[:, :heads], opened.rotated[:, heads:]
            append(rows.kv[layer], inputs.places, k, opened.v)
            attend(q, rows.kv[layer], divided, shape, rows.scale, result)
            # By its operators: its own graph of a slice is not to be part of this one.
            opened = PlainLayer.advance(
                self._layers[layer], self._layers[layer + 1], opened.hidden, result.out.flatten(1),
                inputs.cos, inputs.sin,
            )  # fmt: skip
        return opened

    def _copied_rows(
        self,
        rows: int,
        hidden: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
        places: Tensor,
    ) -> _Rows:
        given = (hidden, *qkv, *rotation)
        kept = self._rows.get(rows)
        if kept is None:
            made = [one.new_zeros((rows, *one.shape[1:])) for one in given]
            each = len(places) // len(hidden)
            kept = self._rows[rows] = _Rows(
                hidden=made[0], q=made[1], k=made[2], v=made[3], cos=made[4], sin=made[5],
                places=places.new_empty(rows * each),
            )  # fmt: skip
        targets = (kept.hidden, kept.q, kept.k, kept.v, kept.cos, kept.sin)
        torch._foreach_copy_([one[: len(hidden)] for one in targets], list(given))
        kept.places[: len(places)] = places
        kept.places[len(places) :].fill_(NOWHERE)
        return kept

    def _copied_units(self, rows: int, number: int, units: Units, blocks: int) -> Units:
        """In memory of a graph's own, with rows that nobody merges behind its own ones."""
        like = units.table
        kept = self._divisions.get((rows, number))
        if kept is None:
            kept = self._divisions[rows, number] = _Division(
                blocks=like.new_zeros((rows, blocks)),
                begins=like.new_zeros(rows),
                counts=like.new_zeros(rows),
            )
        table = self._tables.get((len(like), number))
        if table is None:
            table = self._tables[len(like), number] = torch.empty_like(like)
        table.copy_(like)
        tables, width = units.blocks.shape
        kept.blocks[:tables, :width] = units.blocks
        merge = None
        if units.merge is not None:
            assert units.merge.begins is not None
            assert units.merge.counts is not None
            kept.begins[: units.rows] = units.merge.begins
            kept.counts[: units.rows] = units.merge.counts
            kept.counts[units.rows :].zero_()
            merge = Merge(begins=kept.begins, counts=kept.counts)
        return Units(
            table=table, blocks=kept.blocks, unit_rows=1, window=units.window, rows=rows, parts=len(table),
            merge=merge,
        )  # fmt: skip
