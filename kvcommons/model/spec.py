"""What a model folder says about the model (no torch)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvcommons.errors import InvalidInput
from kvcommons.model.folder import read_json, resolve_folder, weight_files
from kvcommons.model.rotary import Rotary
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.identity import LAYOUT_VERSION

__all__ = ["ModelSpec", "fingerprint", "model_info", "random_fingerprint", "resolve_folder"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What a config says about how it was written and is run, not about the numbers that the model gives.
_VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "_attn_implementation", "architectures")
_HASH_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Llama, Mistral, Qwen2 or Qwen3 decoder. `config` is its config.json in canonical form."""

    family: str
    vocab_size: int
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    context_window: int
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens
    rotary: Rotary
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    config: str

    @classmethod
    def read(cls, folder: Path) -> ModelSpec:
        """Raises InvalidInput for a folder that is not served: the message says why."""
        config = read_json(folder / "config.json")
        if not config:
            raise InvalidInput(f"{folder} has no config.json: it is no model folder", param="model")
        return cls.of(config)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From a parsed config.json. Raises InvalidInput."""
        family = str(config.get("model_type"))
        try:
            _check_served(config, family)
            return cls._of(config, family)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # A value of a kind that its key never has: each of them has its own way of failing.
            raise InvalidInput(f"config.json cannot be understood: {error}", param="model") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any], family: str) -> ModelSpec:
        hidden, query_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        head_dim = _count(config, "head_dim", 128 if family == "qwen3" else hidden // query_heads)
        kv_heads = _count(config, "num_key_value_heads", query_heads)
        layers = _count(config, "num_hidden_layers")
        if head_dim % 2 or query_heads % kv_heads:
            raise InvalidInput(
                f"{query_heads} query heads of {head_dim} cannot share {kv_heads} KV heads", param="model"
            )
        rotary = Rotary.of(config, head_dim)
        attention_bias = bool(config.get("attention_bias", False))
        kept = {key: value for key, value in config.items() if key not in _VOLATILE}
        return cls(
            family=family,
            vocab_size=_count(config, "vocab_size"),
            hidden=hidden,
            layers=layers,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=_count(config, "intermediate_size"),
            norm_eps=_norm_eps(config),
            context_window=int(_count(config, "max_position_embeddings") * rotary.context_factor),
            windows=_windows(config, family, layers),
            rotary=rotary,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
            output_bias=family in ("llama", "qwen3") and attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            config=json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True),
        )


def _check_served(config: Mapping[str, Any], family: str) -> None:
    served = ", ".join(_ARCHITECTURES)
    if family not in _ARCHITECTURES:
        raise InvalidInput(f"models of type {family!r} are not served; {served} are", param="model")
    architectures = config.get("architectures") or [_ARCHITECTURES[family]]
    if _ARCHITECTURES[family] not in architectures:
        raise InvalidInput(
            f"architecture {', '.join(architectures)} is not served; {_ARCHITECTURES[family]} is",
            param="model",
        )
    if config.get("quantization_config"):
        raise InvalidInput(
            "quantised weights are not served: use the bfloat16 or float32 folder", param="model"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidInput(f"the activation {config['hidden_act']!r} is not served, only silu", param="model")


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name) or default
    if type(value) is not int or not 0 < value < 1 << 31:
        raise InvalidInput(f"config.json: {name} must be a positive integer, not {value!r}", param="model")
    return value


def _norm_eps(config: Mapping[str, Any]) -> float:
    value = float(config.get("rms_norm_eps", 1e-6))
    if not 0 <= value < 1:
        raise InvalidInput(f"config.json: rms_norm_eps is between 0 and 1, not {value!r}", param="model")
    return value


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Of each layer, as `transformers` reads them."""
    window = config.get("sliding_window")
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        # transformers takes 4096 where the key is missing altogether.
        kinds = [window] if "sliding_window" in config else [4096]
        if len(set(config.get("layer_types") or [None])) > 1:
            raise InvalidInput("a Mistral whose layers differ in layer_types is not served", param="model")
        return tuple(kinds * layers)
    # Qwen2 and Qwen3
    if not config.get("use_sliding_window", False):
        window = None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise InvalidInput(
            f"layer_types must name sliding_attention or full_attention for each of {layers} layers",
            param="model",
        )
    if "sliding_attention" in types and not window:
        raise InvalidInput(
            "layer_types has sliding_attention, but use_sliding_window or sliding_window is not set",
            param="model",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def fingerprint(folder: Path, spec: ModelSpec, dtype: str, block_tokens: int) -> bytes:
    """32 bytes over weights, config, KV dtype ("bfloat16" or "float32") and block size.

    Reads all weights once (at memory speed where they are in the page cache).
    """
    contents = []
    for path in weight_files(folder):
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
        contents.append(digest.digest())
    return _fingerprint(contents, spec, dtype, block_tokens)


def random_fingerprint(
    spec: ModelSpec, *, seed: int, init_range: float, dtype: str, block_tokens: int
) -> bytes:
    """Of `Model.random` with the same arguments."""
    return _fingerprint([f"random {seed} {init_range!r}".encode()], spec, dtype, block_tokens)


def _fingerprint(weights: Iterable[bytes], spec: ModelSpec, dtype: str, block_tokens: int) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"kvcommons-model")
    for part in (*weights, spec.config.encode(), f"{dtype} {block_tokens} {LAYOUT_VERSION}".encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def model_info(name: str, spec: ModelSpec, fingerprint: bytes, dtype: str, block_tokens: int) -> pb.ModelInfo:
    """As services announce it; `name` is what GET /v1/models shows."""
    return pb.ModelInfo(
        name=name,
        fingerprint=fingerprint,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=block_tokens,
        kv_dtype=dtype,
        vocab_size=spec.vocab_size,
        context_window=spec.context_window,
        query_heads=spec.query_heads,
    )
