"""Weights in the form in which the slices use them: q, k, v in one matrix, gate and up in another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from kvcommons.backend.interface import Backend, Embedding, Layer, LayerWeights, Matrix
from kvcommons.backend.memory import TORCH_DTYPES
from kvcommons.backend.torch_attention import TorchAttention
from kvcommons.backend.torch_device import TorchDevice
from kvcommons.backend.torch_operators import TorchOperators
from kvcommons.errors import InvalidInput
from kvcommons.model.folder import weight_files
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tensor_rank import ALONE, TensorRank

_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Gives the tensor of a name in a Hugging Face folder, whose shape must be the one given.
Source = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of a model, or of a range of its layers: only what that computes with is read."""

    layers: Mapping[int, Layer]  # by their numbers in the model
    embedding: Embedding | None  # of tokens [T] -> [T, hidden]; of the first layer's range
    ending: Ending | None  # of the last layer's


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What comes after the last layer."""

    norm: Tensor  # [hidden]
    head: Matrix  # [vocab, hidden]; the embedding's where they are tied


def torch_dtype(name: str) -> torch.dtype:
    """Raises InvalidInput for anything but "bfloat16" and "float32"."""
    if name not in TORCH_DTYPES:
        raise InvalidInput(f"dtype {name!r} is not served; {', '.join(TORCH_DTYPES)} are", param="dtype")
    return TORCH_DTYPES[name]


def read_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    backend: Backend,
    layers: range,
    rank: TensorRank = ALONE,
) -> Weights:
    """Of these layers, what this rank computes with. Raises InvalidInput where tensors are missing, broken,
    or of other shapes than the config says."""
    holder: dict[str, Any] = {}
    try:
        for path in weight_files(folder):
            file: Any = safe_open(path, framework="pt")
            holder |= dict.fromkeys(file.keys(), file)
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}; download it again", param="model") from error

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in holder:
            raise InvalidInput(f"{folder} lacks the tensor {name}", param="model")
        tensor: Tensor = holder[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InvalidInput(
                f"{name} of {folder} has shape {list(tensor.shape)}, its config says {list(shape)}",
                param="model",
            )
        if tensor.dtype not in _FLOAT_DTYPES:
            raise InvalidInput(
                f"{tensor.dtype} of the tensor {name} of {folder} is not served", param="model"
            )
        return tensor

    return _assemble(spec, source, dtype, backend, layers, rank)


def random_weights(
    spec: ModelSpec, *, seed: int, init_range: float, dtype: torch.dtype, backend: Backend, layers: range
) -> Weights:
    """The same for the same arguments on every device: each tensor has a seed of its own."""
    return _assemble(spec, random_source(seed, init_range), dtype, backend, layers)


def random_source(seed: int, init_range: float) -> Source:
    """Gaussian with deviation `init_range`, around 1 for norms."""

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        mean = 1.0 if "norm" in name else 0.0
        return torch.empty(shape).normal_(mean, init_range, generator=generator)

    return source


def _assemble(
    spec: ModelSpec,
    source: Source,
    dtype: torch.dtype,
    backend: Backend,
    layers: range,
    rank: TensorRank = ALONE,
) -> Weights:
    device, operators = backend.device, backend.operators

    def read(name: str, shape: tuple[int, ...], rows: range, columns: range | None = None) -> Tensor:
        """Some rows of a tensor, and columns of them (None: all)."""
        part = source(name, shape)[rows.start : rows.stop].to(dtype)
        return part if columns is None else part[:, columns.start : columns.stop]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        """One below the other. Always a copy: what stays mapped from a file would change with it."""
        return device.upload(torch.cat(list(parts)))

    def norm(name: str, size: int) -> Tensor:
        return device.upload(source(name, (size,)).to(torch.float32))

    def matrix(named: Sequence[tuple[str, int, range]], columns: int, own: range, bias: bool) -> Matrix:
        """Tensors of [rows, columns] by name, with these rows of each, one below the other, and their own
        columns."""
        weight = [read(f"{name}.weight", (count, columns), rows, own) for name, count, rows in named]
        added = [read(f"{name}.bias", (count,), rows) for name, count, rows in named if bias]
        return operators.pack(joined(weight), joined(added) if bias else None)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        dim, hidden = spec.head_dim, range(spec.hidden)
        heads, kv_heads = rank.query_heads(spec.query_heads), rank.kv_heads(spec.kv_heads)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q = range(heads.start * dim, heads.stop * dim)
        kv = range(kv_heads.start * dim, kv_heads.stop * dim)
        columns = rank.mlp(spec.mlp)
        projections = [
            (f"{attention}.q_proj", spec.query_heads * dim, q),
            (f"{attention}.k_proj", spec.kv_heads * dim, kv),
            (f"{attention}.v_proj", spec.kv_heads * dim, kv),
        ]
        halves = [(f"{mlp}.{name}", spec.mlp, columns) for name in ("gate_proj", "up_proj")]
        closing = rank.number == 0  # what is added once is added by one of those that are summed
        qk_norm = None
        if spec.qk_norm:
            q_norm = norm(f"{attention}.q_norm.weight", dim).expand(len(heads), dim)
            k_norm = norm(f"{attention}.k_norm.weight", dim).expand(len(kv_heads), dim)
            qk_norm = torch.cat([q_norm, k_norm])
        weights = LayerWeights(
            attention_norm=norm(f"{prefix}.input_layernorm.weight", spec.hidden),
            qkv=matrix(projections, spec.hidden, hidden, spec.qkv_bias),
            qk_norm=qk_norm,
            output=matrix(
                [(f"{attention}.o_proj", spec.hidden, hidden)],
                spec.query_heads * dim,
                q,
                spec.output_bias and closing,
            ),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm.weight", spec.hidden),
            gate_up=matrix(halves, spec.hidden, hidden, spec.mlp_bias),
            down=matrix(
                [(f"{mlp}.down_proj", spec.hidden, hidden)], spec.mlp, columns, spec.mlp_bias and closing
            ),
            head_dim=dim,
            rotated_heads=len(heads) + len(kv_heads),
            epsilon=spec.norm_eps,
        )
        return operators.layer(weights)

    def table(name: str) -> Tensor:
        return joined([read(name, (spec.vocab_size, spec.hidden), range(spec.vocab_size))])

    first = layers.start == 0 and rank.number == 0
    last = layers.stop == spec.layers and rank.number == 0
    embedding: Embedding | None = None
    head: Matrix | None = None
    if last and spec.tied_embeddings:
        embedding, head = operators.pack_tied(table("model.embed_tokens.weight"))
    elif first:
        embedding = partial(F.embedding, weight=table("model.embed_tokens.weight"))
    ending = None
    if last:
        head = head or operators.pack(table("lm_head.weight"))
        ending = Ending(norm=norm("model.norm.weight", spec.hidden), head=head)
    return Weights(
        layers={index: layer(index) for index in layers},
        embedding=embedding if first else None,
        ending=ending,
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in a folder of such a model."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    nowhere = TorchDevice(torch.device("meta"))
    backend = Backend(device=nowhere, operators=TorchOperators(), attention=TorchAttention(nowhere))
    _assemble(spec, note, torch.float32, backend, range(spec.layers))
    return shapes
