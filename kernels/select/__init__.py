from kernels.select.api import select

__all__ = ["select"]
