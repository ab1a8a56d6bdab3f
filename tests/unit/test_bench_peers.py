"""What servers are compared by: the bound of each cell, what a cell measures, and the file that llama.cpp
reads."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.peers.bounds import Rates, Rows, in_words, iteration_s
from benchmarks.peers.cli import _compare, _row
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.grid import Cell, grid, kv_tokens
from benchmarks.peers.servers import Sizes, start
from benchmarks.report import geometric
from kvcommons.errors import InvalidInput, Unavailable
from kvcommons.model.spec import ModelSpec
from kvcommons.model.synthetic import random_config, write_random_folder

SPEC = ModelSpec.of(random_config("246m"))
LAYER = 1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 2816  # parameters
PARAMETERS = 16 * LAYER + 1024 * 32000
READING = Rates(read_bytes_s=1e9, product_flop_s=1e30)
COMPUTING = Rates(read_bytes_s=1e30, product_flop_s=1e9)


def test_a_token_reads_all_weights_and_the_kv_of_its_context() -> None:
    kv = 16 * 2 * 2 * 4 * 64
    one = iteration_s(SPEC, READING, [Rows(count=1, history=511)])
    assert one == pytest.approx((2 * PARAMETERS + 512 * kv) / 1e9)
    eight = iteration_s(SPEC, READING, [Rows(count=1, history=511)] * 8)
    assert eight == pytest.approx((2 * PARAMETERS + 8 * 512 * kv) / 1e9), "weights are read once for all"


def test_a_prompt_computes_each_token_and_half_of_the_square() -> None:
    """Its last token alone is sampled."""
    tokens = 512
    pairs = tokens * (tokens + 1) // 2
    flop = 2 * 16 * LAYER * tokens + 2 * 1024 * 32000 + 16 * 4 * 16 * 64 * pairs
    assert iteration_s(SPEC, COMPUTING, [Rows(count=tokens, history=0)]) == pytest.approx(flop / 1e9)
    later = iteration_s(SPEC, COMPUTING, [Rows(count=64, history=448)])
    assert later < iteration_s(SPEC, COMPUTING, [Rows(count=512, history=0)])


def test_an_operator_takes_the_longer_one_of_reading_and_computing() -> None:
    rates = Rates(read_bytes_s=20.0, product_flop_s=10.0)
    assert rates.seconds(read_bytes=200, flop=10) == 10.0
    assert rates.seconds(read_bytes=20, flop=1000) == 100.0


def test_a_sliding_window_bounds_what_a_token_sees() -> None:
    spec = ModelSpec.of(
        {
            **random_config("246m"),
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 128,
        }
    )
    for rates in (READING, COMPUTING):
        full = iteration_s(spec, rates, [Rows(count=1, history=127)])
        assert iteration_s(spec, rates, [Rows(count=1, history=5000)]) == pytest.approx(full)


def test_the_grid_has_the_cells_that_fit() -> None:
    names = [cell.name for cell in grid(32768, 64)]
    assert len(names) == len(set(names)) == 14
    assert max(cell.tokens for cell in grid(2048, 64)) == 512
    assert kv_tokens(grid(2048, 64)) == 2 * 32 * (512 + 4 * 32 + 64)


class Slow:
    """A server that answers prompts after a while that depends on their length, a token every 10 ms."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # the prompt's tokens and the answer's
        self.restarts = 0

    @property
    def client(self) -> Slow:
        return self

    def restart(self) -> None:
        self.restarts += 1

    def tokens(self, ids: list[int], **asked: Any) -> Iterator[dict[str, Any]]:
        self.asked.append((len(ids), asked["max_tokens"]))
        time.sleep(len(ids) / 1000)
        for at in range(asked["max_tokens"]):
            if at:
                time.sleep(0.01)
            yield {"choices": [{"logprobs": {"tokens": ["x"]}}]}


def test_a_cell_measures_first_tokens_and_times_between() -> None:
    client: Any = Slow()
    first_s = Cell(kind="prefill", tokens=50).measure(client, 1)
    assert first_s >= 0.05
    cached_s = Cell(kind="cached", tokens=50, new=50).measure(client, 1)
    assert cached_s >= 0.1
    assert client.restarts == 0
    assert Cell(kind="restarted", tokens=50, new=50).measure(client, 1) >= 0.1
    assert client.restarts == 1
    between_s = Cell(kind="decode", tokens=10, batch=3, answer=20).measure(client, 1)
    assert 0.01 <= between_s < first_s, "waiting for the prompt is not counted"
    with pytest.raises(Unavailable, match="never all under way"):
        Cell(kind="decode", tokens=10, batch=2).measure(client, 1)


def test_prompts_that_are_not_new_are_seen_before() -> None:
    client: Any = Slow()
    for cell in grid(32768, 64)[:2]:
        cell.prepare(client)
    assert not client.asked
    Cell(kind="decode", tokens=10, batch=3).prepare(client)
    Cell(kind="cached", tokens=20, new=5).prepare(client)
    assert client.asked == [(10, 1)] * 3 + [(20, 1)]


