from kernels.decode_attention.api import decode_attention

__all__ = ["decode_attention"]
