"""A tokenizer that needs no training, for models with random weights (benchmarks, tests; no torch).

Byte-level BPE: three control tokens, 256 bytes, then pairs and fours of lower-case letters until the
vocabulary is full, so that English text takes about one token for two to three characters. ChatML is its
chat template.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvcommons.errors import InvalidInput

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = CONTROL_TOKENS.index("<|im_end|>")
VOCAB_SIZE_MIN = len(CONTROL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPACE = "Ġ"  # how byte-level BPE writes a space


def make_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Exactly `vocab_size` tokens, the control tokens first. Raises InvalidInput below 259."""
    if vocab_size < VOCAB_SIZE_MIN:
        raise InvalidInput(f"a byte-level vocabulary has at least {VOCAB_SIZE_MIN} tokens, not {vocab_size}")
    vocab = {text: token for token, text in enumerate(CONTROL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    steps = itertools.chain(
        ((pair[0], pair[1]) for pair in pairs),
        ((_SPACE, pair) for pair in pairs),
        itertools.product(pairs, pairs),
    )
    merges: list[tuple[str, str]] = []
    for left, right in itertools.islice(steps, vocab_size - len(vocab)):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in CONTROL_TOKENS])
    return tokenizer


def write_tokenizer(
    folder: Path,
    tokenizer: tokenizers.Tokenizer,
    chat_template: str = CHAT_TEMPLATE,
    *,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
