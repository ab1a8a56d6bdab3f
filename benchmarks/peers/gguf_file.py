"""A model folder as llama.cpp reads it: a GGUF file in bfloat16 with the same weights, and the same tokenizer
where llama.cpp's name of its way to split text is known. Else tokens have names that nobody reads, and the
server can only be asked by ids, as cells are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from devstack.gguf_folder import PRE_TOKENIZERS, TENSORS
from kvcommons.errors import InvalidInput, Unavailable
from kvcommons.model.chat import template_source
from kvcommons.model.folder import read_json
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tokenizer import Tokenizer

_NAMES = {own: theirs for theirs, own in TENSORS.items()}
_LAYER = "model.layers."


def write_gguf(folder: Path, file: Path) -> None:
    """Raises InvalidInput for a folder that is no Llama in bfloat16, Unavailable without the package gguf."""
    try:
        import gguf
    except ImportError as error:
        raise Unavailable(
            "llama.cpp's models are written with gguf: pip install 'kvcommons[gguf]'"
        ) from error
    spec = ModelSpec.read(folder)
    if spec.family != "llama":
        raise InvalidInput(
            f"{folder} is a {spec.family}; only a Llama is written for llama.cpp", param="model"
        )
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(spec.context_window)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.mlp)
    writer.add_head_count(spec.query_heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(float(json.loads(spec.config)["rope_theta"]))
    writer.add_vocab_size(spec.vocab_size)
    _add_tokenizer(writer, folder, spec.vocab_size)
    heads = {"attn_q": spec.query_heads, "attn_k": spec.kv_heads}
    for name, values in _tensors(folder):
        kind = name.split(".")[-2]
        if values.ndim == 1:  # norms, which it wants in float32
            writer.add_tensor(name, _float32(values))
            continue
        bits = _permuted(values, heads[kind]) if kind in heads else values
        writer.add_tensor(
            name, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    from gguf import TokenType

    read = read_json(folder / "tokenizer.json")
    names = [f"Ġ{token}" for token in range(vocab_size)]
    types, merges, ends = [TokenType.NORMAL] * vocab_size, ["Ġ 0"], {"bos_token": 0, "eos_token": 0}
    pre = _pre_tokenizer(read.get("pre_tokenizer"))
    if pre is not None:
        for name, token in read["model"]["vocab"].items():
            names[token] = name
        for added in read["added_tokens"]:
            names[added["id"]] = added["content"]
            types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        merges = [one if isinstance(one, str) else " ".join(one) for one in read["model"]["merges"]]
        named = Tokenizer.read(folder).named_tokens
        ends |= {end: names.index(named[end]) for end in ends if end in named}
        template = template_source(folder)
        if template is not None:
            writer.add_chat_template(template)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ends["bos_token"])
    writer.add_eos_token_id(ends["eos_token"])
    writer.add_add_bos_token(False)


def _pre_tokenizer(settings: object) -> str | None:
    """llama.cpp's name of it; None where none is known."""
    known = (name for name, make in PRE_TOKENIZERS.items() if json.loads(make().__getstate__()) == settings)
    return next(known, None)


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's name of each, and the bits of its bfloat16. numpy has no such type: safetensors' header
    says where they lie."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(header_bytes))
        data = np.memmap(file, np.uint8, mode="r", offset=8 + header_bytes)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise InvalidInput(f"{file.name}: {name} is {entry['dtype']}, not BF16", param="model")
            first, last = entry["data_offsets"]
            yield _renamed(name), data[first:last].view(np.uint16).reshape(entry["shape"])


def _renamed(name: str) -> str:
    kind = name.removesuffix(".weight")
    if not kind.startswith(_LAYER):
        return f"{_NAMES[kind]}.weight"
    layer, _, kind = kind.removeprefix(_LAYER).partition(".")
    return f"blk.{layer}.{_NAMES[kind]}.weight"


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours, Hugging Face a head's halves: rows [heads * D, hidden] in its order."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
