"""Slots: the physical memory of one layer's cache, in one of the kv_dtypes. Allocated once, then only rows are overwritten.

Every method stores through this module, so that kv_dtype is orthogonal to the method. A layer's format says how many bytes its
slots take and which of them attention reads; make_slots allocates them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.append import append
from kernels.append_quant import append_quant
from kernels.decode_attention import decode_attention
from kernels.decode_attention_quant import decode_attention_quant
from kernels.quantize import BLOCK, KVFormat, allocate, dequantize, overwrite_keys, quantize

__all__ = [
    "BLOCK",
    "KV_DTYPES",
    "KVFormat",
    "PlainFormat",
    "QuantSlots",
    "Slots",
    "format_of",
    "make_slots",
    "name_of",
    "read_head_bits",
]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
QUANT_DTYPES = ("int8", "fp8", "int4")
KV_DTYPES = (*DTYPES, *QUANT_DTYPES)
# channels that share a step and a zero at 4 bit: 5 bits a number; 16 where 32 does not divide the head dim: 6 bits
GROUPS = (32, 16)


def name_of(dtype: torch.dtype) -> str:
    """The kv_dtype that stores a model of this dtype as it is."""
    return next(name for name, value in DTYPES.items() if value == dtype)


@dataclass(frozen=True)
class PlainFormat:
    """K and V in a floating dtype; answers what KVFormat answers for the quantised ones."""

    name: str

    @property
    def overwrites(self) -> bool:
        return True

    def held_bytes(self, batch_size: int, num_kv_heads: int, num_slots: int, head_dim: int) -> dict[str, int]:
        """Bytes of `num_slots` slots of every sequence in one layer, by ledger kind."""
        return {"kv": batch_size * self.read_bytes(num_kv_heads, head_dim, num_slots)}

    def read_bytes(self, num_kv_heads: int, head_dim: int, length: int) -> int:
        """Bytes of K and V that attention over `length` tokens of one sequence reads."""
        return 2 * num_kv_heads * length * head_dim * DTYPES[self.name].itemsize


def format_of(
    kv_dtype: str, head_dim: int, overwrites: bool = False, head_bits: tuple[int, ...] = ()
) -> PlainFormat | KVFormat:
    """How a layer of this kv_dtype is stored.

    Args:
        overwrites: single slots will be overwritten, so int4 becomes int4_token; head_bits: 8 or 4 per KV head in place of 4.
    """
    if kv_dtype not in QUANT_DTYPES:
        return PlainFormat(kv_dtype)
    if kv_dtype != "int4":
        return KVFormat(kv_dtype)
    group = next((group for group in GROUPS if head_dim % group == 0), None)
    if group is None:
        raise ValueError(f"kv_dtype=int4 wants a head dim that {GROUPS[-1]} divides, not {head_dim}; use kv_dtype=int8")
    if head_bits:
        return KVFormat("mixed", group, head_bits)
    return KVFormat("int4_token" if overwrites else "int4", group)


def read_head_bits(path: str) -> list[tuple[int, ...]]:
    """8 or 4 per layer and KV head, from a json that `python -m harness.sensitivity` wrote."""
    try:
        bits = json.loads(Path(path).read_text())["bits"]
        assert all(set(layer) <= {4, 8} for layer in bits)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(
            f"head_bits={path} is no list of bits per head: write one with python -m harness.sensitivity --out {path}"
        ) from None
    return [tuple(layer) for layer in bits]


class Slots:
    """K and V rows of one layer: [B, Hkv, C, D] in a floating dtype."""

    seals = False

    def __init__(self, batch_size: int, num_kv_heads: int, num_slots: int, head_dim: int, kv_dtype: str, device, impl: str):
        self.impl = impl
        shape = (batch_size, num_kv_heads, num_slots, head_dim)
        self.k = torch.zeros(shape, dtype=DTYPES[kv_dtype], device=device)
        self.v = torch.zeros(shape, dtype=DTYPES[kv_dtype], device=device)

    def store(self, seq: int, start: int, k: Tensor, v: Tensor) -> None:
        """Rows k, v [1, Hkv, N, D] of sequence `seq` into slots start .. start + N - 1."""
        self.k[seq, :, start : start + k.shape[2]] = k[0]
        self.v[seq, :, start : start + v.shape[2]] = v[0]

    def overwrite_keys(self, start: int, k: Tensor) -> None:
        """Keys k [B, Hkv, N, D] of every sequence into slots start .. start + N - 1."""
        self.k[:, :, start : start + k.shape[2]] = k

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        """One row per sequence, k, v [B, Hkv, D], into slot [B], or [B, Hkv] with one per KV head."""
        append(self.k, self.v, k, v, slot, self.impl)

    def attend(self, q: Tensor, lengths: Tensor, scale: float, **options) -> tuple[Tensor, Tensor]:
        """Attention of q [B, Hq, D] over the first lengths [B] slots: out [B, Hq, D] and lse [B, Hq].

        options: index, index_lens, block_size and logits of kernels.decode_attention.
        """
        return decode_attention(q, self.k.to(q.dtype), self.v.to(q.dtype), lengths, scale, self.impl, **options)

    def rows(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B, Hkv, C, D] as attend sees them when lengths [B] slots are filled; for tests, not for a step."""
        return self.k, self.v

    def tensors(self) -> dict[str, list[Tensor]]:
        """Held tensors by ledger kind."""
        return {"kv": [self.k, self.v]}

    def headroom(self, num_free: int) -> list[tuple[Tensor, int]]:
        """Bytes in each tensor that the last `num_free` slots take, and would not be there without them."""
        return [(x, x.nbytes // x.shape[2] * num_free) for x in (self.k, self.v)]


class QuantSlots:
    """K and V of one layer as codes with steps and zeros, dequantised inside the attention kernel; the same calls as Slots.

    int8, fp8 and int4_token take a row in any slot. int4 and mixed want token t in slot t: store from slot 0, then append in
    order; blocks of 128 are sealed as they fill, until then the newest tokens lie in a 16-bit tail.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        format: KVFormat,
        device,
        impl: str,
        dtype: torch.dtype = torch.float16,
    ):
        self.impl = impl
        # the tail of an fp32 model is fp16: a format takes the same bytes wherever it runs
        tail_dtype = dtype if dtype.itemsize == 2 else torch.float16
        self.kv = allocate(format, batch_size, num_kv_heads, num_slots, head_dim, tail_dtype, device)
        if impl == "triton":
            from kernels.quantize.triton import check

            check(f"kv_dtype {format.name}", self.kv)
            if dtype.itemsize != 2:
                raise ValueError(f"kv_dtype {format.name}: impl=triton wants a 16-bit model, not {dtype} (set impl=reference)")

    @property
    def seals(self) -> bool:
        """Whether appended tokens are quantised in blocks, for good."""
        return not self.kv.format.overwrites

    def store(self, seq: int, start: int, k: Tensor, v: Tensor) -> None:
        quantize(self.kv, seq, start, k, v, self.impl)

    def overwrite_keys(self, start: int, k: Tensor) -> None:
        overwrite_keys(self.kv, start, k, self.impl)

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        append_quant(self.kv, k, v, slot, self.impl)

    def attend(self, q: Tensor, lengths: Tensor, scale: float, *, logits: Tensor | None = None, **options):
        """As Slots.attend, without an index."""
        if options.get("index") is not None:
            raise ValueError(
                f"kv_dtype {self.kv.format.name} is read whole: this method reads a list of slots, which needs kv_dtype=auto"
            )
        return decode_attention_quant(q, self.kv, lengths, scale, self.impl, logits=logits)

    def rows(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return dequantize(self.kv, lengths)

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.kv.tensors()

    def headroom(self, num_free: int) -> list[tuple[Tensor, int]]:
        stored = self.kv.num_stored
        free = stored - self.kv.format.num_stored(self.kv.num_slots - num_free)
        held = self.kv.tensors()
        # a tail and the table of heads are needed whatever the number of slots
        return [(x, x.nbytes * free // stored) for x in held["kv"] + held["scales"] if stored]


def make_slots(
    batch_size: int,
    num_kv_heads: int,
    num_slots: int,
    head_dim: int,
    kv_dtype: str | PlainFormat | KVFormat,
    device,
    impl: str,
    dtype: torch.dtype = torch.float16,
) -> Slots | QuantSlots:
    """Slots of the kv_dtype or format, zeroed.

    Args:
        impl: the kernels that read and write them; dtype: the model's, which a tail keeps if it has 16 bits.
    """
    format = format_of(kv_dtype, head_dim) if isinstance(kv_dtype, str) else kv_dtype
    if isinstance(format, PlainFormat):
        return Slots(batch_size, num_kv_heads, num_slots, head_dim, format.name, device, impl)
    return QuantSlots(batch_size, num_kv_heads, num_slots, head_dim, format, device, impl, dtype)
