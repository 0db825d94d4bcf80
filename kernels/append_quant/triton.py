"""Triton: one program per sequence and KV head, or per 32 tokens (one int4 group) of the block that may be sealed; those return
at once while the tail has room."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.quantize.api import BLOCK, TILE, QuantKV
from kernels.quantize.triton import check, put4, put8, put_token4, warps_for


@triton.jit
def overwrite_kernel(
    x_k, x_v, k, v, k_params, v_params, slots, num_stored, stride_kb, stride_kh, stride_vb, stride_vh, stride_sb, stride_sh,
    D: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Formats without a tail."""
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    x_k, x_v = x_k + i_b * stride_kb + i_h * stride_kh, x_v + i_b * stride_vb + i_h * stride_vh
    slot = tl.load(slots + i_b * stride_sb + i_h * stride_sh) + tl.arange(0, 1)
    first = (i_b * tl.num_programs(1) + i_h) * num_stored
    if KIND == "int4_token":
        HALF: tl.constexpr = D // 2
        o_h = tl.arange(0, HALF)[None, :]
        params = first * (2 * (D // GROUP))
        put_token4(
            tl.load(x_k + o_h).to(tl.float32), tl.load(x_k + HALF + o_h).to(tl.float32),
            tl.load(x_v + o_h).to(tl.float32), tl.load(x_v + HALF + o_h).to(tl.float32),
            slot, slot >= 0, k + first * HALF, v + first * HALF, k_params + params, v_params + params, D, GROUP, TILE,
        )  # fmt: skip
    else:
        o_d = tl.arange(0, D)[None, :]
        b_k, b_v = tl.load(x_k + o_d).to(tl.float32), tl.load(x_v + o_d).to(tl.float32)
        put8(b_k, b_v, slot, slot >= 0, k + first * D, v + first * D, k_params + first * 2, D, TILE, KIND == "fp8")


@triton.jit
def tail_row(x, p_new, o_n, last, dtype: tl.constexpr):
    """Rows x of the tail, the last one replaced by the new token, which another thread may not have stored yet."""
    new = tl.load(p_new).to(dtype)
    return tl.where((o_n == last)[:, None], new[None, :], x).to(tl.float32)


@triton.jit
def seal_kernel(
    x_k, x_v, k, v, k_params, v_params, head_index, k_tail, v_tail, slots, num_stored, num_kv_heads,
    stride_kb, stride_kh, stride_vb, stride_vh,
    D: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program 2 owns ROWS tokens of the block; the one with the last tokens also writes the row of the tail."""
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    i_n = tl.program_id(2)
    head = tl.load(head_index + i_h).to(tl.int64)
    slot = tl.load(slots + i_b)
    row = (slot % BLOCK).to(tl.int32)
    x_k, x_v = x_k + i_b * stride_kb + head * stride_kh, x_v + i_b * stride_vb + head * stride_vh
    tail = (i_b * num_kv_heads + head) * (BLOCK * D)
    dtype: tl.constexpr = k_tail.dtype.element_ty
    if i_n == BLOCK // ROWS - 1:
        o_d = tl.arange(0, D)
        tl.store(k_tail + tail + row * D + o_d, tl.load(x_k + o_d).to(dtype))
        tl.store(v_tail + tail + row * D + o_d, tl.load(x_v + o_d).to(dtype))
    if row == BLOCK - 1:
        part = i_b * tl.num_programs(1) + i_h
        o_n = i_n * ROWS + tl.arange(0, ROWS)
        first = (slot + 1 - BLOCK).to(tl.int32) + i_n * ROWS
        if KIND == "int4":
            HALF: tl.constexpr = D // 2
            o_h = tl.arange(0, HALF)
            o_t = tail + o_n[:, None] * D + o_h[None, :]
            put4(
                tail_row(tl.load(k_tail + o_t), x_k + o_h, o_n, BLOCK - 1, dtype),
                tail_row(tl.load(k_tail + o_t + HALF), x_k + HALF + o_h, o_n, BLOCK - 1, dtype),
                tail_row(tl.load(v_tail + o_t), x_v + o_h, o_n, BLOCK - 1, dtype),
                tail_row(tl.load(v_tail + o_t + HALF), x_v + HALF + o_h, o_n, BLOCK - 1, dtype),
                first, k + part * num_stored * HALF, v + part * num_stored * HALF,
                k_params + part * (num_stored // GROUP * 2 * D), v_params + part * (num_stored * 2 * (D // GROUP)),
                D, GROUP, TILE,
            )  # fmt: skip
        else:
            o_d = tl.arange(0, D)
            o_t = tail + o_n[:, None] * D + o_d[None, :]
            b_k = tail_row(tl.load(k_tail + o_t), x_k + o_d, o_n, BLOCK - 1, dtype)
            b_v = tail_row(tl.load(v_tail + o_t), x_v + o_d, o_n, BLOCK - 1, dtype)
            at = part * num_stored
            put8(
                b_k,
                b_v,
                first + tl.arange(0, ROWS),
                o_n >= 0,
                k + at * D,
                v + at * D,
                k_params + at * 2,
                D,
                TILE,
                KIND == "fp8",
            )


def append_quant(kv: QuantKV, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """See api.py."""
    check("append_quant", kv)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    strides = *k.stride()[:2], *v.stride()[:2]
    batch = kv.batch_size
    if kv.format.overwrites:
        part = kv.parts[0]
        slot_strides = slot.stride(0), slot.stride(1) if slot.dim() > 1 else 0
        overwrite_kernel[(batch, kv.num_kv_heads)](
            k, v, part.k, part.v, part.k_params, part.k_params if part.v_params is None else part.v_params, slot,
            kv.num_stored, *strides, *slot_strides,
            D=kv.head_dim, KIND=part.kind, GROUP=kv.format.group, TILE=TILE, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        return
    for part in kv.parts:
        rows = kv.format.group if part.kind == "int4" else TILE
        seal_kernel[(batch, len(part.heads), BLOCK // rows)](
            k, v, part.k, part.v, part.k_params, part.k_params if part.v_params is None else part.v_params, part.head_index,
            kv.k_tail, kv.v_tail, slot.contiguous(), kv.num_stored, kv.num_kv_heads, *strides,
            D=kv.head_dim, KIND=part.kind, GROUP=kv.format.group, ROWS=rows, TILE=TILE, BLOCK=BLOCK,
            num_warps=warps_for(rows, kv.head_dim), enable_fp_fusion=False,
        )  # fmt: skip


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    pointers = {"slots": "*i64", "head_index": "*i32"}
    pointers |= dict.fromkeys(("k", "v"), "*u8") | dict.fromkeys(("k_params", "v_params"), "*fp16")
    pointers |= dict.fromkeys(("x_k", "x_v", "k_tail", "v_tail"), "*bf16")
    cases = []
    for kind, head_dim, sealed in [
        *((kind, d, False) for kind in ("fp8", "int8", "int4_token") for d in (64, 128, 256)),
        *((kind, d, True) for kind in ("int8", "int4") for d in (64, 128, 256)),
    ]:  # fmt: skip
        kernel = seal_kernel if sealed else overwrite_kernel
        own = {"KIND": kind, "GROUP": TILE} | ({"ROWS": TILE, "BLOCK": BLOCK} if sealed else {})
        names = [arg.name for arg in kernel.params if not arg.is_constexpr]
        cases.append(
            {
                "name": f"append-{kind}-D{head_dim}{'-seal' * sealed}", "fn": kernel,
                "signature": {n: pointers.get(n, "i32") for n in names}, "constexprs": {"D": head_dim, "TILE": TILE} | own,
                "num_warps": warps_for(TILE, head_dim) if sealed else 1, "num_stages": 3, "expect": ["st.global"],
            }
        )  # fmt: skip
    return cases
