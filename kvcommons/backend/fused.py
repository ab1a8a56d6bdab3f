"""One dense attention call on the CPU by torch's fused operator, where nothing is compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcommons.backend.torch_attention import Mask


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> tuple[Tensor, Tensor]:
    """A Dense: the one fused operator of torch on the CPU that gives the log-sum-exp, 2 to 10 times as fast
    as matmuls. For a row that sees nothing it gives zeros, and a log-sum-exp of 0."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.to(k.dtype), k, v, 0.0, False, attn_mask=None if mask is None else mask.scores, scale=scale
    )
    if mask is not None and mask.blind is not None:
        lse = lse.masked_fill(mask.blind, -torch.inf)
    return out.float(), lse
