from kernels.quantize.api import BLOCK, KVFormat, Part, QuantKV, allocate, dequantize, overwrite_keys, quantize

__all__ = ["BLOCK", "KVFormat", "Part", "QuantKV", "allocate", "dequantize", "overwrite_keys", "quantize"]
