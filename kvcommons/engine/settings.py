"""An engine's settings, apart from it: reading them takes no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that prefill and decode share."""

    model: str  # folder or Hugging Face hub id
    model_name: str | None = None  # as clients call it; default: the folder's name, or the hub id
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of weights, activations and KV
    device: str = "cpu"  # as torch names it: "cpu", "cuda", "cuda:1"
    threads: Annotated[int, Ge(1)] = 1  # of the model's operators; more than cores over processes is slower
    # Who multiplies with weights on the CPU; "auto": who is quickest here, which is measured once and kept.
    products: Literal["auto", "native", "onednn"] = "auto"
    block_tokens: Annotated[int, Ge(1)] = 64  # of a block of KV, the unit that is stored, shared and lent
    capacity_tokens: Annotated[int, Gt(0)] = 65536  # room for KV
    # Whether all memory for KV is taken from the system at the start; else it is as it is used.
    touch_memory: bool = False
    calibrate_s: Annotated[float, Ge(0)] = 2.0  # at the start, to measure what iterations take, about so long
    predictor_file: str = ""  # where what was learnt of that is kept from start to start; "": nowhere
