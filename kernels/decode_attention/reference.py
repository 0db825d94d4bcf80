"""PyTorch twin: fp32 softmax over masked slots."""

import torch
from torch import Tensor


def decode_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See api.py. fp64 inputs stay fp64, so that tests can use this as their oracle."""
    batch, num_kv_heads, num_slots, head_dim = k.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    empty = torch.arange(num_slots, device=k.device) >= lengths[:, None]  # [B, C]
    grouped = q.view(batch, num_kv_heads, -1, head_dim).to(compute)  # [B, Hkv, G, D]
    logits = (grouped @ k.to(compute).transpose(2, 3)) * scale
    logits = logits.masked_fill(empty[:, None, None], float("-inf"))  # [B, Hkv, G, C]
    lse = torch.logsumexp(logits, dim=-1)
    # a NaN in an unused slot would survive a weight of zero
    values = v.to(compute).masked_fill(empty[:, None, :, None], 0)
    out = torch.exp(logits - lse[..., None]) @ values
    return out.view(q.shape).to(q.dtype), lse.view(batch, -1)
