"""Triton: one program per sequence and head writes both rows."""

import triton
import triton.language as tl
from torch import Tensor

from kernels import need_triton


@triton.jit
def append_kernel(
    k_slots, v_slots, k, v, slot,
    stride_kb, stride_kh, stride_kc, stride_vb, stride_vh, stride_vc,
    stride_kb_new, stride_kh_new, stride_vb_new, stride_vh_new, stride_sb, stride_sh,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    at = tl.load(slot + i_b * stride_sb + i_h * stride_sh).to(tl.int64)
    for start in tl.static_range(0, ROW, BLOCK):
        o_d = start + tl.arange(0, BLOCK)
        inside = o_d < ROW
        new_k = tl.load(k + i_b * stride_kb_new + i_h * stride_kh_new + o_d, mask=inside)
        new_v = tl.load(v + i_b * stride_vb_new + i_h * stride_vh_new + o_d, mask=inside)
        p_k = k_slots + i_b * stride_kb + i_h * stride_kh + at * stride_kc + o_d
        p_v = v_slots + i_b * stride_vb + i_h * stride_vh + at * stride_vc + o_d
        tl.store(p_k, new_k.to(k_slots.dtype.element_ty), mask=inside)
        tl.store(p_v, new_v.to(v_slots.dtype.element_ty), mask=inside)


def append(k_slots: Tensor, v_slots: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """See api.py."""
    need_triton("append", k_slots)
    batch, num_heads, num_slots = k_slots.shape[:3]
    row = k_slots[0, 0, 0].numel()
    for slots in (k_slots, v_slots):
        if slots.dtype != k_slots.dtype or not slots[0, 0, 0].is_contiguous():
            raise ValueError("append: impl=triton needs slots of one dtype with contiguous rows")
    k, v = (x if x[0, 0].is_contiguous() else x.contiguous() for x in (k, v))
    strides = [*k_slots.stride()[:3], *v_slots.stride()[:3], *k.stride()[:2], *v.stride()[:2]]
    strides += [slot.stride(0), slot.stride(1) if slot.dim() == 2 else 0]
    block = min(triton.next_power_of_2(row), 1024)
    append_kernel[(batch, num_heads)](k_slots, v_slots, k, v, slot, *strides, ROW=row, BLOCK=block, num_warps=1)


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    types = {"fp16": "*fp16", "bf16": "*bf16"}
    names = [arg.name for arg in append_kernel.params if not arg.is_constexpr]
    cases = []
    for dtype, pointer in types.items():
        signature = {n: pointer if n in ("k_slots", "v_slots", "k", "v") else "*i64" if n == "slot" else "i64" for n in names}
        constexprs = {"ROW": 128, "BLOCK": 128}
        cases.append(
            {
                "name": f"append-{dtype}-D128", "fn": append_kernel, "signature": signature, "constexprs": constexprs,
                "num_warps": 1, "num_stages": 1, "expect": ["st.global"],
            }
        )  # fmt: skip
    return cases
