from kernels.quantize.api import KVFormat, Part, QuantKV, allocate, dequantize, dequantize_rows, quantize, quantize_rows

__all__ = ["KVFormat", "Part", "QuantKV", "allocate", "dequantize", "dequantize_rows", "quantize", "quantize_rows"]
