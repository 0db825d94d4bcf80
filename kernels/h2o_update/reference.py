"""PyTorch twin: probabilities, then two keys in order: the score, then the position."""

import torch
from torch import Tensor


def h2o_update(
    scores: Tensor, positions: Tensor, logits: Tensor, lse: Tensor, lengths: Tensor, seen: Tensor, num_recent: int, score: str
) -> Tensor:
    """See api.py."""
    num_kv_heads, num_slots = scores.shape[1:]
    filled = torch.arange(num_slots, device=scores.device) < lengths[:, None, None]  # [B, 1, C]
    probabilities = torch.exp(logits - lse[..., None]).unflatten(1, (num_kv_heads, -1)).sum(2)
    scores += probabilities.masked_fill(~filled, 0)
    ages = seen[:, None, None] - positions
    ranked = scores / ages if score == "mean" else scores
    ranked = ranked.masked_fill(ages <= num_recent, float("inf")).masked_fill(~filled, float("inf"))
    lowest = ranked == ranked.amin(-1, keepdim=True)
    oldest_lowest = positions.long().masked_fill(~(lowest & filled), torch.iinfo(torch.int64).max).argmin(-1)  # [B, Hkv]
    slot = torch.where(lengths[:, None] < num_slots, lengths[:, None].long(), oldest_lowest)
    scores.scatter_(2, slot[..., None], 0.0)
    positions.scatter_(2, slot[..., None], seen[:, None, None].to(positions.dtype).expand(-1, num_kv_heads, 1))
    return slot
