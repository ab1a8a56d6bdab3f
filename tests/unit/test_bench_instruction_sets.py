"""A lesser processor on a better one: what is computed with instructions that were narrowed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.peers import instruction_sets
from kvcommons.attention.native import library

COMPUTED = """
from benchmarks.peers import instruction_sets
instruction_sets.narrow({name!r})
import torch
from kvcommons.attention.native import library
torch.ones(4) + 1
kernel = library.chosen()
print(torch.backends.cpu.get_cpu_capability(), kernel.variant if kernel else "")
image, filters = torch.ones((1, 16, 64, 64)), torch.ones((16, 16, 3, 3))
torch.nn.functional.conv2d(image, filters)  # which is oneDNN's
"""


@pytest.mark.parametrize("name", instruction_sets.INSTRUCTION_SETS)
def test_nothing_is_computed_with_wider_ones(name: str) -> None:
    kernel = library.chosen()
    widest = instruction_sets.INSTRUCTION_SETS[name]
    if kernel is None or widest.kernels not in kernel.variants():
        pytest.skip(f"this processor has no {name}, or no kernel is compiled")
    done = subprocess.run(
        [sys.executable, "-c", COMPUTED.format(name=name)],
        env={**os.environ, "ONEDNN_VERBOSE": "all"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"{widest.torch.upper()} {widest.kernels}\n" in done.stdout
    said = [line for line in done.stdout.splitlines() if "cpu,isa:" in line]
    assert said, "oneDNN says what it takes"
    assert not any("bfloat16" in line.lower() for line in said)


def test_all_of_this_processor_is_taken_unless_it_is_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    instruction_sets.narrow(None)
    assert library.VARIABLE not in os.environ
    assert instruction_sets.ggml_options(None) == ["-DGGML_NATIVE=ON"]


def test_llama_cpp_is_compiled_for_no_wider_ones() -> None:
    for name in instruction_sets.INSTRUCTION_SETS:
        options = instruction_sets.ggml_options(name)
        assert options[0] == "-DGGML_NATIVE=OFF"
        assert not any("BF16" in option or "AMX" in option for option in options)
    assert "-DGGML_AVX512=ON" in instruction_sets.ggml_options("avx512")
    assert "-DGGML_AVX512=ON" not in instruction_sets.ggml_options("avx2")
