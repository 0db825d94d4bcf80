"""int8: the full cache with 8-bit rows, one scale and zero per token and head, dequantised where attention reads them."""

from dataclasses import dataclass
from typing import ClassVar

from methods.full import Full


@dataclass
class Int8(Full):
    """full with kv_dtype=int8: 1 byte a value and 4 bytes a row, so 1.88x (D 64) and 1.94x (D 128) under 16 bit."""

    kv_dtype: str = "int8"

    memory_class: ClassVar[str] = "freed"

    def __post_init__(self):
        super().__post_init__()
        if self.kv_dtype != "int8":
            raise ValueError(f"method=int8 stores int8, not {self.kv_dtype}; use method=full kv_dtype={self.kv_dtype}")
