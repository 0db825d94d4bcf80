"""Triton: one program per block of rows and head; tiles of listed keys into a running softmax, masked by their positions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.prefill_attention.triton import case, check, config_of

# candidates of `python -m kernels.bench --tune`, meant for head dim 128
TUNE = [
    {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3},
]


@triton.jit
def rows_kernel(
    q, k, v, out, q_positions, k_positions, index, count, scale_log2,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_ib, stride_ih, stride_ir, stride_cb, stride_ch, stride_cr,
    num_heads, list_group,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0) // num_heads
    i_h = (tl.program_id(0) % num_heads).to(tl.int64)
    i_b = tl.program_id(1).to(tl.int64)
    i_kh, i_list = i_h // G, i_h // list_group
    i_row = (i_m * BM // BLOCK).to(tl.int64)
    o_m = (i_m * BM + tl.arange(0, BM)).to(tl.int64)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, D)
    own = tl.load(q_positions + o_m)
    b_q = tl.load(q + i_b * stride_qb + i_h * stride_qh + o_m[:, None] * stride_qt + o_d[None, :])
    p_i = index + i_b * stride_ib + i_list * stride_ih + i_row * stride_ir
    listed = tl.load(count + i_b * stride_cb + i_list * stride_ch + i_row * stride_cr)
    p_k = k + i_b * stride_kb + i_kh * stride_kh + o_n[:, None] * stride_kt + o_d[None, :]
    p_v = v + i_b * stride_vb + i_kh * stride_vh + o_n[:, None] * stride_vt + o_d[None, :]
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D], tl.float32)
    PER: tl.constexpr = BLOCK // BN
    for j in tl.range(0, listed * PER):
        n = tl.load(p_i + j // PER).to(tl.int64) * BLOCK + (j % PER) * BN
        there = tl.load(k_positions + n + o_n)
        b_k = tl.load(p_k + n * stride_kt)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_s = tl.where(there[None, :] <= own[:, None], b_s * scale_log2, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # a row that has seen nothing yet: -inf minus -inf is not a number
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_alpha = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_v = tl.load(p_v + n * stride_vt)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")
        b_max = b_new
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_o = out + i_b * stride_ob + i_h * stride_oh + o_m[:, None] * stride_ot + o_d[None, :]
    tl.store(p_o, b_out.to(out.dtype.element_ty))


def rows_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    index: Tensor,
    count: Tensor,
    block_size: int,
    scale: float,
    config: dict | None,
) -> Tensor:
    """See api.py."""
    check("rows_attention", q, k, v)
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"rows_attention: impl=triton needs a block_size that is a power of two from 16, got {block_size}")
    batch, num_heads, num_rows, dim = q.shape
    chosen = config_of(dim, q.dtype, block_size, config)
    out, index = torch.empty_like(q), index.contiguous()
    rows_kernel[(num_rows // chosen["BM"] * num_heads, batch)](
        q, k, v, out, q_positions, k_positions, index, count, scale * 1.4426950408889634,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *index.stride()[:3], *count.stride(),
        num_heads, num_heads // index.shape[1], G=num_heads // k.shape[1], D=dim, BLOCK=block_size, **chosen,
    )  # fmt: skip
    return out


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    pointers = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    pointers |= dict.fromkeys(("q_positions", "k_positions", "index", "count"), "*i32")
    return [
        case(
            f"rows-D{dim}-{block}",
            rows_kernel,
            pointers | {"scale_log2": "fp32"},
            {"G": 4, "D": dim, "BLOCK": block},
            config_of(dim, torch.bfloat16, block, None),
            ["wgmma.mma_async", "cp.async"],
        )
        for dim in (64, 128)
        for block in (64, 128)
    ]
