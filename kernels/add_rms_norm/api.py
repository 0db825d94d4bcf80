"""Residual add and RMSNorm of one decode step in one kernel, rounded as transformers' own modules round."""

from torch import Tensor

from kernels import need_triton, unknown_impl


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, impl: str = "reference"
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual (RMSNorm: arXiv 1910.07467).

    Args:
        x: [B, H] contiguous; residual: [B, H] or None for nothing to add; weight: [H].
    Returns:
        normed [B, H] and the sum [B, H] (x itself without a residual), both in x's dtype.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"add_rms_norm wants x [B, H] and weight [H], got {tuple(x.shape)} and {tuple(weight.shape)}")
    match impl:
        case "reference":
            from kernels.add_rms_norm import reference as chosen
        case "triton":
            need_triton("add_rms_norm", x, weight)
            from kernels.add_rms_norm import triton as chosen
        case _:
            raise unknown_impl("add_rms_norm", impl)
    return chosen.add_rms_norm(x, residual, weight, eps)
