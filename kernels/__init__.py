"""Shared ops of all methods: one folder per op with api.py (checks once, picks the implementation), reference.py (PyTorch, the
oracle) and triton.py (CUDA). `python -m kernels.check` tells which of them run here, `python -m kernels.bench` how fast.

Layouts: queries [B, Hq, T, D] (decode: [B, Hq, D]); slots [B, Hkv, C, D]; lengths [B]. KV heads are never repeated.
`impl` names the implementation; one that cannot run is an error, nothing falls back in silence.
"""

import importlib.util

from torch import Tensor

IMPLS = ("reference", "triton")


def unknown_impl(op: str, impl: str) -> ValueError:
    """Error for an implementation that no op has."""
    return ValueError(f"{op} has no implementation {impl!r}; it has: {', '.join(IMPLS)} (set impl={IMPLS[0]})")


def need_triton(op: str, *tensors: Tensor) -> None:
    """ValueError unless a Triton kernel can run on these tensors: triton is there, and they are on CUDA or it interprets."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"{op}: impl=triton needs the package triton, which is not installed (set impl=reference)")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{op}: impl=triton wants all tensors on one device, got {', '.join(sorted(map(str, devices)))}")
    import triton

    if not (all(tensor.is_cuda for tensor in tensors) or triton.knobs.runtime.interpret):
        raise ValueError(
            f"{op}: impl=triton needs CUDA tensors, got {', '.join(map(str, devices))} (set impl=reference, or "
            "TRITON_INTERPRET=1 to interpret kernels on the CPU)"
        )
