"""The model as slices cut at attention (Lamina): pure functions of tensors.

Slice 0 is the embedding and layer 0 up to q, k, v; slice i ends layer i-1 and begins layer i; the last one
ends with logits. Between two slices the caller stores k and v and computes attention wherever the KV lies.

A model may have a range of the layers only, as a pipeline stage does: what goes from one range to the next
is the residual stream between two layers. It may have some of each layer's heads and MLP columns only, as a
rank of a tensor parallel stage does: attention's output and the MLP's are then sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Backend, Opened, PagedRows, Sum
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tensor_rank import ALONE, TensorRank
from kvcommons.model.weights import Weights, random_weights, read_weights, torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Between two slices: the residual stream and what a layer's attention needs, in the model's dtype.

    hidden [T, hidden]; q [T, query_heads, head_dim] and k, v [T, kv_heads, head_dim], of a rank its own
    heads; q and k are rotated for `positions` [T]. `unrotated_q`, `cos` and `sin` [T, 1, head_dim / 2] are
    for the slices themselves.
    """

    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    unrotated_q: Tensor
    cos: Tensor
    sin: Tensor

    def rows(self, at: slice) -> State:
        """Some of the rows, as views."""
        return State(
            hidden=self.hidden[at],
            q=self.q[at],
            k=self.k[at],
            v=self.v[at],
            positions=self.positions[at],
            unrotated_q=self.unrotated_q[at],
            cos=self.cos[at],
            sin=self.sin[at],
        )

    def ending(self, hidden: Tensor) -> State:
        """With the residual stream of the rows that `Model.end` goes on with."""
        return self if hidden is self.hidden else replace(self, hidden=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryAngles:
    """Of rows, for their positions: cos and sin [T, 1, head_dim / 2] in float32, of angles in float64."""

    cos: Tensor
    sin: Tensor


class Model:
    """Weights and slices of `layers`, by their numbers. Thread-safe: nothing changes after loading."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        dtype: torch.dtype,
        backend: Backend,
        rank: TensorRank = ALONE,
        sum_ranks: Sum | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self._query_heads = len(rank.query_heads(spec.query_heads))
        self._sum = sum_ranks
        self.layers = range(min(weights.layers), max(weights.layers) + 1)
        self.dtype = dtype
        self.backend = backend
        self.scale = spec.head_dim**-0.5
        self._weights = weights
        self._operators = backend.operators
        layers = [weights.layers[layer] for layer in self.layers]
        self._forward = backend.operators.forward(layers) if sum_ranks is None else None
        frequencies = torch.tensor(spec.rotary.frequencies, dtype=torch.float64)
        self._frequencies = backend.device.upload(frequencies)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str = "bfloat16",
        backend: Backend | None = None,
        layers: range | None = None,
        rank: TensorRank = ALONE,
        sum_ranks: Sum | None = None,
    ) -> Model:
        """`backend`: what computes; None: the CPU. `layers`: of which, with nothing of the others read; None:
        all. `rank`: whose heads and columns of them it has, and by what the ranks are summed. Raises
        InvalidInput for a folder, dtype or division that is not served; the message says why."""
        spec, kind, backend = ModelSpec.read(folder), torch_dtype(dtype), backend or choose()
        rank.check(spec)
        weights = read_weights(folder, spec, kind, backend, layers or range(spec.layers), rank)
        return cls(spec, weights, kind, backend, rank, sum_ranks)

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        *,
        seed: int,
        init_range: float,
        dtype: str = "bfloat16",
        backend: Backend | None = None,
    ) -> Model:
        """The same weights for the same arguments; their identity is `spec.random_fingerprint`."""
        kind, backend = torch_dtype(dtype), backend or choose()
        weights = random_weights(
            spec, seed=seed, init_range=init_range, dtype=kind, backend=backend, layers=range(spec.layers)
        )
        return cls(spec, weights, kind, backend)

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, the query's own included; None where it sees all."""
        return self.spec.windows[layer]

    @property
    def first(self) -> bool:
        """Whether it begins with tokens: of several ranks the first one alone has the embedding."""
        return self._weights.embedding is not None

    @property
    def last(self) -> bool:
        """Whether it ends with logits: of several ranks the first one alone has the head."""
        return self._weights.ending is not None

    def begin(self, tokens: Tensor, positions: Tensor) -> State:
        """tokens, positions LongTensor [T] -> q, k, v of layer 0, which it has."""
        return self.enter(self.embed(tokens), positions)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens LongTensor [T] -> the residual stream [T, hidden] before layer 0, which it has."""
        assert self._weights.embedding is not None, "the first layer's range begins with tokens"
        return self._weights.embedding(tokens)

    def enter(self, hidden: Tensor, positions: Tensor) -> State:
        """The residual stream hidden [T, hidden] before its first layer -> q, k, v of that."""
        rotation, first = self.rotation(positions), self._weights.layers[self.layers.start]
        return self._state(first.open(hidden, None, rotation.cos, rotation.sin), positions, rotation)

    def advance(self, layer: int, state: State, attention: Tensor) -> State:
        """Finishes `layer` with its attention [T, query_heads, head_dim] (any float), begins layer + 1."""
        rotation = RotaryAngles(cos=state.cos, sin=state.sin)
        return self.resume(layer, state.hidden, attention, state.positions, rotation)

    def resume(
        self, layer: int, hidden: Tensor, attention: Tensor, positions: Tensor, rotation: RotaryAngles
    ) -> State:
        """`advance` from what it needs of a state: hidden [T, hidden], positions [T] and their rotation."""
        ends, begins = self._weights.layers[layer], self._weights.layers[layer + 1]
        cos, sin = rotation.cos, rotation.sin
        if self._sum is None:
            opened = ends.advance(begins, hidden, self._attended(attention), cos, sin)
        else:
            hidden, added = ends.close(hidden, self._attended(attention), self._sum)
            opened = begins.open(hidden, added, cos, sin)
        return self._state(opened, positions, rotation)

    def forward(self, layers: range, state: State, rows: PagedRows) -> tuple[State, float] | None:
        """Finishes `layers`, which end before the last one, with the attention of rows that attend here
        alone, and begins the one behind them; and the seconds that attention took. None, with nothing done,
        where layers go one by one."""
        if self._forward is None:
            return None
        first = self.layers.start
        at = range(layers.start - first, layers.stop - first)
        found = self._forward(at, state.hidden, (state.q, state.k, state.v), (state.cos, state.sin), rows)
        if found is None:
            return None
        opened, attention_s = found
        rotation = RotaryAngles(cos=state.cos, sin=state.sin)
        return self._state(opened, state.positions, rotation), attention_s

    def summed(self, part: Tensor) -> Tensor:
        """Of what all ranks of these layers have, on the device; `part` itself where there is one."""
        return part if self._sum is None else self._sum(part)

    def leave(self, state: State, attention: Tensor) -> Tensor:
        """Finishes its last layer -> the residual stream [T, hidden], with which the next range enters."""
        hidden, added = self._close_last(state.hidden, attention)
        return hidden + added

    def end(self, state: State, attention: Tensor, rows: Sequence[int]) -> Tensor:
        """Finishes the model's last layer, which it has, for `rows` only -> logits [len(rows), vocab]
        float32."""
        hidden = state.hidden
        if len(rows) != hidden.shape[0]:
            chosen = self.backend.device.longs(list(rows))
            hidden, attention = hidden[chosen], attention[chosen]
        return self.head(self.close(state.ending(hidden), attention))

    def close(self, state: State, attention: Tensor) -> Tensor:
        """Finishes the model's last layer, which it has -> what the head takes [T, hidden]."""
        ending = self._weights.ending
        assert ending is not None, "the last layer's range ends with logits"
        hidden, added = self._close_last(state.hidden, attention)
        return self._operators.add_and_norm(hidden, added, ending.norm, self.spec.norm_eps)[1]

    def head(self, closed: Tensor) -> Tensor:
        """closed [T, hidden], of `close` -> logits [T, vocab] float32."""
        assert self._weights.ending is not None, "the last layer's range ends with logits"
        return self._weights.ending.head(closed).float()

    def rotation(self, positions: Tensor) -> RotaryAngles:
        """positions LongTensor [T]."""
        angles = positions.double().unsqueeze(-1) * self._frequencies
        factor = self.spec.rotary.attention_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return RotaryAngles(cos=cos.float().unsqueeze(1), sin=sin.float().unsqueeze(1))

    def shifted_query(self, state: State, rotation: RotaryAngles) -> Tensor:
        """q [T, query_heads, head_dim] for keys that have moved since they were rotated: `rotation` is that
        of the rows' positions less the keys' shift, made once for all layers.

        A segment's shift is what is added to its stored positions to give the logical ones.
        """
        return self._operators.rotate(state.unrotated_q, rotation.cos, rotation.sin)

    def _state(self, opened: Opened, positions: Tensor, rotation: RotaryAngles) -> State:
        at = self._query_heads
        return State(
            hidden=opened.hidden,
            q=opened.rotated[:, :at],
            k=opened.rotated[:, at:],
            v=opened.v,
            positions=positions,
            unrotated_q=opened.qk[:, :at],
            cos=rotation.cos,
            sin=rotation.sin,
        )

    def _close_last(self, hidden: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what is still to be added to it."""
        return self._weights.layers[self.layers[-1]].close(hidden, self._attended(attention), self._sum)

    def _attended(self, attention: Tensor) -> Tensor:
        """attention [T, query_heads, head_dim] as the output's matrix takes it."""
        return attention.reshape(len(attention), -1).to(self.dtype)
