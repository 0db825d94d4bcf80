from kernels.decode_attention_quant.api import decode_attention_quant

__all__ = ["decode_attention_quant"]
