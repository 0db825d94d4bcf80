"""Triton: quantises rows and writes them, K as rows and V transposed in tiles. append_quant shares the tile functions.

Launched without fusing of multiply and add, so that the bits are those of the reference.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.quantize.api import BIAS_INT4, BIAS_INT8, MAX_FP8, MAX_INT4, MAX_INT8, ROUND, TILE, UNIT, QuantKV

_ROUND, _UNIT = tl.constexpr(ROUND), tl.constexpr(UNIT)
_BIAS_INT4, _BIAS_INT8 = tl.constexpr(float(BIAS_INT4)), tl.constexpr(float(BIAS_INT8))
_MAX_INT4, _MAX_INT8, _MAX_FP8 = (
    tl.constexpr(float(MAX_INT4)),
    tl.constexpr(float(MAX_INT8)),
    tl.constexpr(float(MAX_FP8)),
)


@triton.jit
def nearest(x):
    """Nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x):
    """fp32 with |x| <= 448 as the bits of the nearest e4m3 number, ties to even (the interpreter's own cast is wrong)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 255) - 127, -6)
    # 2^(3 - exponent), so that the mantissa becomes 8 .. 16, or 0 .. 7 if subnormal
    shift = ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    mantissa = nearest(tl.abs(x) * shift).to(tl.int32)
    sign = (bits >> 24) & 128
    return (sign | (((exponent + 6) << 3) + mantissa)).to(tl.uint8)


@triton.jit
def encode8(x, FP8: tl.constexpr):
    """x [N, D] fp32 as codes [N, D] and step [N]."""
    LARGEST: tl.constexpr = _MAX_FP8 if FP8 else _MAX_INT8
    WIDEN: tl.constexpr = (1 + _ROUND) / LARGEST
    step = tl.max(tl.abs(x), 1) * WIDEN + _UNIT
    # a maximum passes NaN over
    step = (step + tl.sum(x * 0.0, 1)).to(tl.float16)
    scaled = x * tl.div_rn(1.0, step.to(tl.float32))[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if FP8:
        codes = to_e4m3(scaled)
    else:
        codes = (nearest(scaled) + _BIAS_INT8).to(tl.int32).to(tl.uint8)
    return codes, step


@triton.jit
def params4(low, high, poison):
    """Step and zero of int4 groups; poison is NaN where a group holds NaN, else 0."""
    WIDEN: tl.constexpr = (1 + _ROUND) / _MAX_INT4
    step = ((high - low) * WIDEN + _UNIT + poison).to(tl.float16)
    zero = (low - _BIAS_INT4 * step.to(tl.float32)).to(tl.float16)
    return step, zero


@triton.jit
def codes4(x, step, zero):
    """Codes 0 .. 15 (int32) of x; step and zero broadcast against it."""
    base = zero.to(tl.float32) + _BIAS_INT4 * step.to(tl.float32)
    scaled = (x - base) * tl.div_rn(1.0, step.to(tl.float32))
    return nearest(tl.minimum(tl.maximum(scaled, 0.0), _MAX_INT4)).to(tl.int32)


@triton.jit
def put_keys8(b_k, slot, live, k, params, D: tl.constexpr, FP8: tl.constexpr):
    """Keys b_k [N, D] fp32 into slots [N] of the head that the pointers name."""
    codes, step = encode8(b_k, FP8)
    tl.store(k + slot[:, None] * D + tl.arange(0, D)[None, :], codes, mask=live[:, None])
    tl.store(params + slot * 2, step, mask=live)


@triton.jit
def put8(b_k, b_v, slot, live, k, v, params, D: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr):
    """Rows b_k, b_v [N, D] fp32 into slots [N] of the head that the pointers name."""
    put_keys8(b_k, slot, live, k, params, D, FP8)
    o_d = tl.arange(0, D)
    codes, step = encode8(b_v, FP8)
    p_v = v + (slot // TILE * (D * TILE) + slot % TILE)[:, None] + o_d[None, :] * TILE
    tl.store(p_v, codes, mask=live[:, None])
    tl.store(params + slot * 2 + 1, step, mask=live)


@triton.jit
def put4(b_k0, b_k1, b_v0, b_v1, first, k, v, k_params, v_params, D: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """GROUP tokens from slot `first` of the head that the pointers name; halves of the head dim [GROUP, D / 2] fp32."""
    HALF: tl.constexpr = D // 2
    NUM: tl.constexpr = HALF // GROUP
    o_n, o_h, o_c = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, NUM)
    step0, zero0 = params4(tl.min(b_k0, 0), tl.max(b_k0, 0), tl.sum(b_k0 * 0.0, 0))
    step1, zero1 = params4(tl.min(b_k1, 0), tl.max(b_k1, 0), tl.sum(b_k1 * 0.0, 0))
    packed = codes4(b_k0, step0[None, :], zero0[None, :]) | codes4(b_k1, step1[None, :], zero1[None, :]) << 4
    tl.store(k + (first + o_n)[:, None] * HALF + o_h[None, :], packed.to(tl.uint8))
    p_k = k_params + first // GROUP * (2 * D) + o_h
    tl.store(p_k, step0)
    tl.store(p_k + HALF, step1)
    tl.store(p_k + D, zero0)
    tl.store(p_k + D + HALF, zero1)

    b_v0, b_v1 = tl.reshape(b_v0, [GROUP, NUM, GROUP]), tl.reshape(b_v1, [GROUP, NUM, GROUP])
    step0, zero0 = params4(tl.min(b_v0, 2), tl.max(b_v0, 2), tl.sum(b_v0 * 0.0, 2))
    step1, zero1 = params4(tl.min(b_v1, 2), tl.max(b_v1, 2), tl.sum(b_v1 * 0.0, 2))
    packed = codes4(b_v0, step0[:, :, None], zero0[:, :, None]) | codes4(b_v1, step1[:, :, None], zero1[:, :, None]) << 4
    packed = tl.reshape(packed, [GROUP, HALF])
    slot = tl.multiple_of(first, GROUP) + o_n
    tl.store(v + (slot // TILE * (HALF * TILE) + slot % TILE)[:, None] + o_h[None, :] * TILE, packed.to(tl.uint8))
    p_v = v_params + (slot // TILE * (4 * NUM * TILE) + slot % TILE)[:, None] + o_c[None, :] * TILE
    tl.store(p_v, step0)
    tl.store(p_v + NUM * TILE, step1)
    tl.store(p_v + 2 * NUM * TILE, zero0)
    tl.store(p_v + 3 * NUM * TILE, zero1)


@triton.jit
def quantize_kernel(
    x_k, x_v, k, v, k_params, v_params, head_index, start, num_tokens,
    stride_kh, stride_kn, stride_vh, stride_vn, stride_codes, stride_k_params, stride_v_params,
    D: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One sequence; one program per ROWS tokens and head. stride_codes and the others: numbers per head of the part."""
    i_n = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    head = tl.load(head_index + i_h).to(tl.int64)
    k, v = k + i_h * stride_codes, v + i_h * stride_codes
    k_params = k_params + i_h * stride_k_params
    o_n = i_n * ROWS + tl.arange(0, ROWS)
    token = o_n.to(tl.int64)[:, None]
    live = o_n < num_tokens
    if KIND == "int4":
        v_params = v_params + i_h * stride_v_params
        o_h = tl.arange(0, D // 2)[None, :]
        p_k, p_v = x_k + head * stride_kh + token * stride_kn + o_h, x_v + head * stride_vh + token * stride_vn + o_h
        put4(
            tl.load(p_k).to(tl.float32), tl.load(p_k + D // 2).to(tl.float32),
            tl.load(p_v).to(tl.float32), tl.load(p_v + D // 2).to(tl.float32),
            start + i_n * ROWS, k, v, k_params, v_params, D, GROUP, TILE,
        )  # fmt: skip
    else:
        o_d = tl.arange(0, D)[None, :]
        b_k = tl.load(x_k + head * stride_kh + token * stride_kn + o_d, mask=live[:, None], other=0.0).to(tl.float32)
        b_v = tl.load(x_v + head * stride_vh + token * stride_vn + o_d, mask=live[:, None], other=0.0).to(tl.float32)
        put8(b_k, b_v, start + o_n, live, k, v, k_params, D, TILE, KIND == "fp8")


@triton.jit
def keys_kernel(
    x_k, k, steps, start, num_tokens, num_stored, stride_kb, stride_kh, stride_kn,
    D: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program per ROWS keys, KV head and sequence."""
    i_n = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    first = (i_b * tl.num_programs(1) + i_h) * num_stored
    o_n = i_n * ROWS + tl.arange(0, ROWS)
    live = o_n < num_tokens
    p_k = x_k + i_b * stride_kb + i_h * stride_kh + o_n[:, None] * stride_kn + tl.arange(0, D)[None, :]
    b_k = tl.load(p_k, mask=live[:, None], other=0.0).to(tl.float32)
    put_keys8(b_k, start + o_n, live, k + first * D, steps + first * 2, D, KIND == "fp8")


def warps_for(num_rows: int, head_dim: int) -> int:
    """Warps of a program that quantises such a tile of K and of V."""
    return min(8, max(4, num_rows * head_dim // 1024))


def check(op: str, kv: QuantKV) -> None:
    """ValueError where the kernels cannot work on a cache that the reference can."""
    if kv.head_dim not in (64, 128, 256):
        raise ValueError(f"{op}: impl=triton has head dims 64, 128 and 256, not {kv.head_dim} (set impl=reference)")
    if any(part.kind == "int4" for part in kv.parts):
        group = kv.format.group
        if group not in (32, 64) or (kv.head_dim // 2) % group:
            raise ValueError(
                f"{op}: impl=triton wants int4 groups of 32 or 64 that divide half the head dim, not {group} of {kv.head_dim} "
                "(set impl=reference)"
            )
    if kv.k_tail is not None and kv.k_tail.dtype.itemsize != 2:
        raise ValueError(f"{op}: impl=triton wants a 16-bit tail, not {kv.k_tail.dtype} (set impl=reference)")


def quantize(kv: QuantKV, seq: int, start: int, k: Tensor, v: Tensor) -> None:
    """See api.py; k, v [Hkv, N, D], whole blocks if the format has a tail."""
    check("quantize", kv)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    for part in kv.parts:
        rows = kv.format.group if part.kind == "int4" else TILE
        v_params = part.k_params if part.v_params is None else part.v_params
        quantize_kernel[(triton.cdiv(k.shape[1], rows), len(part.heads))](
            k, v, part.k[seq], part.v[seq], part.k_params[seq], v_params[seq], part.head_index, start, k.shape[1],
            *k.stride()[:2], *v.stride()[:2], part.k.stride(1), part.k_params.stride(1), v_params.stride(1),
            D=kv.head_dim, KIND=part.kind, GROUP=kv.format.group, ROWS=rows, TILE=TILE,
            num_warps=warps_for(rows, kv.head_dim), enable_fp_fusion=False,
        )  # fmt: skip


def overwrite_keys(kv: QuantKV, start: int, k: Tensor) -> None:
    """See api.py."""
    check("overwrite_keys", kv)
    part, num = kv.parts[0], k.shape[2]
    k = k if k.stride(3) == 1 else k.contiguous()
    rows = min(TILE, triton.next_power_of_2(max(1, num)))
    keys_kernel[(triton.cdiv(num, rows), kv.num_kv_heads, kv.batch_size)](
        k, part.k, part.k_params, start, num, kv.num_stored, *k.stride()[:3],
        D=kv.head_dim, KIND=part.kind, ROWS=rows, num_warps=warps_for(rows, kv.head_dim), enable_fp_fusion=False,
    )  # fmt: skip


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    pointers = {"head_index": "*i32"} | dict.fromkeys(("k", "v"), "*u8")
    pointers |= dict.fromkeys(("k_params", "v_params", "steps"), "*fp16")
    pointers |= dict.fromkeys(("x_k", "x_v"), "*bf16")
    names = [arg.name for arg in quantize_kernel.params if not arg.is_constexpr]
    key_names = [arg.name for arg in keys_kernel.params if not arg.is_constexpr]
    sinks = [
        {
            "name": f"keys-{kind}-D{head_dim}", "fn": keys_kernel, "signature": {n: pointers.get(n, "i32") for n in key_names},
            "constexprs": {"D": head_dim, "KIND": kind, "ROWS": 4},
            "num_warps": warps_for(4, head_dim), "num_stages": 3, "expect": ["st.global"],
        }
        for kind in ("fp8", "int8") for head_dim in (64, 128, 256)
    ]  # fmt: skip
    return sinks + [
        {
            "name": f"quantize-{kind}-D{head_dim}-group{group}", "fn": quantize_kernel,
            "signature": {n: pointers.get(n, "i32") for n in names},
            "constexprs": {"D": head_dim, "KIND": kind, "GROUP": group, "ROWS": group, "TILE": TILE},
            "num_warps": warps_for(group, head_dim), "num_stages": 3, "expect": ["st.global"],
        }
        for kind, head_dim, group in [
            *((kind, d, 32) for kind in ("fp8", "int8", "int4") for d in (64, 128, 256)), ("int4", 128, 64), ("int4", 256, 64),
        ]
    ]  # fmt: skip
