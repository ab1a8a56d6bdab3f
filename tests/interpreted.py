"""The kernels for GPUs on a machine without one: Triton's interpreter computes them on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcommons.backend.host_device import HostDevice
from kvcommons.backend.interface import Backend, Opened

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the kernels for GPUs need Triton: pip install -e '.[cuda]'",
)


def interpreted() -> Backend:
    """With slices that are replayed. Not where there is a GPU: a process interprets kernels
    (tests/conftest.py) or compiles them."""
    _one_at_a_time()
    from kvcommons.backend.cuda_attention import CudaAttention
    from kvcommons.backend.cuda_operators import CudaOperators

    device = HostDevice()
    return Backend(device=device, operators=CudaOperators(Replayed), attention=CudaAttention(device))


@functools.cache
def _one_at_a_time() -> None:
    """The interpreter keeps in one place which program it computes: threads take turns."""
    from triton.runtime.interpreter import GridExecutor

    lock, execute = threading.Lock(), GridExecutor.__call__

    def alone(self: Any, *arguments: Any, **options: Any) -> Any:
        with lock:
            return execute(self, *arguments, **options)

    GridExecutor.__call__ = alone


class Replayed:
    """A slice_graphs.Graph that keeps its function, and computes from the same memory into the same."""

    def __init__(self, compute: Callable[[], Opened]) -> None:
        self._compute = compute
        self.opened = compute()
        for tensor in self._results(self.opened):
            tensor.fill_(torch.nan)  # there is nothing yet

    def replay(self) -> None:
        for kept, new in zip(self._results(self.opened), self._results(self._compute()), strict=True):
            kept.copy_(new)

    @staticmethod
    def _results(opened: Opened) -> list[torch.Tensor]:
        return [opened.hidden, opened.qk, opened.v, opened.rotated]
