"""Write of one new row per sequence and head, of K and of V, at a position that lives on the device."""

from torch import Tensor

from kernels import unknown_impl


def append(k_slots: Tensor, v_slots: Tensor, k: Tensor, v: Tensor, slot: Tensor, impl: str = "reference") -> None:
    """k_slots[b, h, slot[b]] = k[b, h] and the same for v, in place, without a host sync; whatever lay there is overwritten.

    Args:
        k_slots, v_slots: [B, H, C, ...] of one shape and dtype, the trailing axes contiguous.
        k, v: [B, H, ...]; converted to the slots' dtype.
        slot: [B], or [B, H] with one slot per head, int64, 0 <= slot < C.
    """
    rows = k_slots.shape[:2] + k_slots.shape[3:]
    if k_slots.shape != v_slots.shape or k.shape != rows or v.shape != rows:
        shapes = ", ".join(str(tuple(x.shape)) for x in (k_slots, v_slots, k, v))
        raise ValueError(f"append wants slots [B, H, C, ...] and rows [B, H, ...], got {shapes}")
    if slot.shape not in (rows[:1], rows[:2]):
        raise ValueError(f"append wants slot [B] or [B, H], got {tuple(slot.shape)}")
    match impl:
        case "reference":
            from kernels.append import reference as chosen
        case "triton":
            from kernels.append import triton as chosen
        case _:
            raise unknown_impl("append", impl)
    chosen.append(k_slots, v_slots, k, v, slot)
