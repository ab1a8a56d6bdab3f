"""A stand-in for a larger model with a smaller one's tokens, where none is at hand: the smaller one with more
layers, each of which adds little."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kvcommons.errors import InvalidInput

# Of what a layer adds, what all of its copies add. So little that the text stays one, so much that both
# models differ in some tokens.
_ADDED = 0.2
_ADDING = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def write_deepened_model(folder: Path, model: Path, times: int) -> Path:
    """A new folder in `folder`: each layer of `model` is followed by so many copies, less one, that add a
    fifth of it together. Raises InvalidInput for less than two times, and for a folder whose weights are not
    one file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if times < 2:
        raise InvalidInput(f"{times} times its layers are no more: ask for 2 or more", param="deepen")
    weights = model / "model.safetensors"
    if not weights.is_file():
        raise InvalidInput(f"{model} has no model.safetensors: name a model of one file", param="model")
    made = folder / f"{model.name}-{times}-times"
    made.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json" or file.suffix == ".jinja":
            shutil.copy(file, made)
    tensors = {}
    with safe_open(weights, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - it is no mapping
            tensor = source.get_tensor(name)
            prefix, found, rest = name.partition("layers.")
            if not found:
                tensors[name] = tensor
                continue
            number, _, part = rest.partition(".")
            for copy in range(times):
                share = _ADDED / (times - 1) if copy and part in _ADDING else 1.0
                tensors[f"{prefix}layers.{int(number) * times + copy}.{part}"] = tensor * share
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] *= times
    if kinds := config.get("layer_types"):
        config["layer_types"] = [kind for kind in kinds for _ in range(times)]
    (made / "config.json").write_text(json.dumps(config))
    return made
