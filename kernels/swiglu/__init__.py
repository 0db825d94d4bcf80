from kernels.swiglu.api import swiglu

__all__ = ["swiglu"]
