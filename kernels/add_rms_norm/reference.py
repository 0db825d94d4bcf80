"""PyTorch twin, operation for operation what LlamaRMSNorm does."""

import torch
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See api.py."""
    total = x if residual is None else residual + x
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), total
