from kernels.append_quant.api import append_quant

__all__ = ["append_quant"]
