"""int8: the full cache in 8-bit integers with one step per token, head and K or V, dequantised inside the attention kernel."""

from dataclasses import dataclass

from methods.full import Full


@dataclass
class Int8(Full):
    """full with kv_dtype=int8: 1 byte a number and 2 a row, so 1.94x (D 64) and 1.97x (D 128) less than 16 bit."""

    kv_dtype: str = "int8"

    def __post_init__(self):
        super().__post_init__()
        self.require_dtype("int8")
