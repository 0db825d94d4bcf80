"""Triton: split-KV decode over 8- and 4-bit codes. One program of one warp per sequence, KV head and split, and a merge.

What makes it fast:
- Tokens (K) and channels (V) are the rows of each product and query heads its 8 columns, so codes become half-precision numbers
  in the registers where the tensor cores want them, and accumulators are half as large.
- One warp a program: no barrier between warps, many programs per SM instead. A tile is 32 tokens: one int4 group of K.
- Codes become numbers by byte permutes into the mantissa of 1024 + n (8 bit) or 64 + n (4 bit). The bias goes before the
  product, exactly: subtracted (8 bit), or inside the multiply-add that applies step and zero (4 bit).
- 8-bit steps are folded into scores and probabilities. Probabilities times V's step are kept near 2^BOOST by the running
  maximum of score + log2(step), so that half precision loses none that matter, however small the steps are.

The tail, if the format has one, is attended by a split of its own in its own 16-bit dtype. Without inline assembly (ASM=False,
the interpreter) plain arithmetic gives the same numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from kernels.decode_attention.triton import merge_kernel
from kernels.quantize.api import BIAS_INT4, BIAS_INT8, BLOCK, FOUR_BIT, TILE, QuantKV
from kernels.quantize.triton import check

LOG2_E = 1.4426950408889634
MAX_SPLITS, MAX_GROUP = 256, 64
# tokens of the tail that are attended at a time: few registers
_TAIL = tl.constexpr(16)
# numbers of the tile that joins splits
MERGE_TILE = 8192

# (bits, head dim) -> launch numbers. `programs`: what the splits aim at (as many warps as 132 SMs hold); `min_tokens`: fewest
# tokens of a split
CONFIGS = {
    (8, 64): {"block": 32, "num_warps": 1, "num_stages": 3, "programs": 2112, "min_tokens": 256},
    (8, 128): {"block": 32, "num_warps": 1, "num_stages": 3, "programs": 1452, "min_tokens": 256},
    (8, 256): {"block": 32, "num_warps": 2, "num_stages": 3, "programs": 1056, "min_tokens": 256},
    (4, 64): {"block": 32, "num_warps": 1, "num_stages": 3, "programs": 2112, "min_tokens": 256},
    (4, 128): {"block": 32, "num_warps": 1, "num_stages": 3, "programs": 1584, "min_tokens": 256},
    (4, 256): {"block": 32, "num_warps": 2, "num_stages": 3, "programs": 1056, "min_tokens": 256},
}
# candidates of `python -m kernels.bench --tune --op decode_attention_quant` for D 128; each replaces the pinned numbers that it
# names. int4 takes those with block 32.
TUNE = [
    {"block": block, "num_warps": warps, "num_stages": stages, "programs": programs, "min_tokens": 256}
    for block, warps, stages, programs in (
        (32, 1, 2, 1584),
        (32, 1, 3, 1056),
        (32, 1, 3, 1584),
        (32, 1, 3, 2112),
        (32, 1, 3, 3168),
        (32, 1, 4, 1056),
        (32, 1, 4, 1584),
        (32, 1, 5, 1056),
        (32, 2, 3, 1056),
        (64, 1, 3, 1056),
        (64, 2, 3, 1056),
        (64, 4, 3, 528),
        (128, 4, 3, 264),
        (128, 4, 3, 528),
    )
]

_BOOST = tl.constexpr(10.0)
_LN2 = tl.constexpr(0.6931471805599453)
_BIAS_INT8, _BIAS_INT4 = tl.constexpr(float(BIAS_INT8)), tl.constexpr(float(BIAS_INT4))


@triton.jit
def numbers8(codes, FP8: tl.constexpr, ASM: tl.constexpr):
    """8-bit codes as the fp16 numbers they stand for, steps left out."""
    if FP8:
        x = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        # the interpreter takes NaN for 480
        return x if ASM else tl.where((codes & 127) == 127, float("nan"), x)
    elif ASM:
        # 0x6400 | byte is 1024 + byte, and 0x6480 is 1024 + 128
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 magic, bias, t;
            mov.b32 magic, 0x64646464;
            mov.b32 bias, 0x64806480;
            prmt.b32 t, $2, magic, 0x5150;
            sub.rn.f16x2 $0, t, bias;
            prmt.b32 t, $2, magic, 0x5352;
            sub.rn.f16x2 $1, t, bias;
            }""",
            constraints="=&r,=&r,r", args=[codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(tl.float16) - _BIAS_INT8


@triton.jit
def finite(x, ASM: tl.constexpr):
    """fp16 numbers of fp8 codes with the largest in place of NaN, which a weight of 0 would not hide."""
    if ASM:
        # without a mask by length, which would send the codes through shared memory again; 0x5F00 is 448
        return tl.inline_asm_elementwise(
            asm="{.reg .b32 most; mov.b32 most, 0x5F005F00; min.f16x2 $0, $1, most;}",
            constraints="=r,r", args=[x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(x == x, x, 448.0)


@triton.jit
def numbers4(packed, step0, zero0, step1, zero1, ASM: tl.constexpr):
    """The low and the high nibbles of packed bytes as fp16 numbers zero + step * (64 + code)."""
    if ASM:
        # 0x5400 | nibble << 4 is 64 + nibble
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 magic, low, high, t;
            mov.b32 magic, 0x54545454;
            shl.b32 low, $4, 4;
            and.b32 low, low, 0xF0F0F0F0;
            and.b32 high, $4, 0xF0F0F0F0;
            prmt.b32 t, low, magic, 0x5140;
            fma.rn.f16x2 $0, t, $5, $7;
            prmt.b32 t, low, magic, 0x5342;
            fma.rn.f16x2 $1, t, $6, $8;
            prmt.b32 t, high, magic, 0x5140;
            fma.rn.f16x2 $2, t, $9, $11;
            prmt.b32 t, high, magic, 0x5342;
            fma.rn.f16x2 $3, t, $10, $12;
            }""",
            constraints="=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            args=[packed, step0, zero0, step1, zero1], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (packed & 15).to(tl.float32) + _BIAS_INT4
        high = (packed >> 4).to(tl.float32) + _BIAS_INT4
        low = low * step0.to(tl.float32) + zero0.to(tl.float32)
        high = high * step1.to(tl.float32) + zero1.to(tl.float32)
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def spread(x, TIMES: tl.constexpr):
    """[N, T] as [N * TIMES, T], each row repeated."""
    N: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], [N, TIMES, T]), [N * TIMES, T])


@triton.jit
def widen(x, TIMES: tl.constexpr):
    """[T, N] as [T, N * TIMES], each column repeated."""
    T: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], [T, N, TIMES]), [T, N * TIMES])


@triton.jit
def put_logits(p_logits, b_s, token, live, live_heads):
    """Base-2 scores b_s [N, ROWS] of tokens [N] as natural ones."""
    tl.store(p_logits + token[:, None], b_s * _LN2, mask=live[:, None] & live_heads[None, :])


@triton.jit
def finish(p_partial, p_lse, acc, peak, total, live, inside):
    """One half (or all) of a split's output, normalised; rows of the tile are channels."""
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[None, :]
    tl.store(p_partial, acc, mask=live[None, :] & inside)
    tl.store(p_lse, tl.where(nothing, float("-inf"), peak + tl.log2(tl.where(nothing, 1.0, total))), mask=live)


@triton.jit
def decode8_kernel(
    q, k, v, steps, head_index, k_tail, v_tail, lengths, logits, partial, partial_lse,
    scale, stride_qb, stride_qh, num_stored, num_slots, num_kv_heads,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SEALED: tl.constexpr,
    FP8: tl.constexpr, LOGITS: tl.constexpr, NUM_SPLITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """scale: on base-2 scores. steps: int32 words of K's and V's step. SEALED: tokens of a sealed block, the rest is in the
    tail; 0 without a tail."""
    i_s = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    head = tl.load(head_index + i_h).to(tl.int64)
    part = i_b * tl.num_programs(1) + i_h
    length = tl.load(lengths + i_b).to(tl.int32)
    MAIN: tl.constexpr = NUM_SPLITS - 1 if SEALED else NUM_SPLITS
    end = length // SEALED * SEALED if SEALED else length
    num_blocks = tl.cdiv(end, BLOCK)
    # the tail's split has no blocks of its own
    first = num_blocks * tl.minimum(i_s, MAIN) // MAIN
    last = num_blocks * tl.minimum(i_s + 1, MAIN) // MAIN
    o_r, o_d, o_n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    live_heads = o_r < G
    row = (i_b * num_kv_heads + head) * G + o_r
    p_q = q + i_b * stride_qb + (head * G + o_r)[None, :] * stride_qh + o_d[:, None]
    b_q = tl.load(p_q, mask=live_heads[None, :], other=0.0)  # [D, ROWS]
    b_qh = b_q.to(tl.float16)
    p_k = k + part * num_stored * D + o_n[:, None] * D + o_d[None, :]
    p_v = v + part * num_stored * D + (o_n // TILE * (D * TILE) + o_n % TILE)[None, :] + o_d[:, None] * TILE
    p_steps = steps + part * num_stored + o_n
    p_logits = logits + row[None, :] * num_slots
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([D, ROWS], tl.float32)
    for n in tl.range(first, last):
        live = n * BLOCK + o_n < end
        b_steps = tl.load(p_steps + n * BLOCK)
        b_k = numbers8(tl.load(p_k + n * (BLOCK * D)), FP8, ASM)  # [BLOCK, D]
        b_v = numbers8(tl.load(p_v + n * (BLOCK * D)), FP8, ASM)  # [D, BLOCK]
        if not SEALED:
            # steps of unused slots may be NaN, and so may codes if they are floats
            b_steps = tl.where(live, b_steps, 0)
            if FP8:
                b_v = finite(b_v, ASM)
        b_ks = (b_steps & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_vs = (b_steps >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_s = tl.dot(b_k, b_qh) * (b_ks * scale)[:, None]  # [BLOCK, ROWS]
        if LOGITS:
            put_logits(p_logits, b_s, n * BLOCK + o_n, live, live_heads)
        if not SEALED:
            b_s = tl.where(live[:, None], b_s, float("-inf"))
        # the bits of a float are a line through its logarithm
        b_log = b_vs.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608) - 127.0
        new_peak = tl.maximum(peak, tl.max(b_s + b_log[:, None], 0) - _BOOST)
        alpha = tl.exp2(peak - new_peak)
        b_p = tl.exp2(b_s - new_peak[None, :])
        total = total * alpha + tl.sum(b_p, 0)
        acc = tl.dot(b_v, (b_p * b_vs[:, None]).to(tl.float16), acc * alpha[None, :])
        peak = new_peak
    if SEALED:
        # the newest tokens, 16 bit
        o_n = tl.arange(0, _TAIL)
        p_k = k_tail + (i_b * num_kv_heads + head) * (SEALED * D) + o_n[:, None] * D + o_d[None, :]
        p_v = v_tail + (i_b * num_kv_heads + head) * (SEALED * D) + o_n[:, None] * D + o_d[None, :]
        for n in tl.range(end, tl.where(i_s == MAIN, length, end), _TAIL, num_stages=1):
            live = n + o_n < length
            b_k = tl.load(p_k + (n - end) * D, mask=live[:, None], other=0.0)
            b_v = tl.load(p_v + (n - end) * D, mask=live[:, None], other=0.0)
            b_s = tl.dot(b_k, b_q.to(b_k.dtype)) * scale
            if LOGITS:
                put_logits(p_logits, b_s, n + o_n, live, live_heads)
            b_s = tl.where(live[:, None], b_s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(b_s, 0))
            alpha = tl.exp2(peak - new_peak)
            b_p = tl.exp2(b_s - new_peak[None, :])
            total = total * alpha + tl.sum(b_p, 0)
            acc = tl.dot(tl.trans(b_v), b_p.to(b_v.dtype), acc * alpha[None, :])
            peak = new_peak
    at = row * NUM_SPLITS + i_s
    finish(partial + at[None, :] * D + o_d[:, None], partial_lse + at, acc, peak, total, live_heads, (o_d < D)[:, None])


@triton.jit
def decode4_kernel(
    q, k, v, k_params, v_params, head_index, k_tail, v_tail, lengths, logits, partial, partial_lse,
    scale, stride_qb, stride_qh, num_stored, num_slots, num_kv_heads,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SEALED: tl.constexpr,
    GROUP: tl.constexpr, LOGITS: tl.constexpr, NUM_SPLITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As decode8_kernel; BLOCK == TILE. Channels come in halves: 0 is the low nibble, 1 the high one. K's steps and zeros are
    those of a channel where blocks are sealed, of a token where there is no tail."""
    i_s = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    head = tl.load(head_index + i_h).to(tl.int64)
    part = i_b * tl.num_programs(1) + i_h
    length = tl.load(lengths + i_b).to(tl.int32)
    HALF: tl.constexpr = D // 2
    NUM: tl.constexpr = HALF // GROUP
    MAIN: tl.constexpr = NUM_SPLITS - 1 if SEALED else NUM_SPLITS
    end = length // SEALED * SEALED if SEALED else length
    num_blocks = tl.cdiv(end, BLOCK)
    # the tail's split has no blocks of its own
    first = num_blocks * tl.minimum(i_s, MAIN) // MAIN
    last = num_blocks * tl.minimum(i_s + 1, MAIN) // MAIN
    o_r, o_d, o_n, o_c = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, BLOCK), tl.arange(0, NUM)
    live_heads = o_r < G
    row = (i_b * num_kv_heads + head) * G + o_r
    p_q = q + i_b * stride_qb + (head * G + o_r)[None, :] * stride_qh + o_d[:, None]
    b_q0 = tl.load(p_q, mask=live_heads[None, :], other=0.0)  # [HALF, ROWS]
    b_q1 = tl.load(p_q + HALF, mask=live_heads[None, :], other=0.0)
    b_q0h, b_q1h = b_q0.to(tl.float16), b_q1.to(tl.float16)
    p_k = k + part * num_stored * HALF + o_n[:, None] * HALF + o_d[None, :]
    p_v = v + part * num_stored * HALF + o_d[:, None] * TILE + o_n[None, :]
    if SEALED:
        p_kp = k_params + part * (num_stored // GROUP * 2 * D) + o_d
    else:
        p_kp = k_params + part * (num_stored // TILE * 4 * NUM * TILE) + o_n[:, None] + o_c[None, :] * TILE
    p_vp = v_params + part * (num_stored // TILE * 4 * NUM * TILE) + o_c[:, None] * TILE + o_n[None, :]
    p_logits = logits + row[None, :] * num_slots
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0, acc1 = tl.zeros([HALF, ROWS], tl.float32), tl.zeros([HALF, ROWS], tl.float32)
    for n in tl.range(first, last):
        b_k = tl.load(p_k + n * (BLOCK * HALF))  # [BLOCK, HALF]
        b_v = tl.load(p_v + n * (BLOCK * HALF))  # [HALF, BLOCK]
        live = n * BLOCK + o_n < end
        if SEALED:
            p_kn = p_kp + n // (GROUP // BLOCK) * (2 * D)
            step0, step1 = tl.load(p_kn)[None, :], tl.load(p_kn + HALF)[None, :]
            zero0, zero1 = tl.load(p_kn + D)[None, :], tl.load(p_kn + D + HALF)[None, :]
        else:
            p_kn = p_kp + n * (4 * NUM * TILE)
            step0, step1 = widen(tl.load(p_kn), GROUP), widen(tl.load(p_kn + NUM * TILE), GROUP)
            zero0, zero1 = widen(tl.load(p_kn + 2 * NUM * TILE), GROUP), widen(tl.load(p_kn + 3 * NUM * TILE), GROUP)
        b_k0, b_k1 = numbers4(b_k, step0, zero0, step1, zero1, ASM)
        b_s = tl.dot(b_k1, b_q1h, tl.dot(b_k0, b_q0h)) * scale  # [BLOCK, ROWS]
        if LOGITS:
            put_logits(p_logits, b_s, n * BLOCK + o_n, live, live_heads)
        if not SEALED:
            b_s = tl.where(live[:, None], b_s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(b_s, 0) - _BOOST)
        alpha = tl.exp2(peak - new_peak)
        b_p = tl.exp2(b_s - new_peak[None, :])
        total = total * alpha + tl.sum(b_p, 0)
        peak = new_peak
        b_p = b_p.to(tl.float16)
        p_vn = p_vp + n * (4 * NUM * TILE)
        step0, step1 = tl.load(p_vn), tl.load(p_vn + NUM * TILE)
        zero0, zero1 = tl.load(p_vn + 2 * NUM * TILE), tl.load(p_vn + 3 * NUM * TILE)
        if not SEALED:
            # codes are always finite, steps and zeros of unused slots need not be
            step0, step1 = tl.where(live[None, :], step0, 0.0), tl.where(live[None, :], step1, 0.0)
            zero0, zero1 = tl.where(live[None, :], zero0, 0.0), tl.where(live[None, :], zero1, 0.0)
        b_v0, b_v1 = numbers4(b_v, spread(step0, GROUP), spread(zero0, GROUP), spread(step1, GROUP), spread(zero1, GROUP), ASM)
        acc0 = tl.dot(b_v0, b_p, acc0 * alpha[None, :])
        acc1 = tl.dot(b_v1, b_p, acc1 * alpha[None, :])
    if SEALED:
        # the newest tokens, 16 bit
        o_n = tl.arange(0, _TAIL)
        p_k = k_tail + (i_b * num_kv_heads + head) * (SEALED * D) + o_n[:, None] * D + o_d[None, :]
        p_v = v_tail + (i_b * num_kv_heads + head) * (SEALED * D) + o_n[:, None] * D + o_d[None, :]
        for n in tl.range(end, tl.where(i_s == MAIN, length, end), _TAIL, num_stages=1):
            live = n + o_n < length
            o_t = (n - end) * D
            b_k0 = tl.load(p_k + o_t, mask=live[:, None], other=0.0)
            b_k1 = tl.load(p_k + o_t + HALF, mask=live[:, None], other=0.0)
            b_v0 = tl.load(p_v + o_t, mask=live[:, None], other=0.0)
            b_v1 = tl.load(p_v + o_t + HALF, mask=live[:, None], other=0.0)
            b_s = tl.dot(b_k1, b_q1.to(b_k1.dtype), tl.dot(b_k0, b_q0.to(b_k0.dtype))) * scale
            if LOGITS:
                put_logits(p_logits, b_s, n + o_n, live, live_heads)
            b_s = tl.where(live[:, None], b_s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(b_s, 0))
            alpha = tl.exp2(peak - new_peak)
            b_p = tl.exp2(b_s - new_peak[None, :])
            total = total * alpha + tl.sum(b_p, 0)
            b_p = b_p.to(b_v0.dtype)
            acc0 = tl.dot(tl.trans(b_v0), b_p, acc0 * alpha[None, :])
            acc1 = tl.dot(tl.trans(b_v1), b_p, acc1 * alpha[None, :])
            peak = new_peak
    at = row * NUM_SPLITS + i_s
    p_partial = partial + at[None, :] * D + o_d[:, None]
    inside = (o_d < HALF)[:, None]
    finish(p_partial, partial_lse + at, acc0, peak, total, live_heads, inside)
    finish(p_partial + HALF, partial_lse + at, acc1, peak, total, live_heads, inside)


def rows_for(group: int) -> int:
    """Columns that hold the query heads of one KV head."""
    return max(8, triton.next_power_of_2(group))


def config_for(kind: str, head_dim: int, group: int, num_stored: int, config: dict | None) -> dict:
    """Pinned launch numbers with those of `config` in their place; wide groups of heads need more registers, so more warps."""
    pinned = CONFIGS[4 if kind in FOUR_BIT else 8, head_dim]
    config = pinned | {"num_warps": min(8, pinned["num_warps"] * rows_for(group) // 8)} | (config or {})
    if config["block"] % TILE or num_stored % config["block"] or (kind in FOUR_BIT and config["block"] != TILE):
        raise ValueError(
            f"decode_attention_quant: block={config['block']} does not suit {kind} and {num_stored} slots; {TILE} does"
        )
    return config


def splits_for(kv: QuantKV, config: dict) -> int:
    """Splits of every KV head, the tail's included; from the geometry alone."""
    num_pairs = kv.batch_size * kv.num_kv_heads
    most = min(MAX_SPLITS - 1, triton.cdiv(kv.num_stored, config["min_tokens"]))
    return max(1, min(config["programs"] // num_pairs, most)) + (kv.k_tail is not None)


def constexprs_for(kind: str, group: int, head_dim: int, config: dict) -> dict:
    """What a kernel needs beside the number of splits."""
    own = {"GROUP": group} if kind in FOUR_BIT else {"FP8": kind == "fp8"}
    return own | {
        "D": head_dim, "BLOCK": config["block"], "TILE": TILE,
        "num_warps": config["num_warps"], "num_stages": config["num_stages"],
    }  # fmt: skip


def decode_attention_quant(
    q: Tensor, kv: QuantKV, lengths: Tensor, scale: float, logits: Tensor | None, config: dict | None
) -> tuple[Tensor, Tensor]:
    """See api.py; `asm` in config chooses between inline assembly (the default on a GPU) and plain arithmetic."""
    check("decode_attention_quant", kv)
    if q.dtype not in (torch.float16, torch.bfloat16) or q.stride(2) != 1:
        raise ValueError(f"decode_attention_quant: impl=triton wants fp16 or bf16 q, contiguous along D, not {q.dtype}")
    if logits is not None and not (logits.dtype == torch.float32 and logits.is_contiguous()):
        raise ValueError("decode_attention_quant: impl=triton wants contiguous fp32 logits")
    batch, num_heads, head_dim = q.shape
    group = num_heads // kv.num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(f"decode_attention_quant: impl=triton has {MAX_GROUP} query heads per KV head at most, not {group}")
    configs = [config_for(part.kind, head_dim, group, kv.num_stored, config) for part in kv.parts]
    num_splits = min(splits_for(kv, c) for c in configs)
    out = empty(q.shape, dtype=q.dtype, device=q.device)
    lse = empty(batch, num_heads, dtype=torch.float32, device=q.device)
    partial = empty(batch, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = empty(batch, num_heads, num_splits, dtype=torch.float32, device=q.device)
    tails = (q, q) if kv.k_tail is None else (kv.k_tail, kv.v_tail)
    for part, chosen in zip(kv.parts, configs, strict=True):
        if part.kind in FOUR_BIT:
            kernel, params = decode4_kernel, (part.k_params, part.v_params)
        else:
            kernel, params = decode8_kernel, (part.k_params.view(torch.int32),)
        kernel[(num_splits, len(part.heads), batch)](
            q, part.k, part.v, *params, part.head_index, *tails, lengths,
            lse if logits is None else logits, partial, partial_lse,
            scale * LOG2_E, *q.stride()[:2], kv.num_stored, kv.num_slots, kv.num_kv_heads,
            G=group, ROWS=rows_for(group), SEALED=0 if kv.k_tail is None else BLOCK,
            LOGITS=logits is not None, NUM_SPLITS=num_splits, ASM=chosen.get("asm", not triton.knobs.runtime.interpret),
            **constexprs_for(part.kind, kv.format.group, head_dim, chosen),
        )  # fmt: skip
    splits = triton.next_power_of_2(num_splits)
    merge_kernel[(batch * num_heads,)](
        partial, partial_lse, out, lse,
        D=head_dim, BD=head_dim, NUM_SPLITS=num_splits, SPLITS=splits, TILE=max(1, min(splits, MERGE_TILE // head_dim)),
    )  # fmt: skip
    return out, lse


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    pointers = {"lengths": "*i64", "head_index": "*i32", "steps": "*i32", "scale": "fp32"}
    pointers |= dict.fromkeys(("logits", "partial", "partial_lse"), "*fp32")
    pointers |= dict.fromkeys(("k", "v"), "*u8") | dict.fromkeys(("k_params", "v_params"), "*fp16")
    pointers |= dict.fromkeys(("q", "k_tail", "v_tail"), "*bf16")
    cases = []
    for kind, head_dim, group, heads, sealed, logits in [
        *((kind, d, 32, g, 0, False) for kind in ("fp8", "int8") for d in (64, 128, 256) for g in (1, 8)),
        ("int8", 128, 32, 4, 0, True), ("int8", 128, 32, 16, 0, False), ("int8", 128, 32, 4, BLOCK, False),
        *(("int4", d, 32, g, BLOCK, False) for d in (64, 128, 256) for g in (1, 8)),
        *(("int4_token", d, 32, g, 0, False) for d in (64, 128, 256) for g in (1, 8)),
        ("int4_token", 128, 32, 4, 0, True), ("int4_token", 128, 64, 4, 0, False), ("int4_token", 128, 32, 16, 0, False),
        ("int4", 128, 32, 4, BLOCK, True), ("int4", 128, 64, 4, BLOCK, False), ("int4", 128, 32, 16, BLOCK, False),
    ]:  # fmt: skip
        constexprs = constexprs_for(kind, group, head_dim, config_for(kind, head_dim, heads, 32768, None))
        launch = {name: constexprs.pop(name) for name in ("num_warps", "num_stages")}
        constexprs |= {
            "G": heads, "ROWS": rows_for(heads), "SEALED": sealed, "LOGITS": logits, "NUM_SPLITS": 24, "ASM": True,
        }  # fmt: skip
        kernel = decode4_kernel if kind in FOUR_BIT else decode8_kernel
        names = [arg.name for arg in kernel.params if not arg.is_constexpr]
        expect = {"fp8": "cvt.rn.f16x2.e4m3x2", "int8": "sub.rn.f16x2", "int4": "fma.rn.f16x2"}[kind.removesuffix("_token")]
        cases.append(
            {
                "name": f"decode-{kind}-D{head_dim}-G{heads}-group{group}-tail{sealed}{'-logits' * logits}", "fn": kernel,
                "signature": {n: pointers.get(n, "i32") for n in names}, "constexprs": constexprs, **launch,
                "expect": ["cp.async.cg.shared.global", "mma.sync", expect],
            }
        )  # fmt: skip
    return cases
