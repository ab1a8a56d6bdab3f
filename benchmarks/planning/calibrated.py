"""A device whose rates an engine has learnt: what iterations take on a machine of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.offload_plan import model_of_spec
from benchmarks.rooflines import Device, Efficiency, Model, Work
from kvcommons.engine.iteration_costs import IterationCosts, IterationWork
from kvcommons.engine.kept import Kept
from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedDevice(Device):
    """Times are `costs`, which were learnt with `model` as a whole; what another model has more of takes as
    much more: rows by its parameters, attention by its heads and layers, KV by its bytes. `flops` and
    `read_bytes_s` are what was reached, so no share of them is taken."""

    model: Model
    costs: IterationCosts
    mean_error: float

    @property
    def peak_flops(self) -> float:
        pairs = self.costs.of_one("pairs")
        attended = 4 * self.model.hidden * self.model.layers / pairs if pairs else 0.0
        return max(self.flops, attended)

    @property
    def error(self) -> float:
        return self.mean_error

    def linear_s(self, model: Model, rows: float, reached: Efficiency) -> float:
        return self.costs.seconds(IterationWork(rows=rows)) * model.parameters / self.model.parameters

    def attention_s(self, model: Model, work: Work, reached: Efficiency) -> float:
        wider = model.hidden * model.layers / (self.model.hidden * self.model.layers)
        pairs_s = work.chunk_pairs * wider * self.costs.of_one("pairs")
        return pairs_s + work.row_tokens * model.kv_token_bytes / self.read_bytes_s


def calibrated_device(file: Path, fields: Mapping[str, Any]) -> CalibratedDevice:
    """Of an engine's `predictor_file`, with what it does not say: a name, a price, memory, and the rate of
    its link. Raises InvalidInput; TypeError for a field that a device does not have."""
    try:
        learnt = Kept.learnt_in(file)
        costs, error, of = IterationCosts.of(learnt["costs"]), float(learnt["error"]), learnt["of"]
        spec, computed = ModelSpec.of(json.loads(of["config"])), int(of["layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InvalidInput(
            f"{file} does not say what iterations take ({problem!r}): name the predictor_file of a prefill "
            "or decode that has been stopped once",
            param="device",
        ) from problem
    if computed != spec.layers:
        raise InvalidInput(
            f"{file} is of {computed} of {spec.layers} layers, a stage's: name that of an engine with all",
            param="device",
        )
    if not costs.chunks or not costs.of_one("more_rows"):
        raise InvalidInput(
            f"{file} knows no chunks of prompts: start its engine with calibrate_s above 0, or let it "
            "compute some",
            param="device",
        )
    model, reading = model_of_spec("calibrated", spec), costs.of_one("read_bytes")
    # Where nothing generated, as fast as weights were read: by an iteration of one row.
    weights_s = costs.seconds(IterationWork(rows=1))
    return CalibratedDevice(
        **fields,
        read_bytes_s=1 / reading if reading else model.weight_bytes / weights_s,
        flops=2 * model.parameters / costs.of_one("more_rows"),
        model=model,
        costs=costs,
        mean_error=error,
    )
