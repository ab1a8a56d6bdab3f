"""Writes settings as TOML; the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcommons.config import ORIGIN
from kvcommons.errors import InvalidInput


def dumps(tables: Mapping[str, Mapping[str, Any]], origin: Path | None = None) -> str:
    """Tables of strings, numbers, truth values and lists of them. A JSON string is a TOML basic string.

    `origin` is the file that they were read from, where there is one. Raises InvalidInput for what no setting
    is: dates, times, and tables within tables.
    """
    words = {
        "NaN": "nan",
        "Infinity": "inf",
        "-Infinity": "-inf",
    }  # numbers too: whoever reads them may refuse
    parts = [f"{ORIGIN} = {json.dumps(str(origin), ensure_ascii=False)}", ""] if origin is not None else []
    for name, table in tables.items():
        parts.append(f"[{name}]")
        for key, value in table.items():
            try:
                text = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError):
                text = "{"
            if "{" in text and not isinstance(value, str):
                raise InvalidInput(
                    f"{key} in [{name}] of {origin}: dates, times and tables are not used", param=key
                )
            parts.append(f"{key} = {words.get(text, text)}")
        parts.append("")
    return "\n".join(parts)
