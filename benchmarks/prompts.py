"""Texts of an exact length in tokens, for prompts whose length is the point."""

from __future__ import annotations

from kvcommons.model.tokenizer import Tokenizer

_TEXT = """
the river carried small boats past quiet fields while children waved from a wooden bridge and an old man
counted clouds until evening came with lamps along the road and music from a house near the mill
"""
_WORDS = tuple(_TEXT.split())


class PromptWriter:
    """Writes user messages by number: other numbers give other words, so that nothing is shared by chance."""

    def __init__(self, tokenizer: Tokenizer, template_tokens: int) -> None:
        """`template_tokens`: what the chat template adds around one user message."""
        self._tokenizer = tokenizer
        self._template_tokens = template_tokens

    def __call__(self, serial: int, tokens: int) -> str:
        """A message that makes a prompt grow by `tokens`, as near as whole words allow."""
        wanted = max(1, tokens - self._template_tokens)
        words, count = [f"{serial}:"], 0
        while count < wanted:
            missing = wanted - count
            start = serial * 7 + len(words) * 13
            words += [
                _WORDS[(start + i * (serial % 5 + 1)) % len(_WORDS)] for i in range(max(1, missing // 4))
            ]
            count = len(self._tokenizer.encode_text(" ".join(words)))
        while len(words) > 1 and len(self._tokenizer.encode_text(" ".join(words))) > wanted:
            words.pop()
        return " ".join(words)
