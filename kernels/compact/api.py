"""Gather of the rows that stay, bit exact."""

import torch
from torch import Tensor


def compact(rows: Tensor, index: Tensor) -> Tensor:
    """Rows at `index`, in new memory of their own.

    Args:
        rows: [B, H, T, D]; index: [N] shared by all heads, or [B, H, N]; negative or too large entries raise.
    Returns:
        [B, H, N, D], same dtype and bits.
    """
    if index.dim() == 1:
        return rows.index_select(2, index)
    return torch.gather(rows, 2, index[..., None].expand(*index.shape, rows.shape[3]))
