"""fp8: the full cache in 8-bit floats (e4m3), one step per token, head and K or V, dequantised inside the attention kernel."""

from dataclasses import dataclass

from methods.full import Full


@dataclass
class Fp8(Full):
    """full with kv_dtype=fp8: the bytes of int8; three bits of mantissa, so less exact near the largest number of a row."""

    kv_dtype: str = "fp8"

    def __post_init__(self):
        super().__post_init__()
        self.require_dtype("fp8")
