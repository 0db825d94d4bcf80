"""PyTorch twin: one scatter each."""

from torch import Tensor


def append(k_slots: Tensor, v_slots: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """See api.py."""
    per_head = slot if slot.dim() == 2 else slot[:, None]
    for slots, rows in ((k_slots, k), (v_slots, v)):
        index = per_head.view(*per_head.shape, 1, *[1] * (slots.dim() - 3)).expand(*rows.shape[:2], 1, *rows.shape[2:])
        slots.scatter_(2, index, rows.unsqueeze(2).to(slots.dtype))
