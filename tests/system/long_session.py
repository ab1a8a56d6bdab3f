"""A session of a million tokens: given as a document, killed in the middle, gone on with, chatted on, killed
again and continued from disk; what that took, and whether it is right.

    python -m tests.system.long_session --tokens 1048576 --folder FOLDER

Most of a million tokens' time goes into attention, 4 n² d h_q l / 2 operations with causality (Mnemosyne,
equation 1). A reference that computes all of it would take as long again, so it computes rows that are drawn:
of the KV that lies in the store, and of the answer, from the KV that lies in the store.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from devstack.rest import Turn
from kvcommons.blockstore.loader import BlockLoader
from kvcommons.errors import Unavailable
from kvcommons.model.spec import ModelSpec, fingerprint
from kvcommons.model.synthetic import write_random_folder
from kvcommons.rblock.identity import IdentityChain, tenant_salt
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline
from tests.exactness import assert_greedy, logits_of
from tests.machine import scaled
from tests.system.stack import Stack

SESSION, SHORT = "the-long-one", "a-short-one"
BLOCK, LAYERS, QUERY_HEADS, HEAD_DIM = 64, 2, 2, 64
ROPE_THETA = 500000.0
CHUNK = 65536  # rows of the reference at a time
WHOLE = 1 << 17  # tokens that the reference computes as a whole, too
READ_BLOCKS = 1024
PART_S = 5.0  # of a document of a million tokens
ANSWER = 16
QUESTION = "Who likes blue?"
# Sums of a million terms in another order, in float32.
TOLERANCE = 2e-3
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": QUERY_HEADS * HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": QUERY_HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": ROPE_THETA,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Times in seconds; bytes in all layers."""

    tokens: int
    document_s: float  # from the request to `completed`, with the death in the middle
    attention_flop: float
    killed_at_tokens: int
    resumed_at_tokens: int  # what it had when it was first heard of again
    stack_back_s: float  # from kill -9 of everything until the stack was ready
    first_token_in_memory_s: float
    first_token_from_disk_s: float
    cached_tokens: int
    kv_bytes: int
    disk_bytes_per_s: float  # reading past the page cache, with as many threads as the store reads with
    over_disk: float  # first token from disk, over the time in which the disk is read
    router_cpu_s: float  # of one turn of the session
    router_cpu_short_s: float  # of one turn of a session of some dozens of tokens


def room_for(tokens: int) -> int:
    """Of a document of about so many, and a chat on it."""
    return tokens * 9 // 8 + 4096


def write_model(folder: Path, tokens: int) -> Path:
    """With room for a document of so many tokens and a chat."""
    config = {**MODEL, "max_position_embeddings": room_for(tokens)}
    write_random_folder(folder, config, dtype="float32", init_range=0.08)
    return folder


def tables(tokens: int, dram_share: float = 1 / 8) -> dict[str, dict[str, Any]]:
    """All of it fits prefill and decode; the store's DRAM has `dram_share` of it."""
    shared = {
        "dtype": "float32",
        "block_tokens": BLOCK,
        "capacity_tokens": room_for(tokens) + 4096,
        "touch_memory": True,  # or what is loaded waits for the system to give memory
    }
    kv_bytes = 4 * 2 * HEAD_DIM * LAYERS * tokens
    return {
        "prefill": shared,
        # A tail is computed where its history is loaded to.
        "decode": {**shared, "max_local_prefill_tokens": 256},
        "kvstore": {
            "dram_bytes": max(int(kv_bytes * dram_share), 16 << 20),
            "disk_bytes": 4 * kv_bytes,
            "touch_memory": True,
        },
        "router": {
            "max_body_bytes": 64 << 20,
            "lease_ms": 3000,
            "document_part_s": PART_S * tokens / (1 << 20),
        },
    }


def text_of(tokens: int, seed: int) -> str:
    """Of about so many tokens of the synthetic tokenizer."""
    draw = random.Random(seed)
    colours = ("blue", "green", "red", "white")
    sentences = tokens // 29
    return " ".join(
        f"My friend number {i} likes the colour {draw.choice(colours)}." for i in range(sentences)
    )


