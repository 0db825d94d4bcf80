"""One program per row and head: query heads rotate, key heads rotate into their slot, value heads move into theirs."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rounded_mul(a, b):
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def rope_append_kernel(
    QKV, COS, SIN, Q, K_SLOTS, V_SLOTS, SLOT, Q_NORM, K_NORM, eps,
    s_kb, s_kh, s_kc, s_vb, s_vh, s_vc,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    o_d = tl.arange(0, HALF)
    p_x = QKV + (seq * (HQ + 2 * HKV) + head) * D + o_d
    left, right = tl.load(p_x), tl.load(p_x + HALF)
    slot = tl.load(SLOT + seq)
    if head >= HQ + HKV:
        p_v = V_SLOTS + seq * s_vb + (head - HQ - HKV) * s_vh + slot * s_vc + o_d
        tl.store(p_v, left)
        tl.store(p_v + HALF, right)
    else:
        dtype = left.dtype
        if NORM:
            wide_l, wide_r = left.to(tl.float32), right.to(tl.float32)
            scale = tl.rsqrt((tl.sum(wide_l * wide_l, 0) + tl.sum(wide_r * wide_r, 0)) / D + eps)
            p_w = tl.where(head < HQ, Q_NORM + o_d, K_NORM + o_d)
            left = rounded_mul((wide_l * scale).to(dtype), tl.load(p_w))
            right = rounded_mul((wide_r * scale).to(dtype), tl.load(p_w + HALF))
        cos_l, cos_r = tl.load(COS + seq * D + o_d), tl.load(COS + seq * D + HALF + o_d)
        sin_l, sin_r = tl.load(SIN + seq * D + o_d), tl.load(SIN + seq * D + HALF + o_d)
        turned_l = (rounded_mul(left, cos_l).to(tl.float32) - rounded_mul(right, sin_l).to(tl.float32)).to(dtype)
        turned_r = (rounded_mul(right, cos_r).to(tl.float32) + rounded_mul(left, sin_r).to(tl.float32)).to(dtype)
        if head < HQ:
            p_out = Q + (seq * HQ + head) * D + o_d
        else:
            p_out = K_SLOTS + seq * s_kb + (head - HQ) * s_kh + slot * s_kc + o_d
        tl.store(p_out, turned_l)
        tl.store(p_out + HALF, turned_r)


def rope_append(qkv, cos, sin, k_slots, v_slots, slot, num_q_heads: int, q_norm, k_norm, eps: float) -> Tensor:
    """See api.py; the head dim must be a power of two."""
    batch, num_kv_heads, _, head_dim = k_slots.shape
    if head_dim & (head_dim - 1):
        raise ValueError(f"rope_append: impl=triton needs a head dim that is a power of two, not {head_dim}")
    q = torch.empty(batch, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    rope_append_kernel[(batch, num_q_heads + 2 * num_kv_heads)](
        qkv, cos.contiguous(), sin.contiguous(), q, k_slots, v_slots, slot,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, eps,
        *k_slots.stride()[:3], *v_slots.stride()[:3],
        HQ=num_q_heads, HKV=num_kv_heads, HALF=head_dim // 2, NORM=q_norm is not None, num_warps=1,
    )  # fmt: skip
    return q
