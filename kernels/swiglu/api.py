"""SwiGLU of one decode step from the joined gate and up projection (arXiv 2002.05202), rounded as transformers rounds."""

from torch import Tensor

from kernels import need_triton, unknown_impl


def swiglu(gate_up: Tensor, impl: str = "reference") -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [B, 2 I] contiguous, gate first.
    Returns:
        [B, I] in the same dtype.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu wants gate and up joined as [B, 2 I], got {tuple(gate_up.shape)}")
    match impl:
        case "reference":
            from kernels.swiglu import reference as chosen
        case "triton":
            need_triton("swiglu", gate_up)
            from kernels.swiglu import triton as chosen
        case _:
            raise unknown_impl("swiglu", impl)
    return chosen.swiglu(gate_up)
