"""Dense attention calls on the CPU against plain matmuls."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcommons.backend.fused import fused
from kvcommons.backend.torch_attention import Mask, dense

SCALE = 0.3


def tensors(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_fused_and_dense_calls_agree() -> None:
    q, k, v = (tensors(i, torch.float32, 2, 3, n, 16) for i, n in enumerate([5, 600, 600]))
    hidden = torch.zeros(2, 1, 5, 600, dtype=torch.bool)
    hidden[0, :, 1, :] = True
    hidden[1, :, 2, :599] = True
    mask = Mask.of(hidden, blind=True)
    out, lse = fused(q, k, v, mask, SCALE)
    want_out, want_lse = dense(q, k, v, mask, SCALE)
    torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    assert lse[0, :, 1].isneginf().all()
