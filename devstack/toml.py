"""Writes settings as TOML; the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dumps(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of strings, numbers, truth values and lists of them. A JSON string is a TOML basic string."""
    words = {
        "NaN": "nan",
        "Infinity": "inf",
        "-Infinity": "-inf",
    }  # numbers too: whoever reads them may refuse
    parts = []
    for name, table in tables.items():
        parts.append(f"[{name}]")
        for key, value in table.items():
            text = json.dumps(value, ensure_ascii=False)
            parts.append(f"{key} = {words.get(text, text)}")
        parts.append("")
    return "\n".join(parts)
