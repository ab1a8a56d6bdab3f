"""A Llama's GGUF file as a Hugging Face folder: config.json, weights in bfloat16, tokenizer, chat template.

The `gguf` package reads the file and dequantises its tensors; torch is not needed. Only what the models of
`devstack.fetch` use is known: the Llama architecture and a byte-level BPE.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvcommons.errors import InvalidInput, Unavailable
from kvcommons.model.synthetic_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import numpy as np

_CONTROL = 3  # of tokenizer.ggml.token_type
# What llama.cpp calls a pre-tokenizer, in the terms of `tokenizers`.
PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The key-value pairs of a file."""

    values: Mapping[str, Any]
    file: Path

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise InvalidInput(f"{self.file.name} does not name {key}: it is no model that can be converted")
        return self.values[key]


def write_folder(file: Path, folder: Path) -> None:
    """Converts `file` into `folder`, which has to exist. The same bytes for the same file.

    Raises InvalidInput for a file of another kind, Unavailable without the package gguf.
    """
    try:
        import gguf
    except ImportError as error:
        raise Unavailable(
            "a GGUF file is read with the package gguf, which is not installed: pip install 'kvcommons[gguf]'"
        ) from error
    try:
        reader = gguf.GGUFReader(file)
    except ValueError as error:
        raise InvalidInput(f"{file} is no GGUF file: {error}") from error
    metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()}, file)
    config = _config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(metadata, folder)
    _write_weights(_weights(reader, config), folder / "model.safetensors")


def _config(metadata: _Metadata, *, tied: bool) -> dict[str, Any]:
    if metadata["general.architecture"] != "llama":
        raise InvalidInput(
            f"{metadata.file.name} is a {metadata['general.architecture']}; only a llama can be converted"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        "hidden_act": "silu",
        # The file has it in float32; people wrote it in decimal.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(metadata: _Metadata, folder: Path) -> None:
    kind, pre = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise InvalidInput(f"{metadata.file.name} has a tokenizer {kind}/{pre}, which cannot be converted")
    texts = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={text: token for token, text in enumerate(texts)}, merges=merges)
    )
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [text for text, type_ in zip(texts, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in control])
    named = {name: texts[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "padding")}
    write_tokenizer(
        folder, tokenizer, metadata["tokenizer.chat_template"],
        bos=named["bos"], eos=named["eos"], pad=named["padding"],
    )  # fmt: skip


def _weights(reader: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's name of each tensor, and it in float32."""
    import gguf

    rotated = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")  # "blk.3.attn_q.weight", "output.weight"
        if kind not in TENSORS:
            raise InvalidInput(f"the file has a tensor {tensor.name}, which no llama has")
        name = f"{TENSORS[kind]}.weight"
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if kind in rotated:
            values = _unpermuted(values, rotated[kind])
        yield f"model.layers.{block[1]}.{name}" if block else name, values


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours, Hugging Face a head's halves: rows [heads * D, hidden] in its order."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _write_weights(weights: Iterator[tuple[str, np.ndarray]], file: Path) -> None:
    from safetensors import TensorSpec, serialize_file

    tensors = {name: _bfloat16(values) for name, values in weights}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in tensors.items()
    }
    serialize_file(specs, file, metadata={"format": "pt"})  # `tensors` lives until it has returned


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, ties to even; numpy has no such type."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
