"""PyTorch twin: blocks of queries against all keys, so memory is block x Tk."""

import torch
from torch import Tensor


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: tuple[Tensor, Tensor] | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """See api.py. fp64 inputs stay fp64."""
    batch, num_heads, num_queries, dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    compute = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(compute)[:, :, None] for x in (k, v))  # [B, Hkv, 1, Tk, D]
    grouped = q.unflatten(1, (num_kv_heads, -1))  # [B, Hkv, G, Tq, D]
    positions = torch.arange(num_keys, device=q.device)
    outs, lses = [], []
    for start in range(0, num_queries, block_size):
        rows = positions[num_keys - num_queries :][start : start + block_size]
        seen = positions <= rows[:, None]  # [block, Tk]
        if blocks is not None:
            seen = seen & listed(*blocks, start // block_size, block_size, num_keys)[:, :, None]
            seen = seen.expand(-1, num_heads if seen.shape[1] == num_heads else num_kv_heads, -1, -1)
            seen = seen.unflatten(1, (num_kv_heads, -1))  # [B, Hkv, G or 1, block, Tk]
        logits = grouped[:, :, :, start : start + block_size].to(compute) @ keys.mT * scale
        logits = logits.masked_fill(~seen, float("-inf"))
        lse = logits.logsumexp(-1)
        probabilities = (logits - lse[..., None]).exp().masked_fill(~seen, 0.0)
        outs.append(probabilities @ values)
        lses.append(lse)
    out, lse = torch.cat(outs, 3).flatten(1, 2), torch.cat(lses, 3).flatten(1, 2)
    return out.to(q.dtype), lse


def listed(index: Tensor, count: Tensor, row: int, block_size: int, num_keys: int) -> Tensor:
    """Keys that the lists of one block of queries name: [B, H, Tk] bool."""
    num_blocks = -(-num_keys // block_size)
    index, count = index[:, :, row].long(), count[:, :, row]  # [B, H, M], [B, H]
    unread = torch.arange(index.shape[-1], device=index.device) >= count[..., None]
    hit = torch.zeros(*index.shape[:2], num_blocks + 1, dtype=torch.bool, device=index.device)
    hit.scatter_(2, index.masked_fill(unread, num_blocks), True)
    return hit[:, :, :num_blocks].repeat_interleave(block_size, 2)[:, :, :num_keys]
