"""8-bit rows: one scale and one zero per token and head, as fp16; x is about zero + scale * code."""

import torch
from torch import Tensor

LEVELS = 255
PARAM_DTYPE = torch.float16
# one part and one unit of fp16, so that rounding can only widen a row's range and no value is cut off
ROUND, UNIT = 2**-10, 2**-24


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Asymmetric 8-bit codes of each row.

    Args:
        x: [..., D] floating point, |x| < 65000.
    Returns:
        codes [..., D] uint8 and params [..., 2] fp16 (step, zero). The error is at most half a step, and the step at most
        ((max - min) + |min| 2^-9) / 255 (1 + 2^-9) + 2^-23. NaN in a row makes the whole row NaN.
    """
    compute = x.float()
    low, high = compute.amin(-1, keepdim=True), compute.amax(-1, keepdim=True)
    zero = (low - low.abs() * ROUND - UNIT).to(PARAM_DTYPE)
    step = ((high - zero.float()) / LEVELS * (1 + ROUND) + UNIT).to(PARAM_DTYPE)
    codes = ((compute - zero.float()) / step.float()).round().clamp(0, LEVELS).to(torch.uint8)
    return codes, torch.cat([step, zero], dim=-1)


def dequantize_rows(codes: Tensor, params: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of quantize_rows: [..., D] in `dtype`."""
    step, zero = params[..., :1].float(), params[..., 1:].float()
    return (codes.float() * step + zero).to(dtype)
