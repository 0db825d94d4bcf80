from kernels.prefill_attention.api import prefill_attention

__all__ = ["prefill_attention"]