def run(folder: Path, tokens: int, seed: int = 1, dram_share: float = 1 / 8) -> Figures:
    """Raises AssertionError where the session is not what the reference says."""
    model = write_model(folder / "model", tokens)
    path = f"/v1/sessions/{SESSION}/prefill"
    stack = Stack(folder / "stack", tables=tables(tokens, dram_share), model=str(model), attention_pool=0)
    with stack:
        began = time.monotonic()
        stack.client.post(path, {"content": text_of(tokens, seed)})
        killed_at = _until(stack, path, 50)
        assert killed_at < 0.95 * tokens, "it was over before anything could happen to it"
        died = time.monotonic()
        stack.restart()
        back_s = time.monotonic() - died
        resumed_at = _until(stack, path, 1)
        assert resumed_at >= 0.5 * killed_at, "what was saved was computed again"
        _until(stack, path, 101)
        document_s = time.monotonic() - began
        _ask(stack, SHORT)
        router_short_s, _ = _router_cpu(stack, SHORT)
        warm = _ask(stack, SESSION)
        router_s, _ = _router_cpu(stack, SESSION)
        stack.restart()
        _ask(stack, SHORT)
        rate = _disk_rate(folder / "rate")
        turn = _ask(stack, SESSION)
        found = stack.client.session(SESSION)["token_ids"]
        with _stored(stack, model, found[: turn.cached_tokens]) as stored:
            _check(model, found, turn, stored, seed)
        stack.assert_no_block_is_held()
    stack.assert_gone()
    kv_bytes = 4 * 2 * HEAD_DIM * LAYERS * turn.cached_tokens
    return Figures(
        tokens=len(found),
        document_s=document_s,
        attention_flop=2.0 * len(found) ** 2 * HEAD_DIM * QUERY_HEADS * LAYERS,
        killed_at_tokens=killed_at,
        resumed_at_tokens=resumed_at,
        stack_back_s=back_s,
        first_token_in_memory_s=warm.ttft_s,
        first_token_from_disk_s=turn.ttft_s,
        cached_tokens=turn.cached_tokens,
        kv_bytes=kv_bytes,
        disk_bytes_per_s=rate,
        over_disk=turn.ttft_s * rate / kv_bytes,
        router_cpu_s=router_s,
        router_cpu_short_s=router_short_s,
    )


def _until(stack: Stack, path: str, percent: float) -> int:
    """Follows the document, over restarts, until so much is computed or it is completed; how many tokens."""
    shown = 0.0
    while True:
        try:
            with closing(stack.client.events(f"{path}?stream=true")) as states:
                for state in states:
                    assert state["status"] in ("running", "completed"), state
                    if time.monotonic() > shown + 30:
                        shown = time.monotonic()
                        print(json.dumps({"state": state}), file=sys.stderr, flush=True)
                    if state["status"] == "completed" or state["percent"] >= percent:
                        return int(state["computed_tokens"])
        except Unavailable:
            time.sleep(scaled(0.1))


def _ask(stack: Stack, session: str) -> Turn:
    return stack.client.say(QUESTION, session, max_tokens=ANSWER, temperature=0, ignore_eos=True)


def _router_cpu(stack: Stack, session: str) -> tuple[float, Turn]:
    """Of a turn of this session: what its router's process computed meanwhile."""
    stat = Path(f"/proc/{stack.pid('router')}/stat")

    def spent() -> float:
        user, system = stat.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    before = spent()
    turn = _ask(stack, session)
    return spent() - before, turn


def _disk_rate(file: Path, parts: int = 4, part_bytes: int = 128 << 20, read_bytes: int = 1 << 20) -> float:
    """Bytes a second, read past the page cache by as many threads as the store reads with."""
    for _ in range(parts):
        with file.open("ab") as output:
            output.write(os.urandom(part_bytes))
            os.fsync(output.fileno())

    def read(part: int) -> None:
        buffer, descriptor = mmap.mmap(-1, read_bytes), os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            for offset in range(part * part_bytes, (part + 1) * part_bytes, read_bytes):
                assert os.preadv(descriptor, [buffer], offset) == read_bytes
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(parts) as readers:
        began = time.monotonic()
        list(readers.map(read, range(parts)))
        taken_s = time.monotonic() - began
    file.unlink()
    return parts * part_bytes / taken_s


@contextmanager
def _stored(stack: Stack, model: Path, tokens: Sequence[int]) -> Iterator[Tensor]:
    """The KV [layers, 2, tokens, head_dim] of these tokens, read from the kvstore."""
    spec = ModelSpec.read(model)
    identity = fingerprint(model, spec, "float32", BLOCK)
    secret = (stack.data / "secret").read_bytes()
    chain = IdentityChain(tenant_salt(secret, "local"), identity, BLOCK)
    ids = chain.extend(tokens)
    layout = Layout(
        layers=LAYERS, kv_heads=1, block_tokens=BLOCK, head_dim=HEAD_DIM, kv_dtype="float32",
        query_heads=QUERY_HEADS,
    )  # fmt: skip
    memory = torch.empty(LAYERS, len(ids), 2, BLOCK, HEAD_DIM)
    loader = BlockLoader(lambda corrupt: None)
    try:
        for first in range(0, len(ids), READ_BLOCKS):
            part = ids[first : first + READ_BLOCKS]

            @contextmanager
            def into(layer: int, start: int, count: int, first: int = first) -> Iterator[list[memoryview]]:
                objects = memory[layer, first + start : first + start + count].numpy()
                yield [memoryview(one).cast("B") for one in objects]

            address = f"shm:{stack.runtime / 'kvstore'}.d"
            deadline = Deadline.after(scaled(60))
            load = loader.load(address, identity, layout, part, into, deadline)
            there = load.wait_all(deadline)
            assert there == len(part), f"{there} of {len(part)} blocks from {first} on: {load.failure}"
    finally:
        loader.close()
    yield memory.transpose(1, 2).reshape(LAYERS, 2, len(ids) * BLOCK, HEAD_DIM)


