"""What a backend computes, and in which terms it is asked: `AttentionBackend` for attention over paged KV,
`Operators` for what lies between a layer's attention and the next one's, and the `Device` whose tensors both
take.

`choose` (kvcommons.backend.choice) makes a `Backend` once; the model, the block memory and the engine are
given it. Nobody else asks what kind of device they compute on.

Tensors are either in host memory, or on the device: returned by `Device.upload` or by an operation on such
tensors. The two are never mixed in one operation. A device does what it is given in the order in which it was
given, and maybe later than the call returns: of its results nothing is in host memory until an event has been
waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvcommons.attention.native.exchange import Library


class DeviceEvent(Protocol):
    """Completes when the device has done all that it had been given when the event was made. Thread-safe."""

    @property
    def done(self) -> bool:
        """Whether it has completed. True from the start where the host computes."""

    def wait(self) -> None:
        """Returns when it has completed."""


class Device(Protocol):
    """Where an implementation's tensors lie, and how they come there and back. Thread-safe. Implementations
    derive from it."""

    @property
    def host(self) -> bool:
        """Whether it is this process: its tensors are in host memory, its threads compute, and what is given
        to it has been done when the call returns."""

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor in host memory, on the device. It may be the same memory, or be copied later: it is not to
        be changed while what it was uploaded for is under way."""

    def longs(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """A LongTensor on the device."""
        return self.upload(torch.tensor(values, dtype=torch.int64))

    def download(self, tensor: Tensor) -> tuple[Tensor, DeviceEvent]:
        """The device's tensor in host memory, contiguous, and the event after which it may be read. It may be
        the same memory."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """As `download`, waited for."""
        staged, event = self.download(tensor)
        event.wait()
        return staged

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory, contiguous and of undefined content, from which uploads are quick."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on the device, to be written by blocks: on the host huge pages that cost nothing until they
        are written."""

    def record(self) -> DeviceEvent:
        """Of all that the device was given until now, by any thread."""

    def keep_awake(self, seconds: float) -> None:
        """So long the threads that compute with the calling one wait awake for its next operation, where
        threads of ours compute."""
        return None


class Matrix(Protocol):
    """A packed weight and its bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], of x's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Matrices are [out, in], with their biases; norms are float32. Heads and columns of the MLP are those of
    a rank, where ranks divide them."""

    attention_norm: Tensor  # [hidden]
    qkv: Matrix  # [(query_heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [query_heads + kv_heads, head_dim]
    output: Matrix  # [hidden, query_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Matrix  # [2 * mlp, hidden]
    down: Matrix  # [hidden, mlp]
    head_dim: int
    rotated_heads: int  # query_heads + kv_heads
    epsilon: float  # of the norms


# Of a tensor [T, hidden] that each rank has a summand of; the result may be the same memory.
Sum = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A layer up to its attention: the residual stream hidden [T, hidden]; q and k [T, rotated_heads,
    head_dim], normed where the model does so, as they are and `rotated`; v [T, kv_heads, head_dim]."""

    hidden: Tensor
    qk: Tensor
    v: Tensor
    rotated: Tensor


class Layer(Protocol):
    """What a layer computes besides attention; cos, sin [T, 1, head_dim / 2] float32."""

    def open(self, hidden: Tensor, added: Tensor | None, cos: Tensor, sin: Tensor) -> Opened:
        """Up to q, k, v; `added` is what its predecessor has left to add to hidden [T, hidden]."""

    def close(self, hidden: Tensor, attended: Tensor, sum_ranks: Sum | None) -> tuple[Tensor, Tensor]:
        """From attended [T, query_heads * head_dim] on: the residual stream, and what is still to be added to
        it."""

    def advance(
        self, next_layer: Layer, hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> Opened:
        """`close`, without other ranks, and `open` of the layer that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows of a batch, a token each, or of a chunk, that attend over blocks here alone: kv [layers, blocks,
    2, kv_heads, block_tokens, head_dim], `slots` of their new keys and values as AttentionBackend.append has
    its rows, and a plan for each layer."""

    kv: Tensor
    slots: Tensor
    plans: Sequence[BatchPlan] | Sequence[ChunkPlan]
    scale: float


class Forward(Protocol):
    """Layers one behind the other, with attention between them."""

    def __call__(
        self,
        layers: range,
        hidden: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
        rows: PagedRows,
    ) -> tuple[Opened, float] | None:
        """From hidden [T, hidden] and q, k, v [T, its heads, head_dim], q and k rotated, of the first of
        `layers` to the layer behind the last one, and the seconds that attention took. Layers are numbered as
        in `rows`; `rotation` is cos and sin [T, 1, head_dim / 2] float32. None, with nothing done, for rows
        that it has no form for."""


# Rows of a matrix [vocab, hidden] by their numbers, LongTensor [T] -> [T, hidden].
Embedding = Callable[[Tensor], Tensor]


class Operators(Protocol):
    """What a slice of the model is made of besides attention. Pure functions of tensors on the device;
    thread-safe. `x` is of the model's dtype (bfloat16 or float32) and so is what is returned; sums are made
    in float32."""

    @property
    def multiplies(self) -> str:
        """Who does, for people to read: in the log, and in what `kvcommons status` shows."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """weight [out, in] and bias [out], in the form in which rows are multiplied with them quickest. It
        may be a copy: let go of `weight`."""

    def pack_tied(self, weight: Tensor) -> tuple[Embedding, Matrix]:
        """weight [vocab, hidden] to look rows up in and to multiply with: from one copy of it, where that can
        be."""

    def layer(self, weights: LayerWeights) -> Layer:
        """Of matrices that were packed here."""

    def forward(self, layers: Sequence[Layer]) -> Forward | None:
        """Of layers made here, which follow one another. None where they go one by one."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """The RMSNorm of x [..., size] over its last dimension, times weight float32, which has the shape of
        x's last dimensions."""

    def add_and_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """x [rows, size] plus `added` (None: nothing) of its shape, and the RMSNorm of that, times weight
        [size] float32."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [rows, heads, head_dim] rotated by cos, sin [rows, 1, head_dim / 2] float32. Pairs lie half a
        head apart, as in Hugging Face's weights."""

    def gate(self, mixed: Tensor) -> Tensor:
        """mixed [rows, 2 * mlp], gate and up -> silu(gate) * up [rows, mlp]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Attention over a part of the keys: `out` [T, H, D] float32, softmax over the part alone, and `lse`
    [T, H] float32, the log-sum-exp of its scores, -inf where it is empty."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Partial:
        """Of a part without keys, for queries `like` [T, H, D]."""
        return cls(
            out=like.new_zeros(like.shape, dtype=torch.float32),
            lse=like.new_full(like.shape[:2], -torch.inf, dtype=torch.float32),
        )


class BatchPlan(Protocol):
    """One row a sequence over the sequences' blocks: used for each layer of an iteration, by one thread at a
    time."""

    def attend(self, q: Tensor, kv: Tensor, scale: float, into: Partial | None = None) -> Partial:
        """q [B, H, D], of any strides but the last; kv one layer's blocks. `into`, contiguous, where the
        caller has memory for the result, and as the result then."""


class ChunkPlan(Protocol):
    """Consecutive rows of one sequence over its blocks: used for each layer, by one thread at a time."""

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> Partial:
        """q [T, H, D]; kv one layer's blocks."""


class AttentionBackend(Protocol):
    """Attention over KV in blocks, kv [blocks, 2, kv_heads, block_tokens, D] on the device, a layer's keys
    and values. Thread-safe, except for writes to a block that somebody reads.

    A plan holds what follows from block tables, lengths and positions alone (gather indices, masks): it is
    made once an iteration or chunk, and used for every layer. What plans are made of is in host memory; `q`,
    `kv`, partials, and what is appended are on the device.
    """

    @property
    def native_exchange(self) -> Library | None:
        """The functions by which a connection's thread moves a layer between its socket and this backend's
        tensors without Python (kvcommons.holder): they read and write memory by its address. None where the
        device is not the host, or nothing is compiled."""

    def plan_batch(
        self,
        kv: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        first_key_positions: Tensor,
        query_positions: Tensor,
        window: int | None = None,
    ) -> BatchPlan:
        """For KV of the shape and dtype of `kv`, any layer's.

        tables LongTensor [B, nb], padded with any valid block, not to be changed while the plan is in use;
        lengths, first_key_positions, query_positions LongTensor [B], which may be. Key i of a row (0 <= i <
        length) has position first_key_position + i; the row sees keys whose position is not after its
        query's, and with a window after that less the window. What it does not see is not read, and may be
        anything, NaN included. A length of 0 gives lse -inf.
        """

    def plan_chunk(
        self,
        kv: Tensor,
        query_heads: int,
        table: Tensor,
        length: int,
        *,
        first_key_position: int,
        query_positions: range,
        window: int | None = None,
    ) -> ChunkPlan:
        """The same for rows of one sequence; table LongTensor [nb]."""

    def merge(self, partials: Sequence[Partial]) -> Partial:
        """Exact online softmax over parts along tokens, of one shape; parts with lse -inf count as
        nothing."""

    def append(self, kv: Tensor, rows: Tensor, new: Tensor) -> None:
        """Writes `new` [T, 2 * kv_heads, D], keys before values, to a layer's `rows`, LongTensor
        [T * 2 * kv_heads] on the device: each a head of a token in kv seen as [rows, D]
        (BlockMemory.rows_of)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What a process computes with: chosen once, and handed down."""

    device: Device
    operators: Operators
    attention: AttentionBackend
