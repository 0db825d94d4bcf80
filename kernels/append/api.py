"""Write of one new row per sequence and head at a position that lives on the device."""

from torch import Tensor


def append(slots: Tensor, row: Tensor, slot: Tensor) -> None:
    """slots[b, :, slot[b]] = row[b], in place, without a host sync.

    Args:
        slots: [B, H, C, ...]; row: [B, H, ...]; slot: [B] int64, 0 <= slot < C.
    """
    index = slot.view(-1, 1, 1, *[1] * (slots.dim() - 3)).expand(row.shape[0], row.shape[1], 1, *row.shape[2:])
    slots.scatter_(2, index, row.unsqueeze(2).to(slots.dtype))