class Reference:
    """The modules of transformers, applied to the rows that are asked for."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.layers: list[Any] = list(self.model.model.layers)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.model.model.embed_tokens(tokens)

    def kv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [rows, hidden]: keys and values [rows, head_dim]."""
        attention, normed = self.layers[layer].self_attn, self.layers[layer].input_layernorm(hidden)
        return self._rotated(attention.k_proj(normed)[:, None], positions)[:, 0], attention.v_proj(normed)

    def passed(self, layer: int, hidden: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows [rows, hidden] behind this layer, whose keys and values [positions, head_dim] are given."""
        block = self.layers[layer]
        queries = block.self_attn.q_proj(block.input_layernorm(hidden)).view(-1, QUERY_HEADS, HEAD_DIM)
        queries = self._rotated(queries, positions)
        seen = torch.empty(len(hidden), QUERY_HEADS, HEAD_DIM)
        for row, position in enumerate(positions.tolist()):
            scores = queries[row].double() @ keys[: position + 1].double().T / HEAD_DIM**0.5
            seen[row] = (scores.softmax(-1) @ values[: position + 1].double()).float()
        hidden = hidden + block.self_attn.o_proj(seen.view(len(hidden), -1))
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(hidden))

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Of [rows, heads, head_dim]. Angles are reckoned in float64: in float32, as transformers has them,
        those of a million positions are wrong by hundredths."""
        pairs = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64)
        angles = positions.double()[:, None] * ROPE_THETA ** (-pairs / HEAD_DIM)
        angles = torch.cat([angles, angles], dim=-1)[None]
        cos, sin = angles.cos().float(), angles.sin().float()
        rotated, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
        return rotated[0].transpose(0, 1)


@torch.inference_mode()
def _check(model: Path, tokens: Sequence[int], turn: Turn, stored: Tensor, seed: int) -> None:
    """The stored KV of the first layer whole, of the second in rows that are drawn (a third of them from the
    last thousand), and the answer's tokens by the KV that is stored."""
    reference, ids = Reference(model), torch.tensor(tokens)
    kept = stored.shape[2]
    keys, values = torch.empty(len(ids), HEAD_DIM), torch.empty(len(ids), HEAD_DIM)
    for first in range(0, len(ids), CHUNK):
        rows = slice(first, min(first + CHUNK, len(ids)))
        positions = torch.arange(rows.start, rows.stop)
        keys[rows], values[rows] = reference.kv(0, reference.embedded(ids[rows]), positions)
    _assert_near(stored[0, 0], keys[:kept], "keys of the first layer")
    _assert_near(stored[0, 1], values[:kept], "values of the first layer")
    draw = random.Random(seed)
    drawn = {draw.randrange(kept) for _ in range(64)} | {draw.randrange(kept - 1024, kept) for _ in range(32)}
    answered = list(range(kept, len(ids) - 1))
    positions = torch.tensor([*sorted(drawn), *answered])
    behind = reference.passed(0, reference.embedded(ids[positions]), positions, keys, values)
    deep_keys, deep_values = reference.kv(1, behind, positions)
    checked = len(drawn)
    _assert_near(stored[1, 0, positions[:checked]], deep_keys[:checked], "keys of the second layer")
    _assert_near(stored[1, 1, positions[:checked]], deep_values[:checked], "values of the second layer")
    first = turn.prompt_tokens - 1  # the row that chooses the answer's first token
    assert first >= kept, "the answer's first row is a stored one"
    chosen = slice(checked + first - kept, None)
    whole_keys = torch.cat([stored[1, 0], deep_keys[checked:]])
    whole_values = torch.cat([stored[1, 1], deep_values[checked:]])
    last = reference.passed(1, behind[chosen], positions[chosen], whole_keys, whole_values)
    made = tokens[turn.prompt_tokens : turn.prompt_tokens + ANSWER]
    assert_greedy(made, reference.logits(last)[:ANSWER])
    if len(tokens) <= WHOLE:
        assert_greedy(made, logits_of(reference.model, tokens[: turn.prompt_tokens], made))


def _assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"{what} differ from the reference by {error:.2e} of the largest"
    print(json.dumps({what: float(error)}), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--dram-share", type=float, default=1 / 8, help="of the KV, which the store's DRAM holds"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for data and logs")
    options = parser.parse_args(arguments)
    figures = run(options.folder, options.tokens, options.seed, options.dram_share)
    print(json.dumps(asdict(figures), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
