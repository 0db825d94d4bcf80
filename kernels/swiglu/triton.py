"""One program per row and block of columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def swiglu_kernel(GATE_UP, OUT, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < size
    b_gate = tl.load(GATE_UP + row * 2 * size + o_i, mask=m_i, other=0.0)
    b_up = tl.load(GATE_UP + row * 2 * size + size + o_i, mask=m_i, other=0.0)
    b_wide = b_gate.to(tl.float32)
    b_act = (b_wide / (1.0 + tl.exp(-b_wide))).to(b_gate.dtype)
    tl.store(OUT + row * size + o_i, (b_act.to(tl.float32) * b_up.to(tl.float32)).to(b_gate.dtype), mask=m_i)


def swiglu(gate_up: Tensor) -> Tensor:
    """See api.py."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    swiglu_kernel[(rows, triton.cdiv(size, BLOCK))](gate_up, out, size, BLOCK=BLOCK, num_warps=4)
    return out
