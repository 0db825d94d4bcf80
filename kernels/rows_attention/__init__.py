from kernels.rows_attention.api import NO_KEY, NO_ROW, rows_attention

__all__ = ["NO_KEY", "NO_ROW", "rows_attention"]
