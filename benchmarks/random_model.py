"""Models with random weights, as benchmarks want them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from devstack.fetch import MODELS, cached, fetch


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


def chosen_model(
    options: argparse.Namespace, folder: Path, progress: Callable[[str], None]
) -> tuple[Path, str]:
    """The model's folder, and what it is called: `--random-model SIZE`, which is written into `folder`,
    `--model DIR`, or SmolLM2, which is fetched once."""
    if options.random_model:
        return write_random_model(folder, options.random_model, progress), options.random_model
    if options.model:
        return Path(options.model), Path(options.model).name
    return fetch("smollm2", cached("smollm2"), progress), MODELS["smollm2"].name
