"""Text to token ids and back, from a folder's tokenizer.json (the `tokenizers` library, no torch).

A control token is one that the tokenizer marks as special, or that ends an answer. What people write never
becomes one: `<|im_end|>` typed into a message is encoded as the characters it is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvcommons.errors import InvalidInput
from kvcommons.model.folder import read_json

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# `encode` of the library keeps Python's lock while it runs, a second for a million characters; a batch gives
# it back.
_HELD_CHARS_MAX = 8192
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A folder's tokenizer. Thread-safe: nothing changes after reading."""

    def __init__(
        self, source: tokenizers.Tokenizer, *, eos_ids: frozenset[int], named: Mapping[str, str]
    ) -> None:
        """`named`: the special tokens that templates know by name (bos_token, …)."""
        self._markup = source
        self.eos_ids = eos_ids
        self.named_tokens = dict(named)
        self._added = source.get_added_tokens_decoder()
        self._control = {token: entry for token, entry in self._added.items() if entry.special}
        self._control_of_text = {entry.content: token for token, entry in self._control.items()}
        texts = sorted(self._control_of_text, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._control_ids = eos_ids | self._control.keys()
        state = json.loads(source.decoder.__getstate__()) if source.decoder else {}
        kinds = {part.get("type") for part in state.get("decoders", [state])}
        self._byte_level = "ByteLevel" in kinds

    @classmethod
    def read(cls, folder: Path) -> Tokenizer:
        """Raises InvalidInput when the folder has no tokenizer.json or a broken one."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidInput(
                f"{folder} has no tokenizer.json; convert its tokenizer to the `tokenizers` format",
                param="model",
            )
        try:
            source = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise InvalidInput(f"{path} cannot be read: {error}", param="model") from error
        source.no_truncation()
        source.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        named = _named_tokens(config, read_json(folder / "special_tokens_map.json"))
        _add_declared_tokens(source, config.get("added_tokens_decoder") or {}, path)
        eos_ids = set(_eos_ids(folder))
        if (eos := source.token_to_id(named.get("eos_token", ""))) is not None:
            eos_ids.add(eos)
        # An answer's end is a control token, whatever the tokenizer says.
        special = {token for token, entry in source.get_added_tokens_decoder().items() if entry.special}
        ends = [source.id_to_token(token) for token in sorted(eos_ids - special)]
        source.add_special_tokens(
            [tokenizers.AddedToken(end, special=True, normalized=False) for end in ends if end]
        )
        return cls(source, eos_ids=frozenset(eos_ids), named=named)

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Whether each token is the same one in both."""
        return bool(self._markup.get_vocab() == other._markup.get_vocab())

    @property
    def vocab_size(self) -> int:
        """Added tokens included."""
        return int(self._markup.get_vocab_size(with_added_tokens=True))

    def encode_text(self, text: str) -> list[int]:
        """Ids of what a user wrote: control tokens in it stay text; no BOS is added."""
        source = self._plain if self.control_pattern.search(text) else self._markup
        ids = _encode(source, text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The vocabulary itself, or a normaliser, makes a control token of it: take it apart.
        pieces = (token for character in text for token in _encode(self._plain, character))
        return [token for token in pieces if token not in self._control_ids]

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode_text`, with what the tokenizer puts around a prompt (BOS): for /v1/completions."""
        before, after = self._frame
        return [*before, *self.encode_text(text), *after]

    def encode_markup(self, text: str, shielded: Mapping[str, str] | None = None) -> list[int]:
        """Ids of a rendered template: control tokens in it are recognised.

        `shielded` maps placeholders in `text` to the control texts that users typed in their place.
        Without any the ids are those of the whole string, as `apply_chat_template` gives.
        """
        if not shielded:
            return _encode(self._markup, text)
        unshield = re.compile("|".join(map(re.escape, shielded)))
        ids: list[int] = []
        strip_left = False
        end = 0
        for match in [*self.control_pattern.finditer(text), None]:
            piece = text[end : match.start() if match else None]
            entry = self._control[self._control_of_text[match[0]]] if match else None
            piece = piece.lstrip() if strip_left else piece
            piece = piece.rstrip() if entry and entry.lstrip else piece
            if piece:
                ids += self.encode_text(unshield.sub(lambda found: shielded[found[0]], piece))
            if match and entry:
                ids.append(self._control_of_text[match[0]])
                end, strip_left = match.end(), entry.rstrip
        return ids

    def is_control(self, token: int) -> bool:
        return token in self._control_ids

    def control_id(self, text: str) -> int | None:
        """Of the special token with this text; None where there is none."""
        return self._control_of_text.get(text)

    def has_text(self, token: int) -> bool:
        """False for control tokens, and for ids that a model has beyond its tokenizer's vocabulary."""
        return token not in self._control_ids and self._markup.id_to_token(token) is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Text without control tokens."""
        return str(self._markup.decode([token for token in ids if token not in self._control_ids]))

    def token_text(self, token: int) -> str:
        """One token as logprobs show it (control tokens by their name)."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, which may be part of a character; empty for an id without a
        token.
        """
        piece = self._markup.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return str(piece).encode()
        if self._byte_level:
            return b"".join(_BYTE_OF_CHARACTER.get(char, char.encode()) for char in piece)
        if found := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace("▁", " ").encode()

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """Knows no control tokens. A copy, and made when first needed: it takes as much memory again."""
        plain = tokenizers.Tokenizer.from_str(self._markup.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        framed = self._markup.encode("a", add_special_tokens=True)
        body = [i for i, special in enumerate(framed.special_tokens_mask) if not special]
        return framed.ids[: body[0]], framed.ids[body[-1] + 1 :]


def _encode(source: tokenizers.Tokenizer, text: str) -> list[int]:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"the text is no Unicode: {error.reason} at {error.start}") from error
    if len(text) <= _HELD_CHARS_MAX:
        return list(source.encode(text, add_special_tokens=False).ids)
    return list(source.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for bytes: bytes that print stand for themselves, the rest for 256 and
    up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Mapping[str, bytes] = _byte_characters()


def _text_of(entry: Any) -> str | None:
    """Special tokens are written as strings or as objects with a content."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        text = _text_of(config.get(name)) or _text_of(special_map.get(name))
        if text:
            named[name] = text
    return named


def _eos_ids(folder: Path) -> list[int]:
    """eos_token_id, a number or a list of them, from generation_config.json and config.json."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        given = value if isinstance(value, list) else [value]
        ids += [token for token in given if isinstance(token, int) and token >= 0]  # -1 is nobody's
    return ids


def _add_declared_tokens(source: tokenizers.Tokenizer, declared: Mapping[str, Any], path: Path) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json leaves out."""
    known = source.get_added_tokens_decoder()
    for token, entry in sorted((int(token), entry) for token, entry in declared.items()):
        if token in known:
            continue
        flags = {
            flag: bool(entry.get(flag))
            for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        added = tokenizers.AddedToken(entry["content"], **flags)
        source.add_special_tokens([added]) if added.special else source.add_tokens([added])
        if source.token_to_id(entry["content"]) != token:
            raise InvalidInput(
                f"tokenizer_config.json gives {entry['content']!r} id {token}, which {path} does not have",
                param="model",
            )
