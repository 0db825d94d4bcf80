"""Triton: one program per block of keys and KV head (or share of its query heads) holds its keys and walks over the queries
that see them, so there are no atomics and the result is deterministic. Programs with the most queries start first.

Only blocks on the diagonal and a ragged end are masked. With no log-sum-exp given, `lse_kernel` computes it first, split over
the keys when the queries are few. Log-sum-exps between the kernels are in base 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.prefill_attention.triton import case, check

LOG2_E = 1.4426950408889634
NUM_SMS = 132

# by head dim, 16-bit: tile of queries x tile of keys. Two programs of two warpgroups share a multiprocessor, which is what 128
# registers allow: while one waits for the tensor cores the other takes exponentials. More keys to a program, less L2 traffic
CONFIGS = {
    16: {"BM": 64, "BN": 256, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    32: {"BM": 64, "BN": 256, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    64: {"BM": 64, "BN": 256, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    128: {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    256: {"BM": 64, "BN": 128, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
}
CONFIG_FP32 = {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2}
# candidates of `python -m kernels.bench --tune`, meant for head dim 128
TUNE = [
    {"BM": 64, "BN": 256, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    {"BM": 64, "BN": 256, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
    {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
    {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3, "maxnreg": None},
]
# the log-sum-exp pass: rows x keys
LSE_CONFIG = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def mass(
    p_q, p_lse, b_k, i, end, n, scale_log2,
    STRIDE_QT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    LSE_FACTOR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Probabilities that the queries from position i on give to the keys of this program, [BM / 16, 8, BN]: two rows added."""
    o_m = tl.arange(0, BM)
    p_q += i * tl.full((), STRIDE_QT, tl.int64) + o_m[:, None] * STRIDE_QT + tl.arange(0, D)[None, :]
    p_lse += i + o_m
    if MASKED:
        m_m = i + o_m < end
        b_q = tl.load(p_q, mask=m_m[:, None], other=0.0)
        b_lse = tl.load(p_lse, mask=m_m, other=float("inf"))
    else:
        b_q = tl.load(p_q)
        b_lse = tl.load(p_lse)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_p = tl.exp2(b_s * scale_log2 - (b_lse * LSE_FACTOR)[:, None])
    if MASKED:
        b_p = tl.where((tl.arange(0, BN) + (n - i))[None, :] <= o_m[:, None], b_p, 0.0)
    # rows r and r + 8 lie in one thread
    return tl.sum(tl.reshape(b_p, (BM // 16, 2, 8, BN)), 1)


@triton.jit
def column_sums_kernel(
    q, k, lse, lengths, out, scale_log2, mean_factor,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_kt, stride_lb, stride_lh,
    length, window, first, num_kv_heads, num_shares,
    STRIDE_QT: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LSE_FACTOR: tl.constexpr, SAVED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    # the first keys have the most queries: all heads' first keys start first
    i_n = tl.program_id(0) // (num_kv_heads * num_shares)
    i_h = tl.program_id(0) // num_shares % num_kv_heads
    i_s = tl.program_id(0) % num_shares
    i_b = tl.program_id(1).to(tl.int64)
    end = length
    if RAGGED:
        end = tl.load(lengths + i_b).to(tl.int32)
    o_n = i_n * BN + tl.arange(0, BN)
    o_d = tl.arange(0, D)
    p_k = k + i_b * stride_kb + i_h.to(tl.int64) * stride_kh + (i_n * BN).to(tl.int64) * stride_kt
    b_k = tl.load(p_k + tl.arange(0, BN)[:, None] * stride_kt + o_d[None, :], mask=(o_n < end)[:, None], other=0.0)
    # queries before `low` do not count or see none of these keys; those from `mid` on see all of them
    low = tl.maximum(tl.maximum(end - window, 0), i_n * BN)
    on_diagonal = tl.cdiv(tl.maximum(tl.minimum((i_n + 1) * BN - 1, end) - low, 0), BM)
    mid = low + on_diagonal * BM
    whole = tl.maximum(end - mid, 0) // BM
    tail = tl.where((end > mid) & (mid + whole * BM < end), 1, 0)
    p_q = q + i_b * stride_qb + (i_h * G + i_s * HEADS).to(tl.int64) * stride_qh
    # a computed log-sum-exp has one row per counted query, a given one as many as q
    p_lse = lse + i_b * stride_lb + (i_h * G + i_s * HEADS).to(tl.int64) * stride_lh
    # q and a given log-sum-exp begin at position `first`
    p_q -= first * tl.full((), STRIDE_QT, tl.int64)
    p_lse += -first if SAVED else window - end
    # by place, not by key: the sum over rows is paid once. Both loops run through all heads, so that the loads of the next
    # head are on their way; the masked blocks come apart, their masks would take registers from the first loop
    b_acc = tl.zeros([BM // 16, 8, BN], tl.float32)
    wide_qh = tl.full((), 1, tl.int64) * stride_qh
    i = mid
    p_qg, p_lg = p_q, p_lse
    for _ in tl.range(0, HEADS * whole):
        b_acc += mass(p_qg, p_lg, b_k, i, end, i_n * BN, scale_log2, STRIDE_QT, BM, BN, D, LSE_FACTOR, False)
        i += BM
        over = i >= mid + whole * BM
        i = tl.where(over, mid, i)
        p_qg += tl.where(over, wide_qh, 0)
        p_lg += tl.where(over, stride_lh, 0)
    masked = tl.maximum(on_diagonal + tail, 1)
    for t in tl.range(0, HEADS * (on_diagonal + tail)):
        g = t // masked
        j = t - g * masked
        i = low + j * BM + tl.where(j >= on_diagonal, whole * BM, 0)
        p_qg, p_lg = p_q + (g * wide_qh), p_lse + g * stride_lh
        b_acc += mass(p_qg, p_lg, b_k, i, end, i_n * BN, scale_log2, STRIDE_QT, BM, BN, D, LSE_FACTOR, True)
    b_out = tl.sum(tl.reshape(b_acc, (BM // 2, BN)), 0) * mean_factor
    p_o = out + ((i_b * num_kv_heads + i_h) * num_shares + i_s) * length
    tl.store(p_o + o_n, b_out, mask=o_n < length)


@triton.jit
def lse_kernel(
    q, k, lengths, partial, scale_log2,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh,
    length, window, first, num_heads, num_splits, per_split,
    STRIDE_KT: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of the last `window` rows over one split of the keys; rows are the group's heads times the window."""
    num_blocks = tl.cdiv(window * G, BM)
    i_m = num_blocks - 1 - tl.program_id(0) // num_splits
    i_s = tl.program_id(0) % num_splits
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    end = length
    if RAGGED:
        end = tl.load(lengths + i_b).to(tl.int32)
    # packed row -> head of the group, place in the window
    o_r = i_m * BM + tl.arange(0, BM)
    o_g = o_r // window
    o_w = o_r % window
    # a short sequence has fewer rows than the window: the rest is idle
    o_q = end - window + o_w
    m_r = (o_g < G) & (o_q >= 0)
    o_d = tl.arange(0, D)
    p_q = q + i_b * stride_qb + (i_h * G + o_g).to(tl.int64) * stride_qh + (o_q - first).to(tl.int64) * stride_qt
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    newest = tl.max(tl.where(m_r, o_q, -1))
    oldest = tl.min(tl.where(m_r, o_q, end))
    start = i_s * per_split
    stop = tl.minimum(start + per_split, newest + 1)
    # tiles wholly at or before the oldest row need no mask
    seen = tl.maximum(tl.minimum(oldest + 1, stop) - start, 0) // BN
    o_n = tl.arange(0, BN)
    p_k = k + i_b * stride_kb + i_h.to(tl.int64) * stride_kh
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for j in tl.range(0, seen):
        n = start + j * BN
        b_k = tl.load(p_k + n * tl.full((), STRIDE_KT, tl.int64) + o_n[:, None] * STRIDE_KT + o_d[None, :])
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_s - b_new[:, None]), 1)
        b_max = b_new
    for n in tl.range(start + seen * BN, stop, BN, num_stages=1):
        m_n = n + o_n < stop
        p_n = p_k + n * tl.full((), STRIDE_KT, tl.int64) + o_n[:, None] * STRIDE_KT + o_d[None, :]
        b_s = tl.dot(b_q, tl.trans(tl.load(p_n, mask=m_n[:, None], other=0.0)), input_precision="ieee") * scale_log2
        b_s = tl.where((n + o_n[None, :] <= o_q[:, None]) & m_n[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp2(b_max - b_ref) + tl.sum(tl.exp2(b_s - b_ref[:, None]), 1)
        b_max = b_new
    p_o = partial + ((i_s.to(tl.int64) * tl.num_programs(2) + i_b) * num_heads + i_h * G + o_g) * window + o_w
    tl.store(p_o, b_max + tl.log2(b_sum), mask=m_r)


@triton.jit
def combine_kernel(partial, lse, size, num_splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_s = tl.arange(0, SPLITS)
    m = (o_s < num_splits)[:, None] & (o_i < size)[None, :]
    b_part = tl.load(partial + o_s.to(tl.int64)[:, None] * size + o_i[None, :], mask=m, other=float("-inf"))
    b_max = tl.max(b_part, 0)
    b_sum = tl.sum(tl.exp2(b_part - b_max[None, :]), 0)
    tl.store(lse + o_i, b_max + tl.log2(b_sum), mask=o_i < size)


def last_lse(q: Tensor, k: Tensor, scale_log2: float, window: int, lengths: Tensor, ragged: bool) -> Tensor:
    """Base-2 log-sum-exp of the last `window` queries, [B, Hq, window] fp32; undefined before a short sequence's start."""
    batch, num_heads, num_given, dim = q.shape
    num_kv_heads, length = k.shape[1:3]
    group = num_heads // num_kv_heads
    chosen = LSE_CONFIG if q.dtype != torch.float32 else CONFIG_FP32
    num_blocks = triton.cdiv(group * window, chosen["BM"])
    programs = num_blocks * num_kv_heads * batch
    # few queries: split the keys, no split below 512 of them
    splits = max(1, min(8 * NUM_SMS // programs, triton.cdiv(length, 512), 128))
    per_split = triton.cdiv(triton.cdiv(length, splits), chosen["BN"]) * chosen["BN"]
    splits = triton.cdiv(length, per_split)
    partial = torch.empty(splits, batch, num_heads, window, dtype=torch.float32, device=q.device)
    lse_kernel[(num_blocks * splits, num_kv_heads, batch)](
        q, k, lengths, partial, scale_log2, *q.stride()[:3], *k.stride()[:2],
        length, window, length - num_given, num_heads, splits, per_split,
        STRIDE_KT=k.stride(2), G=group, D=dim, RAGGED=ragged, **chosen,
    )  # fmt: skip
    if splits == 1:
        return partial[0]
    lse = torch.empty(batch, num_heads, window, dtype=torch.float32, device=q.device)
    combine_kernel[(triton.cdiv(lse.numel(), 64),)](
        partial, lse, lse.numel(), splits, SPLITS=triton.next_power_of_2(splits), BLOCK=64, num_warps=4
    )
    return lse


def column_sums(
    q: Tensor,
    k: Tensor,
    scale: float,
    window: int,
    reduce: str,
    lse: Tensor | None,
    lengths: Tensor | None,
    config: dict | None,
) -> Tensor:
    """See api.py."""
    check("column_sums", q, k)
    batch, num_heads, num_given, dim = q.shape
    num_kv_heads, length = k.shape[1:3]
    group = num_heads // num_kv_heads
    chosen = (CONFIGS[dim] if q.dtype != torch.float32 else CONFIG_FP32) | (config or {})
    scale_log2 = scale * LOG2_E
    ragged, saved = lengths is not None, lse is not None
    ends = lengths if ragged else q
    if not saved:
        lse = last_lse(q, k, scale_log2, window, ends, ragged)
    elif lse.stride(2) != 1:
        lse = lse.contiguous()
    num_blocks = triton.cdiv(length, chosen["BN"])
    # the largest of the heads needs each head's own sums
    # long walks of unequal length need many programs to even out, short ones only enough to fill the device
    enough = NUM_SMS * (12 if 4 * window > length else 4)
    shares = group if reduce == "max" else shares_of(num_blocks * num_kv_heads * batch, group, enough)
    out = torch.empty(batch, num_kv_heads, shares, length, dtype=torch.float32, device=q.device)
    column_sums_kernel[(num_blocks * num_kv_heads * shares, batch)](
        q, k, lse, ends, out, scale_log2, 1 / group if reduce == "mean" else 1.0,
        *q.stride()[:2], *k.stride()[:3], *lse.stride()[:2],
        length, window, length - num_given, num_kv_heads, shares,
        STRIDE_QT=q.stride(2), G=group, HEADS=group // shares, D=dim, LSE_FACTOR=LOG2_E if saved else 1.0,
        SAVED=saved, RAGGED=ragged, **chosen,
    )  # fmt: skip
    if shares == 1:
        return out[:, :, 0]
    return out.amax(2) if reduce == "max" else out.sum(2)


def shares_of(programs: int, group: int, enough: int) -> int:
    """Fewest equal shares of a group's query heads that give enough programs; every share has its own partial sums."""
    return next((n for n in range(1, group) if group % n == 0 and programs * n >= enough), group)


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    cases = []
    for dim in (64, 128, 256):
        for dtype in ("bf16", "fp16"):
            pointers = {"q": f"*{dtype}", "k": f"*{dtype}", "lengths": "*i64", "scale_log2": "fp32"}
            sums = pointers | {"lse": "*fp32", "out": "*fp32", "mean_factor": "fp32"}
            for saved in (True, False):
                constexprs = {
                    "STRIDE_QT": dim, "G": 4, "HEADS": 4, "D": dim, "LSE_FACTOR": LOG2_E if saved else 1.0, "SAVED": saved,
                    "RAGGED": not saved,
                }  # fmt: skip
                name = f"column_sums-{'saved' if saved else 'last'}-{dtype}-D{dim}"
                cases.append(case(name, column_sums_kernel, sums, constexprs, CONFIGS[dim], ["wgmma.mma_async", "cp.async"]))
            constexprs = {"STRIDE_KT": dim, "G": 4, "D": dim, "RAGGED": True}
            types = pointers | {"partial": "*fp32"}
            cases.append(
                case(f"lse-{dtype}-D{dim}", lse_kernel, types, constexprs, LSE_CONFIG, ["wgmma.mma_async", "cp.async"])
            )
    return cases
