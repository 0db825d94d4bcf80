"""Triton: one program copies `block` listed rows of one sequence and head, as integers, so that no bit can change."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# row bytes up to -> launch numbers: about 16 KiB a program
CONFIGS = {
    128: {"block": 128, "num_warps": 4},
    256: {"block": 64, "num_warps": 4},
    512: {"block": 32, "num_warps": 4},
    1 << 30: {"block": 16, "num_warps": 4},
}
# candidates of `python -m kernels.bench --tune --op compact`
TUNE = [
    {"block": block, "num_warps": warps}
    for block, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8))
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def compact_kernel(
    rows, index, out, stride_rb, stride_rh, stride_rt, stride_ib, stride_ih, stride_in, stride_ob, stride_oh, stride_on,
    num_rows, num_kept, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_at = tl.load(index + i_b * stride_ib + i_h * stride_ih + o_n * stride_in, mask=o_n < num_kept, other=-1).to(tl.int64)
    inside_d = (o_d < D)[None, :]
    p_rows = rows + i_b * stride_rb + i_h * stride_rh + b_at[:, None] * stride_rt + o_d[None, :]
    # each row is read once
    b_rows = tl.load(p_rows, mask=((b_at >= 0) & (b_at < num_rows))[:, None] & inside_d, other=0, eviction_policy="evict_first")
    p_out = out + i_b * stride_ob + i_h * stride_oh + o_n[:, None] * stride_on + o_d[None, :]
    tl.store(p_out, b_rows, mask=(o_n < num_kept)[:, None] & inside_d)


def config_for(row_bytes: int) -> dict:
    return CONFIGS[next(size for size in CONFIGS if row_bytes <= size)]


def compact(rows: Tensor, index: Tensor, out: Tensor, config: dict | None = None) -> Tensor:
    """See api.py."""
    if rows.stride(3) != 1 or out.stride(3) != 1:
        raise ValueError("compact: impl=triton wants rows and out contiguous along D")
    if rows.dtype.itemsize not in INTEGERS:
        raise ValueError(f"compact: impl=triton has no dtype {rows.dtype} (set impl=reference)")
    batch, num_heads, num_rows, dim = rows.shape
    config = config_for(dim * rows.dtype.itemsize) | (config or {})
    num_kept = index.shape[-1]
    index_strides = [0, 0, index.stride(0)] if index.dim() == 1 else [*index.stride()]
    if index.dim() == 3 and index.shape[1] == 1:
        index_strides[1] = 0
    as_integers = INTEGERS[rows.dtype.itemsize]
    if num_kept:
        compact_kernel[(triton.cdiv(num_kept, config["block"]), num_heads, batch)](
            rows.view(as_integers), index, out.view(as_integers), *rows.stride()[:3], *index_strides, *out.stride()[:3],
            num_rows, num_kept, D=dim, BD=triton.next_power_of_2(dim), BLOCK=config["block"], num_warps=config["num_warps"],
        )  # fmt: skip
    return out


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    names = [arg.name for arg in compact_kernel.params if not arg.is_constexpr]
    cases = []
    for dtype, size, dim in (("i16", 2, 64), ("i16", 2, 128), ("i16", 2, 256), ("u8", 1, 128), ("i32", 4, 128), ("i16", 2, 96)):
        config = config_for(dim * size)
        cases.append(
            {
                "name": f"compact-{dtype}-D{dim}", "fn": compact_kernel,
                "signature": {n: f"*{dtype}" if n in ("rows", "out") else "*i32" if n == "index" else "i32" for n in names},
                "constexprs": {"D": dim, "BD": triton.next_power_of_2(dim), "BLOCK": config["block"]},
                "num_warps": config["num_warps"], "num_stages": 3, "divisible": [n for n in names if not n.startswith("num_")],
                "expect": ["v4.b32|v4.u32", "st.global"],
            }
        )  # fmt: skip
    return cases
