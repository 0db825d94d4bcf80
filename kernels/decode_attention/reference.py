"""PyTorch twin: fp32 softmax over masked slots."""

import torch
from torch import Tensor


def listed_slots(index: Tensor, index_lens: Tensor | None, block_size: int, num_slots: int) -> Tensor:
    """[B, H, C] bool: slots that the list names."""
    counts = torch.arange(index.shape[2], device=index.device) >= 0
    if index_lens is not None:
        counts = torch.arange(index.shape[2], device=index.device) < index_lens[:, None, None]
    num_blocks = -(-num_slots // block_size)
    # entries that do not count go to a block of their own
    entries = torch.where(counts & (index >= 0) & (index < num_blocks), index, num_blocks).long()
    listed = torch.zeros(*index.shape[:2], num_blocks + 1, dtype=torch.bool, device=index.device)
    listed.scatter_(2, entries, True)
    return listed[..., :num_blocks].repeat_interleave(block_size, dim=2)[..., :num_slots]


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    index: Tensor | None = None,
    index_lens: Tensor | None = None,
    block_size: int = 1,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See api.py. fp64 inputs stay fp64, so that tests can use this as their oracle."""
    batch, num_kv_heads, num_slots, head_dim = k.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    unused = (torch.arange(num_slots, device=k.device) >= lengths[:, None])[:, None]  # [B, 1, C]
    if index is not None:
        unused = unused | ~listed_slots(index, index_lens, block_size, num_slots)  # [B, Hkv or 1, C]
    grouped = q.view(batch, num_kv_heads, -1, head_dim).to(compute)  # [B, Hkv, G, D]
    scores = (grouped @ k.to(compute).transpose(2, 3)) * scale
    if logits is not None:
        per_group = logits.view(scores.shape)
        per_group.copy_(torch.where(unused[:, :, None], per_group, scores))
    scores = scores.masked_fill(unused[:, :, None], float("-inf"))  # [B, Hkv, G, C]
    lse = torch.logsumexp(scores, dim=-1)
    # a NaN in an unused slot would survive a weight of zero
    values = v.to(compute).masked_fill(unused[..., None], 0)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    out = weights @ values
    return out.view(q.shape).to(q.dtype), lse.view(batch, -1)
