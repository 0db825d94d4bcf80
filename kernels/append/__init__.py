from kernels.append.api import append

__all__ = ["append"]
