"""A prompt of 16K tokens of the 7M model, and what transformers says of it. Eager scores of so many tokens do
not fit: its attention is PyTorch's own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcommons.model.synthetic import random_config, write_random_folder
from tests.exactness import evident

PROMPT = 16_000


@dataclass(frozen=True, slots=True)
class LongPrompt:
    folder: Path  # of the model
    tokens: list[int]
    answer: list[int]
    logprobs: list[float]


def long_prompt(folder: Path, answer_tokens: int) -> LongPrompt:
    """Writes the model, and follows the prompt greedily."""
    from transformers import AutoModelForCausalLM

    config = random_config("7m") | {"max_position_embeddings": 20_000}
    write_random_folder(folder, config, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    draw = random.Random(4)
    tokens = [draw.randrange(100, 8000) for _ in range(PROMPT)]
    step, past, answer, logprobs = tokens, None, list[int](), list[float]()
    with torch.inference_mode():
        while len(answer) < answer_tokens:
            out = model(torch.tensor([step]), past_key_values=past, use_cache=True, logits_to_keep=1)
            logits, past = out.logits[0, -1:], out.past_key_values
            assert evident(logits).all()
            step = [int(logits.argmax())]
            answer += step
            logprobs.append(float(logits.log_softmax(-1).max()))
    return LongPrompt(folder, tokens, answer, logprobs)
