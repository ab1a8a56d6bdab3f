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
_REASON_CHARS_MAX = 200
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_folder(name_or_dir: str) -> Path:
    """A folder as it is, or a Hugging Face hub id, downloaded to the hub's cache unless it is there."""
    folder = Path(name_or_dir).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(name_or_dir) or name_or_dir.startswith("."):
        raise ModelNotFound(f"there is no model folder {name_or_dir}", param="model")
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            huggingface_hub.snapshot_download(name_or_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
    except (HFValidationError, OSError) as error:  # an OSError is all else that the hub's client raises
        raise ModelNotFound(
            f"{name_or_dir} is no folder here, and {_why_not(error)}", param="model"
        ) from error


def _why_not(error: Exception) -> str:
    """Why the hub's client did not give a model, and what to do, in a line: its own text has many."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
    if isinstance(cause, GatedRepoError):
        return (
            f"the hub ({ENDPOINT}) gives it only to those who accepted its terms: accept them on the model's "
            "page there, and set HF_TOKEN to a token of that account"
        )
    if isinstance(cause, RepositoryNotFoundError):
        return (
            f"the hub ({ENDPOINT}) has no such model, or a private one: name a folder, or the id as the hub "
            "writes it (Qwen/Qwen3-0.6B); for a private model set HF_TOKEN"
        )
    if isinstance(cause, OfflineModeIsEnabled):
        return (
            "the hub's cache on this machine does not have it, and HF_HUB_OFFLINE keeps from asking the hub: "
            "name a folder, or unset that"
        )
    first, *_ = str(cause or error).strip().splitlines() or [type(error).__name__]
    reason = first[:_REASON_CHARS_MAX]
    if isinstance(cause, HFValidationError):
        return f"it is no id of the hub's ({reason}): name a folder, or an id such as Qwen/Qwen3-0.6B"
    return f"the hub ({ENDPOINT}) did not give it ({reason}): name a folder, or try again with a network"


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
