"""What this machine can do at most, measured where a benchmark wants it: products, and reading."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvcommons.engine.core import Core

PRODUCT_SIZE = 2048  # rows and columns of the product whose rate is taken for the peak
_TIMES = 3


def product_flop_s(size: int) -> float:
    """Of a product of two square matrices on torch's threads, in the quicker one of two precisions."""
    import torch

    return max(product_rate(size, dtype) for dtype in (torch.bfloat16, torch.float32))


def product_rate(size: int, dtype: torch.dtype) -> float:
    """Operations a second of such a product, by the quickest that this environment has for a model's. torch's
    own of bfloat16 is not among them: where the processor has no instructions for it, it takes minutes."""
    import torch

    from kvcommons.backend.choice import choose
    from kvcommons.backend.products import Products

    matrix = torch.ones((size, size), dtype=dtype)
    products: list[Callable[[torch.Tensor], object]] = [
        choose(products=who).operators.pack(matrix.clone()) for who in Products
    ]
    if dtype == torch.float32:
        products.append(partial(torch.mm, matrix))
    rates = []
    for product in products:
        for _ in range(_TIMES):
            began_s = time.perf_counter()
            product(matrix)
            rates.append(2 * size**3 / (time.perf_counter() - began_s))
    return max(rates)


def read_bytes_s(size: int = 1 << 30) -> float:
    """At which memory far larger than the caches is read, on huge pages as weights and KV are, on torch's
    threads."""
    import torch

    from kvcommons.backend.host_device import HostDevice

    memory = HostDevice().allocate((size // 8,), torch.int64).fill_(1)
    rates = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        read(memory)
        rates.append(size / (time.perf_counter() - began_s))
    return max(rates)


def host_rates() -> tuple[float, float]:
    """Of the processors, bytes and operations a second: of reading, and of a large product."""
    return read_bytes_s(), product_flop_s(PRODUCT_SIZE)


def device_rates(device: str) -> tuple[float, float]:
    """Of a GPU, bytes and operations a second: of reading memory far larger than its caches, and of a large
    product in bfloat16, of random numbers. Raises InvalidInput for a device that cannot be used."""
    import torch

    from kvcommons.backend.choice import choose

    gpu = choose(device).device
    memory = gpu.allocate((1 << 29,), torch.float32).normal_()
    matrix = gpu.allocate((8192, 8192), torch.bfloat16).normal_()

    def least_s(work: Callable[[], object]) -> float:
        taken_s = []
        for _ in range(_TIMES + 1):
            gpu.record().wait()
            began_s = time.perf_counter()
            work()
            gpu.record().wait()
            taken_s.append(time.perf_counter() - began_s)
        return min(taken_s)

    read_s, product_s = least_s(memory.sum), least_s(lambda: matrix @ matrix)
    return memory.nbytes / read_s, 2 * len(matrix) ** 3 / product_s


def read_memory(core: Core) -> None:
    """All of its block memory, on all threads."""
    read(core.memory.tensor)


def read(memory: torch.Tensor) -> None:
    """By the kernel where there is one."""
    import torch

    from kvcommons.backend.choice import choose
    from kvcommons.backend.native_attention import NativeAttention

    attention = choose().attention
    if isinstance(attention, NativeAttention) and attention.kernel is not None:
        attention.kernel.read(memory)
    else:
        memory.view(torch.int64).sum()
