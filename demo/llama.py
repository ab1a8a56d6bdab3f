"""A plain Llama forward pass in torch, with the tensor names and the arithmetic of transformers' Llama.

It serves training and the recall check only. B is the batch, T the tokens of this call, P the tokens that the
cache holds already, H the heads, K the key-value heads, D the head size, C the hidden size, V the vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LlamaShape:
    """The numbers that fix the architecture, named as in a Hugging Face ``config.json``."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    # A name is looked for by what stands before it, however far back: that needs pairs that hardly turn. At
    # 10,000 seven of the 32 turn by less than a quarter over the whole window, at 100,000 twelve.
    rope_theta: float = 1e5


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """[..., D] to [..., D]: the second half negated before the first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key-value heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[B, T, C] with angles [T, D] to [B, T, C] and the keys and values [B, K, P + T, D]."""
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = (query * cos + rotate_half(query) * sin).to(value.dtype)
        key = (key * cos + rotate_half(key) * sin).to(value.dtype)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        held = key.shape[2] - length
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        all_keys, all_values = key, value
        if groups > 1:
            all_keys, all_values = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        mask = None
        if held and length > 1:
            mask = torch.ones(length, held + length, dtype=torch.bool).tril(held)
        mixed = functional.scaled_dot_product_attention(
            query, all_keys, all_values, attn_mask=mask, is_causal=not held and length > 1
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out, (key, value)


class MLP(nn.Module):
    """The gated feed-forward layer (SwiGLU)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each added to the residual stream after a normalisation before it."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[B, T, C] to [B, T, C] and this layer's keys and values."""
        mixed, held = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), held


class Body(nn.Module):
    """What a Hugging Face folder calls ``model``: embedding, layers and last normalisation."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """A Llama whose output matrix is its embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, parameter in self.named_parameters():
            if not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=0.02)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        turns = 1.0 / (shape.rope_theta**steps)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), turns)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Ids [B, T] to the last hidden states [B, T, C] and the cache extended by T tokens."""
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = (each[start : start + ids.shape[1]] for each in (self.cos, self.sin))
        x: Tensor = self.model.embed_tokens(ids)
        held: Cache = []
        for index, layer in enumerate(self.model.layers):
            x, pair = layer(x, cos, sin, cache[index] if cache else None)
            held.append(pair)
        normed: Tensor = self.model.norm(x)
        return normed, held

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., C] to logits [..., V]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    @torch.inference_mode()
    def generate(self, ids: list[int], end: int, most: int = 48) -> list[int]:
        """Greedy continuation of ``ids``, with the end token when it came within ``most`` tokens."""
        hidden, cache = self(torch.tensor([ids]))
        return self.go_on(hidden, cache, end, most)

    @torch.inference_mode()
    def go_on(self, hidden: Tensor, cache: Cache, end: int, most: int) -> list[int]:
        """Greedy tokens after the hidden states [1, T, C] of the last call and the cache it gave."""
        out: list[int] = []
        while len(out) < most:
            out.append(int(self.logits(hidden[0, -1]).argmax()))
            if out[-1] == end or cache[0][0].shape[2] >= self.shape.max_position_embeddings:
                break
            hidden, cache = self(torch.tensor([[out[-1]]]), cache)
        return out


def save_model(model: Llama, folder: Path, bos: int, eos: int, pad: int) -> None:
    """Writes ``config.json``, ``generation_config.json`` and ``model.safetensors`` (float32)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    generation = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "do_sample": False,
        "max_new_tokens": 64,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: Path) -> Llama:
    """The model of a folder that ``save_model`` wrote."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(LlamaShape(**{name: config[name] for name in asdict(LlamaShape())}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
