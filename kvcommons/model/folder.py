"""A model folder: where it is and how its JSON files are read (no torch)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvcommons.errors import InvalidInput, ModelNotFound

# What a download brings along: no pickle, no code, no second copy of the weights in another form.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_folder(name_or_dir: str) -> Path:
    """A folder as it is, or a Hugging Face hub id, downloaded to the hub's cache unless it is there."""
    folder = Path(name_or_dir).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(name_or_dir) or name_or_dir.startswith("."):
        raise ModelNotFound(f"there is no model folder {name_or_dir}", param="model")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(name_or_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{name_or_dir} is no folder, and the hub did not give it: {error}", param="model"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises InvalidInput for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path} holds no JSON object", param="model")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order of their names: one, or those that its index names.

    Raises InvalidInput where there are none; pickled weights are refused, for reading them runs code.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    names = set((read_json(index).get("weight_map") or {}).values())
    if not names:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise InvalidInput(
                f"{folder} has its weights as pickle ({pickles[0]}), which is refused because loading it "
                "can run any code; convert it to safetensors",
                param="model",
            )
        raise InvalidInput(f"{folder} has no model.safetensors and no index of several", param="model")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInput(
                f"{index} names {name!r}, which is no safetensors file beside it", param="model"
            )
        if not (folder / name).is_file():
            raise InvalidInput(
                f"{folder} lacks {name}, which its index names: download it again", param="model"
            )
    return [folder / name for name in sorted(names)]
