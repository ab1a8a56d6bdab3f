"""The tokenizer of the demo model: byte-level BPE and a ChatML template. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.conversations import Message, training_conversation

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [TEXT_END, START, END]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The roles are system, user and assistant.') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(size: int, conversations: int, seed: int) -> Tokenizer:
    """A byte-level BPE of ``size`` tokens, from the text of seeded conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for index in range(conversations):
            rng = Random(f"tokenizer {seed} {index}")
            for message in training_conversation(rng, lambda text: len(text) // 3, 400):
                yield f"{message.role}\n"
                yield message.content

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": TEXT_END, "eos_token": END, "pad_token": TEXT_END}
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [START],
        **names,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special = {**names, "additional_special_tokens": [START]}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class ChatTokens:
    """Turns messages into ids exactly as the chat template and the tokenizer together do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end, self.text_end = (
            int(tokenizer.token_to_id(token) or 0) for token in (START, END, TEXT_END)
        )
        self.newline = self.encode("\n")
        self._remembered = lru_cache(maxsize=100_000)(self._encode)

    @classmethod
    def load(cls, folder: Path) -> ChatTokens:
        """The tokenizer of a model folder."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text).ids)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return list(self._encode(text))

    def count(self, text: str) -> int:
        """How many tokens ``text`` has."""
        return len(self._remembered(text))

    def header(self, role: str) -> list[int]:
        """Ids before the content of a message."""
        return [self.start, *self._remembered(f"{role}\n")]

    def message(self, message: Message) -> tuple[list[int], list[int], list[int]]:
        """Ids of one message in three parts: header, content with its end token, the newline after it."""
        return self.header(message.role), [*self._remembered(message.content), self.end], self.newline

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of ``messages`` up to where the assistant's next answer begins."""
        ids = [token for message in messages for part in self.message(message) for token in part]
        return ids + self.header("assistant")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
