from kernels.compact.api import compact

__all__ = ["compact"]
