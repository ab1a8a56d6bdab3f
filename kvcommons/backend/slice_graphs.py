"""Slices of the model that a GPU is given as one: what a layer computes after its attention and the next one
before it is a dozen kernels, whose launches take longer than a few rows do.

A slice is captured once for a number of rows, rows are filled up to the next such number, and what it
computes from lies in the same memory each time.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcommons.backend.interface import Layer, LayerWeights, Opened, Operators
from kvcommons.backend.plain_layer import PlainLayer

# Numbers of rows that are captured for. With more, computing takes longer than launching.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Graph(Protocol):
    """What was captured."""

    @property
    def opened(self) -> Opened:
        """Where its results are after each replay."""

    def replay(self) -> None:
        """Computes them anew from what is in its inputs' memory."""


# Runs a slice and keeps what it gave the device to do.
Capture = Callable[[Callable[[], Opened]], Graph]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    layer: int
    rows: int


class SliceGraphs:
    """Of all layers of a model. Thread-safe: inputs, replay and results are of one caller at a time, in the
    order in which the device is given them."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._lock = threading.Lock()
        self._inputs: dict[int, list[Tensor]] = {}  # of all layers, by rows
        self._results: dict[int, Opened] = {}  # likewise: of each graph its own would be gigabytes
        self._graphs: dict[_Key, Graph] = {}

    def run(self, layer: int, compute: Callable[..., Opened], given: Sequence[Tensor]) -> Opened | None:
        """`compute` of the tensors `given`, each with a row a token; `layer` tells one slice from the others.
        None for more rows than any graph has."""
        rows = len(given[0])
        at = bisect_left(ROWS, rows)
        if at == len(ROWS):
            return None
        key = _Key(layer=layer, rows=ROWS[at])
        with self._lock:
            inputs = self._inputs.get(key.rows)
            if inputs is None:
                inputs = [one.new_zeros((key.rows, *one.shape[1:])) for one in given]
                self._inputs[key.rows] = inputs
            torch._foreach_copy_([one[:rows] for one in inputs], list(given))
            graph = self._graphs.get(key)
            if graph is None:
                results = self._results.get(key.rows)
                if results is None:
                    results = self._results[key.rows] = copied(compute(*inputs))
                graph = self._graphs[key] = self._capture(lambda: laid_into(results, compute(*inputs)))
            graph.replay()
            return copied(graph.opened, rows)


def laid_into(results: Opened, opened: Opened) -> Opened:
    """`results`, with what is in `opened`."""
    torch._foreach_copy_(_tensors(results), _tensors(opened))
    return results


def copied(opened: Opened, rows: int | None = None) -> Opened:
    """The first `rows` (None: all), in memory that the next replay does not write to."""
    sources = [one[:rows] for one in _tensors(opened)]
    copies = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in sources]
    torch._foreach_copy_(copies, sources)
    hidden, qk, v, rotated = copies
    return Opened(hidden=hidden, qk=qk, v=v, rotated=rotated)


def _tensors(opened: Opened) -> list[Tensor]:
    return [opened.hidden, opened.qk, opened.v, opened.rotated]


class GraphedLayer(PlainLayer):
    """A layer whose way to the next one is a graph, where there are few rows."""

    def __init__(self, operators: Operators, weights: LayerWeights, graphs: SliceGraphs, number: int) -> None:
        """`number`: of the layer, among those of `graphs`."""
        super().__init__(operators, weights)
        self._graphs, self._number = graphs, number

    def advance(
        self, next_layer: Layer, hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> Opened:
        def compute(*given: Tensor) -> Opened:
            return super(GraphedLayer, self).advance(next_layer, *given)

        given = (hidden, attended, cos, sin)
        return self._graphs.run(self._number, compute, given) or compute(*given)


class CudaGraph:
    """A Graph on an NVIDIA GPU."""

    def __init__(self, compute: Callable[[], Opened], pool: Any, stream: torch.cuda.Stream) -> None:
        """`pool`: torch's handle of memory, for graphs that are never replayed at once. Nothing may be
        compiled while a slice is captured, so it is computed once before."""
        computing = torch.cuda.current_stream(stream.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            compute()
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.opened = compute()
            finally:
                self._graph.capture_end()
        computing.wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


def cuda_capture(place: torch.device) -> Capture:
    """On a stream of its own, for the stream that computes cannot be captured where it is the default one."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
    return lambda compute: CudaGraph(compute, pool, stream)
