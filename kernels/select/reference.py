"""PyTorch twin: a stable sort, so that ties are the same on every device."""

import torch
from torch import Tensor


def select(scores: Tensor, num_kept: int, num_sinks: int, window: int, lengths: Tensor | None) -> Tensor:
    """See api.py."""
    length = scores.shape[-1]
    positions = torch.arange(length, device=scores.device)
    used = length if lengths is None else lengths[..., None]
    exists = positions < used
    forced = exists & ((positions < num_sinks) | (positions >= used - window))
    # two keys: existing, forced first, then the score; infinite scores and NaN cannot displace a forced position
    rank = (forced.int() - (~exists).int()).expand(scores.shape)
    values = scores.float()
    by_score = torch.where(values.isnan(), -torch.inf, values).argsort(dim=-1, descending=True, stable=True)
    by_rank = rank.gather(-1, by_score).argsort(dim=-1, descending=True, stable=True)
    kept = by_score.gather(-1, by_rank)[..., :num_kept]
    # what does not exist sorts behind what does
    kept = torch.where(exists.expand(scores.shape).gather(-1, kept), kept, length).sort(dim=-1).values
    return torch.where(kept < length, kept, -1).int()
