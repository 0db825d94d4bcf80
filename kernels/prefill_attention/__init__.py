from kernels.prefill_attention.api import lists_of, prefill_attention
from kernels.prefill_attention.sdpa import backend_of

__all__ = ["backend_of", "lists_of", "prefill_attention"]
