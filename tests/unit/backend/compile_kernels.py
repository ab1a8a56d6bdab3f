"""Compiles the kernels for GPUs, as they are launched, for a GPU that need not be there, and says as JSON
what each takes: `python -m tests.unit.backend.compile_kernels 90`, for compute capability 9.0."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvcommons.attention.cuda.append import append
from kvcommons.backend.cuda_attention import CudaAttention
from kvcommons.backend.cuda_operators import CudaOperators
from kvcommons.backend.host_device import HostDevice
from kvcommons.backend.interface import Partial


class Absent:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compiled(capability: int) -> Iterator[tuple[str, Any]]:
    """Names of kernels, and what became of them, for models of several shapes."""
    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((self.fn.__name__, run(self, *arguments, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    driver.set_active(Absent(capability))
    attention, operators = CudaAttention(HostDevice()), CudaOperators()
    for dtype, shapes in (
        (torch.bfloat16, ((32, 8, 128), (9, 3, 64), (8, 4, 256))),
        (torch.float32, ((32, 8, 128), (9, 3, 64))),
    ):
        for heads, kv_heads, dim in shapes:
            found.clear()
            kv = torch.zeros(4, 2, kv_heads, 64, dim, dtype=dtype)
            lengths, zeros = torch.tensor([200, 90]), torch.zeros(2, dtype=torch.int64)
            for window in (None, 100):
                batch = attention.plan_batch(
                    kv, torch.zeros(2, 4, dtype=torch.int64), lengths, first_key_positions=zeros,
                    query_positions=lengths - 1, window=window,
                )  # fmt: skip
                batch.attend(torch.zeros(2, heads, dim, dtype=dtype), kv, 0.1)
                chunk = attention.plan_chunk(
                    kv, heads, torch.zeros(4, dtype=torch.int64), 200, first_key_position=0,
                    query_positions=range(200), window=window,
                )  # fmt: skip
                chunk.attend(torch.zeros(200, heads, dim, dtype=dtype), kv, 0.1)
            part = Partial.empty(torch.zeros(2, heads, dim))
            attention.merge([part, part])
            hidden = heads * dim
            x, weight = torch.zeros(8, hidden, dtype=dtype), torch.ones(hidden)
            operators.add_and_norm(x, x, weight, 1e-5)
            operators.norm(x.view(8, heads, dim), torch.ones(dim), 1e-5)
            operators.rotate(x.view(8, heads, dim), torch.ones(8, 1, dim // 2), torch.ones(8, 1, dim // 2))
            operators.gate(x)
            new = torch.zeros(8, kv_heads, dim, dtype=dtype)
            append(kv, torch.zeros(8 * 2 * kv_heads, dtype=torch.int64), new, new)
            operators.pack(torch.zeros(48, hidden, dtype=dtype), torch.zeros(48, dtype=dtype))(x)
            operators.pack(torch.zeros(48, hidden, dtype=dtype))(x[:1])
            for name, kernel in found:
                yield f"{name} {str(dtype)[6:]} {dim}", kernel


def spilled_bytes(kernel: Any) -> int:
    """Of a thread's registers, which did not suffice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return max(int(size) for size in re.findall(r"LOCAL:(\d+)", said))


def main(capability: int) -> None:
    reported = [
        {"kernel": name, "shared_bytes": kernel.metadata.shared, "spilled_bytes": spilled_bytes(kernel)}
        for name, kernel in compiled(capability)
    ]
    print(json.dumps(reported))


if __name__ == "__main__":
    main(int(sys.argv[1]))
