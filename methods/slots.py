"""Slots: the physical memory of one layer's cache, in one of the kv_dtypes. Allocated once, then only rows are overwritten.

Every method stores through this module, so that kv_dtype is orthogonal to the method.
"""

import torch
from torch import Tensor

from kernels.append import append
from kernels.decode_attention import decode_attention
from kernels.quantize import dequantize_rows, quantize_rows

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KV_DTYPES = ("fp32", "fp16", "bf16", "int8")


def name_of(dtype: torch.dtype) -> str:
    """The kv_dtype that stores a model of this dtype as it is."""
    return next(name for name, value in DTYPES.items() if value == dtype)


def payload_bytes(kv_dtype: str, head_dim: int) -> int:
    """Bytes of the codes or numbers of one K (or V) row of one head."""
    return head_dim if kv_dtype == "int8" else head_dim * DTYPES[kv_dtype].itemsize


def row_bytes(kv_dtype: str, head_dim: int) -> int:
    """Bytes of one K (or V) row of one head, scales included."""
    scale_and_zero = 2 * torch.float16.itemsize if kv_dtype == "int8" else 0
    return payload_bytes(kv_dtype, head_dim) + scale_and_zero


class Slots:
    """K and V rows of one layer: [B, Hkv, C, D] in a floating dtype."""

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
        """One row per sequence, k, v [B, Hkv, D], into slot [B]."""
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


class Int8Slots:
    """K and V rows of one layer as 8-bit codes with fp16 scale and zero per row; the same calls as Slots."""

    def __init__(self, batch_size: int, num_kv_heads: int, num_slots: int, head_dim: int, device, impl: str):
        self.impl = impl
        shape = (batch_size, num_kv_heads, num_slots)
        self.codes = [torch.zeros(*shape, head_dim, dtype=torch.uint8, device=device) for _ in "kv"]
        self.params = [torch.zeros(*shape, 2, dtype=torch.float16, device=device) for _ in "kv"]

    def store(self, seq: int, start: int, k: Tensor, v: Tensor) -> None:
        for codes, params, rows in zip(self.codes, self.params, (k, v), strict=True):
            new_codes, new_params = quantize_rows(rows[0])
            codes[seq, :, start : start + rows.shape[2]] = new_codes
            params[seq, :, start : start + rows.shape[2]] = new_params

    def overwrite_keys(self, start: int, k: Tensor) -> None:
        codes, params = quantize_rows(k)
        self.codes[0][:, :, start : start + k.shape[2]] = codes
        self.params[0][:, :, start : start + k.shape[2]] = params

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        (k_codes, k_params), (v_codes, v_params) = quantize_rows(k), quantize_rows(v)
        append(*self.codes, k_codes, v_codes, slot, self.impl)
        append(*self.params, k_params, v_params, slot, self.impl)

    def attend(self, q: Tensor, lengths: Tensor, scale: float, **options) -> tuple[Tensor, Tensor]:
        k, v = (dequantize_rows(c, p, q.dtype) for c, p in zip(self.codes, self.params, strict=True))
        return decode_attention(q, k, v, lengths, scale, self.impl, **options)

    def rows(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(dequantize_rows(c, p, torch.float32) for c, p in zip(self.codes, self.params, strict=True))

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"kv": self.codes, "scales": self.params}


def make_slots(batch_size: int, num_kv_heads: int, num_slots: int, head_dim: int, kv_dtype: str, device, impl: str):
    """Slots of the kv_dtype, zeroed; `impl` names the kernels that read and write them."""
    if kv_dtype == "int8":
        return Int8Slots(batch_size, num_kv_heads, num_slots, head_dim, device, impl)
    return Slots(batch_size, num_kv_heads, num_slots, head_dim, kv_dtype, device, impl)
