from kernels.rope_append.api import rope_append

__all__ = ["rope_append"]
