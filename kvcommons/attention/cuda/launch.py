"""Where a kernel is launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def beside(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the thread's current GPU, which need not be the one that the tensor is on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
