"""Writes settings as TOML; the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcommons.config import ORIGIN
from kvcommons.errors import InvalidInput

# Numbers too, though not in JSON: whoever reads them may refuse.
_WORDS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


def dumps(tables: Mapping[str, Mapping[str, Any]], origin: Path | None = None) -> str:
    """Tables of strings, numbers, truth values, and lists and tables of them. A JSON string is a TOML basic
    string.

    `origin` is the file that they were read from, where there is one. Raises InvalidInput for what no setting
    is: dates and times.
    """
    parts = [f"{ORIGIN} = {_text(str(origin))}", ""] if origin is not None else []
    for name, table in tables.items():
        parts.append(f"[{name}]")
        for key, value in table.items():
            try:
                parts.append(f"{key} = {_text(value)}")
            except TypeError as error:
                raise InvalidInput(
                    f"{key} in [{name}] of {origin}: dates and times are not used", param=key
                ) from error
        parts.append("")
    return "\n".join(parts)


def _text(value: Any) -> str:
    """Raises TypeError for dates and times."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)} = {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(one) for one in value) + "]"
    text = json.dumps(value, ensure_ascii=False)
    return _WORDS.get(text, text)
