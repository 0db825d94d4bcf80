"""PyTorch twin: a stable sort, so that ties are the same on every device."""

import torch
from torch import Tensor


def select(scores: Tensor, num_kept: int, num_sinks: int, window: int) -> Tensor:
    """See api.py."""
    length = scores.shape[-1]
    ranked = torch.nan_to_num(scores.float(), nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).clone()
    # two keys: forced first, then the score; infinite scores and NaN cannot displace a forced position
    forced = torch.zeros(length, dtype=torch.bool, device=scores.device)
    forced[:num_sinks] = True
    forced[length - window :] = True
    by_score = ranked.argsort(dim=-1, descending=True, stable=True)
    forced_first = forced[by_score].float().argsort(dim=-1, descending=True, stable=True)
    return by_score.gather(-1, forced_first)[..., :num_kept].sort(dim=-1).values
