"""Models with random weights, as benchmarks want them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write_random_model(
    folder: Path,
    size: str,
    progress: Callable[[str], None],
    *,
    dtype: str = "bfloat16",
    window_tokens: int | None = None,
) -> Path:
    """A new folder in `folder`. The window is the size's own unless one is given. Raises InvalidInput for an
    unknown size."""
    from kvcommons.model.synthetic import random_config, write_random_folder

    progress(f"writing a random model of {size} parameters")
    model, config = folder / f"random-{size}", random_config(size)
    if window_tokens is not None:
        config["max_position_embeddings"] = window_tokens
    write_random_folder(model, config, dtype=dtype)
    return model
