"""A lesser processor, shown on a better one: no server uses wider instructions than it has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """The widest instructions, as each of those who compute names them: this server's kernels, torch's,
    oneDNN's (which vLLM's products are, too) and, when its sources are compiled, llama.cpp's."""

    kernels: str
    torch: str
    onednn: str
    ggml: tuple[str, ...]


_AVX2 = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "SSE42")
INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "avx2": InstructionSet(kernels="avx2", torch="avx2", onednn="AVX2", ggml=_AVX2),
    # An Intel Xeon of 2019 has these (Cascade Lake): bytes are multiplied, and no bfloat16.
    "avx512": InstructionSet(
        kernels="avx512", torch="avx512", onednn="AVX512_CORE_VNNI", ggml=(*_AVX2, "AVX512", "AVX512_VNNI")
    ),
}


def narrow(name: str | None) -> None:
    """This process, which has computed nothing yet, and all that it starts use no wider ones from here on.
    None: all that this processor has."""
    if name is None:
        return
    widest = INSTRUCTION_SETS[name]
    os.environ["KVCOMMONS_KERNEL"] = widest.kernels
    os.environ["ATEN_CPU_CAPABILITY"] = widest.torch
    os.environ["ONEDNN_MAX_CPU_ISA"] = widest.onednn


def ggml_options(name: str | None) -> list[str]:
    """What cmake is told for such a processor."""
    if name is None:
        return ["-DGGML_NATIVE=ON"]
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{feature}=ON" for feature in INSTRUCTION_SETS[name].ggml)]


def named(name: str | None) -> str:
    """In a report's title, behind what was measured."""
    return "" if name is None else f", no instructions wider than {name}"
