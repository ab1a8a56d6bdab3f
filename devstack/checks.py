"""What is wrong with a stack's settings, found before any of its processes starts.

Each service checks its own settings when it starts; by then a person has waited, and the reason stands among
the lines of six processes. The same schemas are read here with the file, the environment and the flags that
the services will have.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from devstack.fetch import MODELS
from devstack.plan import ENGINES, ProcessPlan
from devstack.settings import DEMO_MODEL, UpSettings
from kvcommons.config import PREFIX, TABLES, flags_of, load
from kvcommons.errors import InvalidInput, ModelNotFound

# Service: module and class of its settings.
SCHEMAS = {
    "prefill": ("services.prefill.config", "PrefillConfig"),
    "decode": ("services.decode.config", "DecodeConfig"),
    "attention_pool": ("services.attention_pool.config", "AttentionPoolConfig"),
    "router": ("services.router.config", "RouterConfig"),
    "kvstore": ("services.kvstore.config", "KVStoreConfig"),
    "ledger": ("services.ledger.config", "LedgerConfig"),
}
# Of `up`, by the service and its setting that they set.
_OPTIONS = {
    ("prefill", "stages"): "--stages",
    ("prefill", "tensor"): "--tensor",
    ("decode", "stages"): "--decode-stages",
    ("decode", "tensor"): "--decode-tensor",
}
# Variables without a table: of the command line, of compose.yaml, of the kernel's build and of tests.
VARIABLES = (
    "API_KEY",
    "BIND",
    "BUILD_NETWORK",
    "CA",
    "CONFIG",
    "KERNEL",
    "MEMORY",
    "MODEL",
    "PORT",
    "THREADS",
    "URL",
)


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises InvalidInput for a variable that is nearly one that is read, and so is not read.

    Those of a service's table are checked with its settings.
    """
    known = [PREFIX + name for name in VARIABLES]
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known or "__" in variable:
            continue
        for table in TABLES:
            if variable.startswith(f"{PREFIX}{table.upper()}_"):
                return  # `load` says how that is written
        if near := difflib.get_close_matches(variable, known, n=1, cutoff=0.85):
            raise InvalidInput(f"unknown variable {variable}: did you mean {near[0]}?", param=variable)


def check_services(plans: Iterable[ProcessPlan]) -> dict[str, Any]:
    """The settings of one process of each service in `SCHEMAS`. Raises InvalidInput as the service would."""
    found: dict[str, Any] = {}
    for plan in plans:
        if plan.service in SCHEMAS:
            module, name = SCHEMAS[plan.service]
            schema = getattr(importlib.import_module(module), name)
            words = list(zip(plan.command, plan.command[1:], strict=False))
            (file,) = (Path(value) for word, value in words if word == "--config")
            flags = flags_of(value for word, value in words if word == "--set")
            settings = load(plan.service, schema, file=file, environ=plan.environment, flags=flags)
            found.setdefault(plan.service, settings)
    return found


def check_access(settings: UpSettings, user: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raises InvalidInput where whoever reaches this machine could use the stack without a key."""
    from services.router.config import is_loopback

    router = user.get("router", {})
    keyed = settings.api_keys or router.get("api_keys") or environ.get(f"{PREFIX}ROUTER__API_KEYS")
    if not keyed and not is_loopback(settings.bind):
        raise InvalidInput(
            f"--host {settings.bind} lets everyone who reaches this machine use the stack, and it has no "
            'API keys: give it --api-key-file FILE, a file with a line "TENANT KEY" for each, or leave '
            "--host out",
            param="bind",
        )


def check_model(model: str, say: Callable[[str], None]) -> Path:
    """Its folder. Reads what a service would read of the model first; a hub id is fetched once, before
    processes that start together would each do so.

    Raises InvalidInput for a folder that no service can load, and ModelNotFound where there is none.
    """
    from kvcommons.model.folder import resolve_folder, weight_files
    from kvcommons.model.spec import ModelSpec

    if model == DEMO_MODEL or model in MODELS:
        return Path(UpSettings(model=model).model_folder)
    path = Path(model).expanduser()
    if not path.is_dir():
        if path.is_file() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
            raise ModelNotFound(_no_folder(model, path), param="model")
        say(f"{model} is no folder here: asking the hub for it")
        try:
            path = resolve_folder(model)
        except ModelNotFound as error:
            raise ModelNotFound(f"{error.message}{_nearest(model)}", param="model") from error
    ModelSpec.read(path)
    weight_files(path)
    if not (path / "tokenizer.json").is_file():
        raise InvalidInput(
            f"{path} has no tokenizer.json; convert its tokenizer to the `tokenizers` format", param="model"
        )
    return path


def check_shapes(checked: Mapping[str, Any], settings: UpSettings, folder: Path) -> None:
    """Raises InvalidInput where the model has too few layers for the stages, or heads for the ranks, of a
    service. `checked`: settings by service, as of `check_services`; `folder`: of the model in `settings`."""
    from kvcommons.model.layer_ranges import check_stages, ranges_of
    from kvcommons.model.spec import ModelSpec
    from kvcommons.model.tensor_rank import TensorRank

    for service in ENGINES:
        if service not in checked:
            continue
        shape, model = checked[service].shape, checked[service].engine.model
        own = folder if model == settings.model_folder else Path(model)
        if not own.is_dir():  # a hub id of the service's own, which it fetches
            continue
        spec = ModelSpec.read(own)
        try:
            check_stages(spec.layers, shape.stages)
            if shape.stage_layers:
                ranges_of(shape.stage_layers, spec.layers)
            TensorRank(ranks=shape.tensor).check(spec)
        except InvalidInput as error:
            option = _OPTIONS.get((service, error.param or ""))
            named = f"{option}, or [{service}]" if option else f"[{service}]"
            raise InvalidInput(f"{named}: {error.message}", param=error.param) from error


def unused_pools(checked: Mapping[str, Any], settings: UpSettings) -> str:
    """What a person should know where the attention pools are of no use to decode's ranks; empty where they
    are, or there are none."""
    pools, ranks = settings.attention_pool, checked["decode"].shape.tensor
    if not pools or ranks == 1 or checked["decode"].placement == "local":
        return ""
    if settings.heads and pools % ranks == 0:
        return ""
    return (
        f"Attention pools ({pools}) lend nothing to the {ranks} ranks of decode: set heads = true and "
        f"attention_pool to a multiple of {ranks} in [up], or attention_pool to 0"
    )


def _no_folder(model: str, path: Path) -> str:
    if path.is_file():
        return f"--model {model} is a file: name the folder that it lies in, with its config.json beside it"
    return f"there is no model folder {model}: name one that is there, or a hub id such as Qwen/Qwen3-0.6B"


def _nearest(model: str) -> str:
    near = difflib.get_close_matches(model, [DEMO_MODEL, *MODELS], n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
