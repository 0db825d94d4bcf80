from kernels.quantize.api import dequantize_rows, quantize_rows

__all__ = ["dequantize_rows", "quantize_rows"]
