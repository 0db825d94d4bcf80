from kernels.column_sums.api import column_sums

__all__ = ["column_sums"]
