"""PyTorch twin: blocks of queries against all keys, so memory is block x T."""

import torch
from torch import Tensor

BLOCK = 128


def column_sums(
    q: Tensor, k: Tensor, scale: float, window: int, reduce: str, lse: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """See api.py. fp64 inputs stay fp64."""
    batch, num_kv_heads, length = k.shape[:3]
    first = length - q.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    positions = torch.arange(length, device=q.device)
    ends = torch.full((batch,), length, device=q.device) if lengths is None else lengths.long()
    ends = ends[:, None, None, None, None]
    # what is not live must not reach a product: it may be NaN
    keys = k.to(compute).masked_fill((positions >= ends[..., 0, 0])[..., None], 0.0)
    keys = keys[:, :, None].mT  # [B, Hkv, 1, D, T]
    grouped = q.unflatten(1, (num_kv_heads, -1))  # [B, Hkv, G, T, D]
    sums = torch.zeros(batch, num_kv_heads, grouped.shape[2], length, dtype=compute, device=q.device)
    for start in range(0 if lengths is not None else length - window, length, BLOCK):
        rows, given = positions[start : start + BLOCK], slice(start - first, start - first + BLOCK)
        counted = (rows[:, None] < ends) & (rows[:, None] >= ends - window)  # [B, 1, 1, block, 1]
        queries = grouped[:, :, :, given].to(compute).masked_fill(~counted, 0.0)
        logits = (queries @ keys * scale).masked_fill(positions > rows[:, None], float("-inf"))  # [B, Hkv, G, block, T]
        if lse is None:
            probabilities = logits.softmax(-1)
        else:
            total = lse[:, :, given].unflatten(1, (num_kv_heads, -1))
            probabilities = (logits - total[..., None]).exp()
        sums += probabilities.masked_fill(~counted, 0.0).sum(3)
    match reduce:
        case "sum":
            return sums.sum(2)
        case "mean":
            return sums.mean(2)
        case _:
            return sums.amax(2)
