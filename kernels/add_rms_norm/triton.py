"""One program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_rms_norm_kernel(X, RESIDUAL, WEIGHT, NORMED, TOTAL, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < size
    b_x = tl.load(X + row + o_h, mask=m_h, other=0.0)
    dtype = b_x.dtype
    if ADD:
        b_residual = tl.load(RESIDUAL + row + o_h, mask=m_h, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(dtype)
        tl.store(TOTAL + row + o_h, b_x, mask=m_h)
    b_wide = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_wide * b_wide, 0) / size + eps)
    # transformers rounds before it multiplies by the weight
    b_normed = (b_wide * scale).to(dtype).to(tl.float32)
    b_weight = tl.load(WEIGHT + o_h, mask=m_h, other=0.0).to(tl.float32)
    tl.store(NORMED + row + o_h, (b_normed * b_weight).to(dtype), mask=m_h)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See api.py."""
    rows, size = x.shape
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, normed, total, size, eps,
        ADD=residual is not None, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return normed, total
