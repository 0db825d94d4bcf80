"""int4: the full cache in 4 bits, dequantised inside the attention kernel (KIVI, arXiv 2402.02750).

K has a step and a zero per channel of 32 tokens, V per token of 32 channels: 5 bits a number. Blocks of 128 tokens are sealed
as they fill; the newest, unfinished one stays in 16 bits and counts as held.

`python -m harness.sensitivity` measures which KV heads suffer most; with its file as head_bits those get 8 bits.
"""

from dataclasses import dataclass

from methods.full import Full


@dataclass
class Int4(Full):
    """full with kv_dtype=int4: 3.2x less than 16 bit, the 16-bit block of 128 tokens apart."""

    kv_dtype: str = "int4"

    def __post_init__(self):
        super().__post_init__()
        self.require_dtype("int4")
