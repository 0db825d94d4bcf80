"""Dense causal attention of a whole prompt. The library's own kernels do it (flash or cuDNN on a GPU, flash on a CPU)."""

import torch
from torch import Tensor


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention, q and k of the same length.

    Args:
        q: [B, Hq, T, D]; k, v: [B, Hkv, T, D], Hq a multiple of Hkv.
    Returns:
        [B, Hq, T, D] in q's dtype.
    """
    if q.shape[2] != k.shape[2] or k.shape != v.shape or q.shape[1] % k.shape[1]:
        raise ValueError(f"prefill_attention wants whole prompts, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
