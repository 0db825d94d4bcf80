"""Write of one new token per sequence into quantised KV; seals a block of the tail on the device when it is full."""

from torch import Tensor

from kernels import need_triton, unknown_impl
from kernels.quantize import QuantKV


def append_quant(kv: QuantKV, k: Tensor, v: Tensor, slot: Tensor, impl: str = "reference") -> None:
    """Token k[b], v[b] at slot[b], in place, without a host sync.

    Formats that overwrite (int8, fp8, int4_token) quantise the token into its slot, whatever lay there. The others put it into
    row slot % BLOCK of the tail and, when that is the last row, quantise the tail's tokens into slots slot + 1 - BLOCK .. slot.

    Args:
        k, v: [B, Hkv, D] floating point, |x| < 6000 (a tail converts them to its dtype first).
        slot: [B] int64, 0 <= slot < kv.num_slots; a format with a tail wants the number of tokens so far, one more each call.
            Formats that overwrite also take [B, Hkv], a slot per KV head.
    """
    shape = (kv.batch_size, kv.num_kv_heads, kv.head_dim)
    if k.shape != shape or v.shape != shape:
        raise ValueError(f"append_quant wants k, v {shape}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if slot.shape != shape[:1] and not (kv.format.overwrites and slot.shape == shape[:2]):
        per_head = " or [B, Hkv]" if kv.format.overwrites else f" ({kv.format.name} fills all KV heads alike)"
        raise ValueError(f"append_quant wants slot [B]{per_head}, got {tuple(slot.shape)}")
    match impl:
        case "reference":
            from kernels.append_quant import reference as chosen
        case "triton":
            need_triton("append_quant", k, v, slot, kv.parts[0].k)
            from kernels.append_quant import triton as chosen
        case _:
            raise unknown_impl("append_quant", impl)
    chosen.append_quant(kv, k, v, slot)
