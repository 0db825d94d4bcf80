"""PyTorch twin: each block of rows against its own keys, gathered, so that what no list names costs nothing here either."""

import torch
from torch import Tensor

from kernels.rows_attention.api import NO_KEY


def rows_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    index: Tensor,
    count: Tensor,
    block_size: int,
    scale: float,
) -> Tensor:
    """See api.py. fp64 inputs stay fp64."""
    batch, num_kv_heads, _, dim = k.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(compute).unflatten(2, (-1, block_size)) for x in (k, v))  # [B, Hkv, NK, block, D]
    rows = q.to(compute).unflatten(1, (num_kv_heads, -1)).unflatten(3, (-1, block_size))  # [B, Hkv, G, NQ, block, D]
    key_positions, own = k_positions.unflatten(0, (-1, block_size)), q_positions.unflatten(0, (-1, block_size))
    index, count = (x.expand(-1, num_kv_heads, *x.shape[2:]) for x in (index.long(), count))
    sequences = torch.arange(batch, device=q.device)[:, None, None]
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    most = count.amax((0, 1)).tolist()
    out = torch.zeros_like(rows)
    for i, longest in enumerate(most):
        places = torch.arange(longest, device=q.device)
        live = places < count[:, :, i, None]  # [B, Hkv, M]
        listed = index[:, :, i, :longest].masked_fill(~live, 0)
        there = key_positions[listed].masked_fill(~live[..., None], NO_KEY).flatten(2)  # [B, Hkv, N]
        seen = (there[:, :, None] <= own[i][:, None])[:, :, None]  # [B, Hkv, 1, block, N]
        taken, weighed = (x[sequences, heads, listed].flatten(2, 3)[:, :, None] for x in (keys, values))
        logits = (rows[:, :, :, i] @ taken.mT * scale).masked_fill(~seen, -torch.inf)
        # a row that sees nothing: its softmax is not a number
        weights = logits.softmax(-1).masked_fill(~seen, 0)
        out[:, :, :, i] = weights @ weighed
    return out.flatten(3, 4).flatten(1, 2).to(q.dtype)
