"""Triton: causal attention over all keys or over listed blocks; one program per block of queries and head, heaviest first.

Tiles wholly in the past need no mask; the tiles on the diagonal come last, in a loop of their own. Scores live in base 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import need_triton

LN_2 = tl.constexpr(0.6931471805599453)

# by head dim, 16-bit: tile of queries x tile of keys. One warpgroup holds 64 query rows of 128 wide accumulators
CONFIGS = {
    16: {"BM": 128, "BN": 128, "num_warps": 4, "num_stages": 3},
    32: {"BM": 128, "BN": 128, "num_warps": 4, "num_stages": 3},
    64: {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3},
    128: {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3},
    256: {"BM": 128, "BN": 32, "num_warps": 8, "num_stages": 3},
}
# fp32 runs on the CUDA cores: small tiles
CONFIG_FP32 = {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2}
# candidates of `python -m kernels.bench --tune`, meant for head dim 128
TUNE = [
    {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3},
    {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 2},
    {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3},
    {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2},
    {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
]


@triton.jit
def tile_step(
    b_q, b_acc, b_max, b_sum, p_k, p_v, n, scale_log2, o_q, num_keys,
    STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys, from position n on, into the running softmax. Unmasked tiles lie wholly at or before every query."""
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, D)
    p_k += n * tl.full((), STRIDE_KT, tl.int64) + o_n[:, None] * STRIDE_KT + o_d[None, :]
    p_v += n * tl.full((), STRIDE_VT, tl.int64) + o_n[:, None] * STRIDE_VT + o_d[None, :]
    if MASKED:
        m_n = n + o_n < num_keys
        b_k = tl.load(p_k, mask=m_n[:, None], other=0.0)
    else:
        b_k = tl.load(p_k)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if MASKED:
        b_s = tl.where(n + o_n[None, :] <= o_q[:, None], b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
    b_ref = b_new
    if MASKED:
        # a row that has seen nothing yet: -inf minus -inf is not a number
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s * scale_log2 - b_ref[:, None])
    b_alpha = tl.exp2(b_max - b_ref)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None]
    b_v = tl.load(p_v, mask=m_n[:, None], other=0.0) if MASKED else tl.load(p_v)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def prefill_kernel(
    q, k, v, out, lse, index, count, scale_log2,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_ob, stride_oh, stride_ot, stride_ib, stride_ih, stride_ir, stride_cb, stride_ch, stride_cr,
    num_queries, num_keys, num_heads, num_rows, list_group,
    STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    # the last rows have the most keys: all heads' last rows start first
    i_m = num_rows - 1 - tl.program_id(0) // num_heads
    i_h = tl.program_id(0) % num_heads
    i_b = tl.program_id(1).to(tl.int64)
    i_kh = (i_h // G).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_d = tl.arange(0, D)
    m_m = o_m < num_queries
    offset = num_keys - num_queries
    first = offset + i_m * BM
    last = tl.minimum(first + BM, num_keys) - 1
    p_q = q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + (i_m * BM).to(tl.int64) * stride_qt
    b_q = tl.load(p_q + tl.arange(0, BM)[:, None] * stride_qt + o_d[None, :], mask=m_m[:, None], other=0.0)
    p_k = k + i_b * stride_kb + i_kh * stride_kh
    p_v = v + i_b * stride_vb + i_kh * stride_vh
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D], tl.float32)
    if LISTED:
        # list_group: query heads that share a list
        i_list = (i_h // list_group).to(tl.int64)
        i_row = (i_m * BM // BLOCK).to(tl.int64)
        p_i = index + i_b * stride_ib + i_list * stride_ih + i_row * stride_ir
        listed = tl.load(count + i_b * stride_cb + i_list * stride_ch + i_row * stride_cr)
        past = listed
        top = tl.load(p_i + past - 1, mask=past > 0, other=0)
        while (past > 0) & (top * BLOCK + BLOCK - 1 > first):
            past -= 1
            top = tl.load(p_i + past - 1, mask=past > 0, other=0)
        PER: tl.constexpr = BLOCK // BN
        # the index of the next tile is on its way while this one is computed
        block = tl.load(p_i, mask=past > 0, other=0)
        for j in tl.range(0, past * PER):
            n = block * BLOCK + (j % PER) * BN
            block = tl.load(p_i + tl.minimum((j + 1) // PER, listed - 1))
            b_acc, b_max, b_sum = tile_step(
                b_q, b_acc, b_max, b_sum, p_k, p_v, n, scale_log2, o_m, num_keys, STRIDE_KT, STRIDE_VT, BN, D, False
            )  # fmt: skip
        for j in tl.range(past * PER, listed * PER, num_stages=1):
            n = tl.load(p_i + j // PER) * BLOCK + (j % PER) * BN
            b_acc, b_max, b_sum = tile_step(
                b_q, b_acc, b_max, b_sum, p_k, p_v, n, scale_log2, o_m + offset, num_keys, STRIDE_KT, STRIDE_VT, BN, D, True
            )  # fmt: skip
    else:
        past = (first + 1) // BN
        for j in tl.range(0, past):
            b_acc, b_max, b_sum = tile_step(
                b_q, b_acc, b_max, b_sum, p_k, p_v, j * BN, scale_log2, o_m, num_keys, STRIDE_KT, STRIDE_VT, BN, D, False
            )  # fmt: skip
        for j in tl.range(past, last // BN + 1, num_stages=1):
            b_acc, b_max, b_sum = tile_step(
                b_q, b_acc, b_max, b_sum, p_k, p_v, j * BN, scale_log2, o_m + offset, num_keys,
                STRIDE_KT, STRIDE_VT, BN, D, True,
            )  # fmt: skip
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_o = out + i_b * stride_ob + i_h.to(tl.int64) * stride_oh + (i_m * BM).to(tl.int64) * stride_ot
    tl.store(p_o + tl.arange(0, BM)[:, None] * stride_ot + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_m[:, None])
    p_l = lse + (i_b * num_heads + i_h) * num_queries
    tl.store(p_l + o_m, (b_max + tl.log2(b_sum)) * LN_2, mask=m_m)


def config_of(dim: int, dtype: torch.dtype, block_size: int | None, config: dict | None) -> dict:
    """Pinned tiles, none larger than a listed block."""
    chosen = CONFIGS[dim] if dtype != torch.float32 else CONFIG_FP32
    chosen = chosen | (config or {})
    if block_size is None:
        return chosen
    capped = chosen | {"BM": min(chosen["BM"], block_size), "BN": min(chosen["BN"], block_size)}
    # a warpgroup needs 64 rows
    return capped | {"num_warps": min(chosen["num_warps"], max(4, capped["BM"] // 16))}


def check(op: str, q: Tensor, *others: Tensor) -> None:
    """One line about what the Triton kernels of this op cannot run."""
    need_triton(op, q)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or any(x.dtype != q.dtype for x in others):
        raise ValueError(f"{op}: impl=triton runs fp16, bf16 and fp32 of one dtype, got {q.dtype} (set impl=reference)")
    if q.shape[-1] not in CONFIGS:
        raise ValueError(f"{op}: impl=triton runs head dims {list(CONFIGS)}, got {q.shape[-1]} (set impl=reference)")
    if any(x.stride(-1) != 1 for x in (q, *others)):
        raise ValueError(f"{op}: impl=triton needs the head dim contiguous")


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: tuple[Tensor, Tensor] | None, block_size: int, config: dict | None
) -> tuple[Tensor, Tensor]:
    """See api.py."""
    check("prefill_attention", q, k, v)
    batch, num_heads, num_queries, dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    if blocks is not None and (block_size < 16 or block_size & (block_size - 1)):
        raise ValueError(f"prefill_attention: impl=triton needs a block_size that is a power of two from 16, got {block_size}")
    chosen = config_of(dim, q.dtype, None if blocks is None else block_size, config)
    out = torch.empty_like(q)
    lse = torch.empty(batch, num_heads, num_queries, dtype=torch.float32, device=q.device)
    index, count = blocks if blocks is not None else (lse, lse)
    list_strides = [*index.stride()[:3], *count.stride()] if blocks is not None else [0] * 6
    if blocks is not None and index.stride(3) != 1:
        raise ValueError("prefill_attention: impl=triton needs contiguous lists")
    num_rows = triton.cdiv(num_queries, chosen["BM"])
    prefill_kernel[(num_rows * num_heads, batch)](
        q, k, v, out, lse, index, count, scale * 1.4426950408889634,
        *q.stride()[:3], *k.stride()[:2], *v.stride()[:2], *out.stride()[:3], *list_strides,
        num_queries, num_keys, num_heads, num_rows, num_heads // (index.shape[1] if blocks is not None else 1),
        STRIDE_KT=k.stride(2), STRIDE_VT=v.stride(2), G=num_heads // num_kv_heads, D=dim,
        BLOCK=block_size, LISTED=blocks is not None, **chosen,
    )  # fmt: skip
    return out, lse


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    cases = []
    for dim in (64, 128, 256):
        for dtype in ("bf16", "fp16"):
            for listed in (False, True):
                pointers = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {
                    "lse": "*fp32",
                    "index": "*i32",
                    "count": "*i32",
                }
                chosen = config_of(dim, torch.bfloat16, 128 if listed else None, None)
                cases.append(
                    case(
                        f"prefill-{'listed' if listed else 'dense'}-{dtype}-D{dim}",
                        prefill_kernel,
                        pointers | {"scale_log2": "fp32"},
                        {"STRIDE_KT": dim, "STRIDE_VT": dim, "G": 4, "D": dim, "BLOCK": 128, "LISTED": listed},
                        chosen,
                        ["wgmma.mma_async", "cp.async"],
                    )
                )
    return cases


def case(name: str, fn, types: dict, constexprs: dict, config: dict, expect: list[str]) -> dict:
    """One entry of compile_cases: arguments that `types` leaves out are i32."""
    names = [arg.name for arg in fn.params if not arg.is_constexpr]
    tiles = {key: value for key, value in config.items() if key not in ("num_warps", "num_stages", "maxnreg")}
    return {
        "name": name,
        "fn": fn,
        "signature": {n: types.get(n, "i32") for n in names},
        "constexprs": constexprs | tiles,
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
        "maxnreg": config.get("maxnreg"),
        "expect": expect,
    }