def test_a_cell_that_a_server_does_not_manage_leaves_the_others() -> None:
    client: Any = Slow()
    options = Namespace(rounds=2, answer=1, pause=0.0)
    cell = Cell(kind="decode", tokens=10, batch=2)
    compare = partial(_compare, spec=SPEC, rates=lambda: READING, options=options, progress=lambda _: None)
    row = _row(cell, partial(compare, {"kvcommons": client, "other": client}))
    assert row["cell"] == cell.name
    assert str(row["not measured"]).startswith("kvcommons: decode, 2 at once")
    good = _row(grid(32768, 64)[0], partial(compare, {"kvcommons": client}))
    assert "not measured" not in good


def test_each_round_is_held_against_what_the_machine_could_do_in_it() -> None:
    client: Any = Slow()
    slow = replace(READING, read_bytes_s=READING.read_bytes_s / 2)
    rates = iter([READING, slow, slow])
    options = Namespace(rounds=3, answer=1, pause=0.0)
    cell = Cell(kind="prefill", tokens=10)
    compare = partial(
        _compare, spec=SPEC, rates=lambda: next(rates), options=options, progress=lambda _: None
    )
    row = compare({"kvcommons": client}, cell)
    assert float(row["bound, ms"]) == pytest.approx(cell.bound_s(SPEC, slow) * 1e3)
    assert next(rates, None) is None, "once in each round that counts"


def test_rates_are_told_from_the_least_to_the_most() -> None:
    slow = Rates(read_bytes_s=33.4e9, product_flop_s=400e9)
    assert in_words([slow]) == "memory read at 33 GB/s, products at 400 GFLOP/s"
    fast = replace(slow, read_bytes_s=57e9)
    assert in_words([fast, slow]) == "memory read at 33 to 57 GB/s, products at 400 GFLOP/s"


ON_GPU = Sizes(kv_tokens=16384, kv_bytes=2 << 30, threads=2, sequences=8, window_tokens=8192, device="cuda")


def test_what_is_built_for_a_cpu_is_not_started_beside_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--peer llama\.cpp=URL"):
        start("llama.cpp", tmp_path, ON_GPU, tmp_path, progress=print)


def test_vllm_on_a_gpu_is_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed, and it takes no more of the GPU's memory than it needs."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    monkeypatch.setattr("sys.executable", str(tmp_path / "nowhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(Unavailable, match="there is no vllm on this PATH"):
        start("vllm", tmp_path, ON_GPU, tmp_path, progress=print)
    there = tmp_path / "bin" / "vllm"
    there.parent.mkdir()
    there.touch(mode=0o755)
    monkeypatch.setattr("kvcommons.backend.choice.device_bytes", lambda _device: 20 << 30)
    command = start("vllm", tmp_path, ON_GPU, tmp_path, progress=print).plan.command
    assert command[:3] == [str(there), "serve", str(tmp_path)]
    assert {"--block-size=16", "--num-gpu-blocks-override=1024", "--gpu-memory-utilization=0.500"} < set(
        command
    )


def test_a_mean_of_ratios_has_an_interval() -> None:
    mean, factor = geometric([2.0, 2.0, 2.0])
    assert (mean, factor) == (pytest.approx(2.0), pytest.approx(1.0))
    mean, factor = geometric([1.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert factor > 4, "two values say little"
    assert geometric([3.0]) == (pytest.approx(3.0), float("inf"))


def test_llama_cpp_gets_the_same_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    config = random_config("7m") | {"num_hidden_layers": 1, "vocab_size": 512}
    spec = write_random_folder(tmp_path / "model", config)
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    written = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    own = _float32(tmp_path / "model" / "model.safetensors")
    assert len(written) == len(own)
    assert np.array_equal(written["blk.0.ffn_down.weight"], own["model.layers.0.mlp.down_proj.weight"])
    assert np.array_equal(written["output_norm.weight"], own["model.norm.weight"])
    for name, theirs, heads in (("q_proj", "attn_q", 8), ("k_proj", "attn_k", 2)):
        expected = own[f"model.layers.0.self_attn.{name}.weight"].reshape(heads, 32, -1)
        found = written[f"blk.0.{theirs}.weight"].reshape(heads, 32, -1)
        assert np.array_equal(found[:, 0::2], expected[:, :16]), "a head's first half is its even rows"
        assert np.array_equal(found[:, 1::2], expected[:, 16:])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.rope.freq_base"] == 500000.0
    assert fields["llama.attention.head_count_kv"] == spec.kv_heads
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    names = fields["tokenizer.ggml.tokens"]
    assert {name: names.index(name) for name in tokenizer["model"]["vocab"]} == tokenizer["model"]["vocab"]
    assert names[fields["tokenizer.ggml.eos_token_id"]] == settings["eos_token"]
    assert fields["tokenizer.chat_template"] == settings["chat_template"]


def test_no_other_family_is_written_for_llama_cpp(tmp_path: Path) -> None:
    config = {
        **random_config("7m"),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 1,
    }
    write_random_folder(tmp_path / "q", config)
    with pytest.raises(InvalidInput, match="only a Llama"):
        write_gguf(tmp_path / "q", tmp_path / "q.gguf")


def _float32(file: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
