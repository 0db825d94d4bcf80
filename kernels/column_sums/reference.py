"""PyTorch twin: blocks of queries against all keys, so memory is block x T."""

import torch
from torch import Tensor

BLOCK = 128


def column_sums(q: Tensor, k: Tensor, scale: float, window: int, reduce: str) -> Tensor:
    """See api.py. fp64 inputs stay fp64."""
    batch, num_kv_heads, length = k.shape[:3]
    compute = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(compute)[:, :, None].transpose(3, 4)  # [B, Hkv, 1, D, T]
    grouped = q.unflatten(1, (num_kv_heads, -1))  # [B, Hkv, G, T, D]
    positions = torch.arange(length, device=q.device)
    sums = torch.zeros(batch, num_kv_heads, grouped.shape[2], length, dtype=compute, device=q.device)
    for start in range(length - window, length, BLOCK):
        rows = positions[start : start + BLOCK]
        logits = (grouped[:, :, :, start : start + BLOCK].to(compute) @ keys) * scale  # [B, Hkv, G, block, T]
        logits = logits.masked_fill(positions > rows[:, None], float("-inf"))
        sums += logits.softmax(-1).sum(3)
    match reduce:
        case "sum":
            return sums.sum(2)
        case "mean":
            return sums.mean(2)
        case _:
            return sums.amax(2)
