"""PyTorch twin: transformers' own sequence of operations."""

import torch
from torch import Tensor


def rope_append(qkv, cos, sin, k_slots, v_slots, slot, num_q_heads: int, q_norm, k_norm, eps: float) -> Tensor:
    """See api.py."""
    batch, num_kv_heads, _, head_dim = k_slots.shape
    q, k, v = qkv.view(batch, -1, head_dim).split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = (_rotated(_normed(x, weight, eps), cos, sin) for x, weight in ((q, q_norm), (k, k_norm)))
    rows = torch.arange(batch, device=qkv.device)
    k_slots[rows, :, slot] = k
    v_slots[rows, :, slot] = v
    return q


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]
