"""Quantised KV of one layer: the formats, the memory they live in, and the writing of a prompt into it.

    kv = allocate(KVFormat("int4"), 8, num_kv_heads=8, num_slots=32768, head_dim=128, dtype=torch.bfloat16, device="cuda")
    quantize(kv, seq=0, start=0, k=k, v=v, impl="triton")     # a prompt; then append_quant and decode_attention_quant per step

| format | K | V | bits at D 128 | overwrites single slots |
|---|---|---|---|---|
| int8 | step per token and head | the same | 8.125 | yes, also one per KV head: rings, StreamingLLM, H2O |
| fp8 (e4m3) | step per token and head | the same | 8.125 | yes, as int8 |
| int4 | step and zero per channel of `group` tokens | per token of `group` channels | 5.0 at group 32 | no |
| int4_token | step and zero per token of `group` channels | the same | 5.0 at group 32 | yes, as int8 |
| mixed | int8 or int4 by KV head | the same | between | no |

int4 is KIVI's layout (arXiv 2402.02750), int4_token is 4 bits for caches that overwrite: worse where some channels of K are far
larger than the rest. int8, fp8 and int4_token quantise a token when it arrives, so slots hold tokens in any order. int4 and
mixed hold token t in slot t: blocks of BLOCK tokens are sealed when full, and until then live in a 16-bit tail, so the newest
lengths % BLOCK tokens are exact. The lengths alone tell what is sealed; there is no other state.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels import need_triton, unknown_impl

PARAM_DTYPE = torch.float16
# one part and one unit of fp16, so that rounding can only widen a row's range and no value is cut off
ROUND, UNIT = 2**-10, 2**-24

# tokens that are sealed together, and tokens of one transposed tile of V
BLOCK, TILE = 128, 32
TAIL_BYTES, HEAD_BYTES = 2, torch.int32.itemsize
# an int8 code is 128 + round(x / step); the largest e4m3 number is 448
BIAS_INT8, MAX_INT8, MAX_FP8 = 128, 127, 448
# an int4 number is zero + step * (64 + code): one fused multiply-add on fp16 64 + code, whose bits are 0x5400 | code << 4
BIAS_INT4, MAX_INT4 = 64, 15
KINDS = ("fp8", "int8", "int4", "int4_token")
FOUR_BIT = ("int4", "int4_token")
GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True)
class KVFormat:
    """How K and V of one layer are stored."""

    name: str
    "fp8, int8, int4, int4_token or mixed"
    group: int = 32
    "4 bit: tokens (K of int4) or channels (V, K of int4_token) that share a step and a zero"
    head_bits: tuple[int, ...] = ()
    "mixed: 8 or 4 for every KV head"

    def __post_init__(self):
        if self.name not in (*KINDS, "mixed"):
            raise ValueError(f"KV format {self.name!r} is not one of fp8, int8, int4, int4_token, mixed")
        if self.group not in GROUPS:
            raise ValueError(f"group={self.group} is not one of {GROUPS}")
        if (self.name == "mixed") != bool(self.head_bits) or not set(self.head_bits) <= {4, 8}:
            raise ValueError(
                f"head_bits is 8 or 4 per KV head for mixed and empty otherwise, got {self.head_bits} for {self.name}"
            )

    @property
    def overwrites(self) -> bool:
        """Whether append_quant may write any slot at any time; if not, token t goes to slot t and blocks are sealed."""
        return self.name not in ("int4", "mixed")

    def parts(self, num_kv_heads: int) -> list[tuple[str, tuple[int, ...]]]:
        """(kind, KV heads) of the parts that heads of one kind form."""
        if self.name != "mixed":
            return [(self.name, tuple(range(num_kv_heads)))]
        if len(self.head_bits) != num_kv_heads:
            raise ValueError(f"head_bits names {len(self.head_bits)} heads, the layer has {num_kv_heads} KV heads")
        by_kind = {
            kind: tuple(h for h, b in enumerate(self.head_bits) if b == bits) for kind, bits in (("int8", 8), ("int4", 4))
        }
        return [(kind, heads) for kind, heads in by_kind.items() if heads]

    def num_stored(self, num_slots: int) -> int:
        """Quantised slots behind `num_slots` tokens: whole tiles, or the blocks that can be sealed."""
        return -(-num_slots // TILE) * TILE if self.overwrites else num_slots // BLOCK * BLOCK

    def row_bits(self, kind: str, head_dim: int) -> float:
        """Bits of one token's K (or V) of one head, steps and zeros included."""
        return head_dim * (4 + 32 / self.group) if kind in FOUR_BIT else head_dim * 8 + 16

    def bits(self, head_dim: int, num_kv_heads: int | None = None) -> float:
        """Effective bits of a sealed number, steps and zeros included."""
        heads = num_kv_heads or len(self.head_bits) or 1
        total = sum(self.row_bits(kind, head_dim) * len(heads) for kind, heads in self.parts(heads))
        return total / heads / head_dim

    def held_bytes(self, batch_size: int, num_kv_heads: int, num_slots: int, head_dim: int) -> dict[str, int]:
        """Bytes that allocate takes with a 16-bit tail, by ledger kind as QuantKV.tensors names them."""
        codes = scales = 0
        for kind, heads in self.parts(num_kv_heads):
            code_bits = head_dim * (4 if kind in FOUR_BIT else 8)
            codes += code_bits * len(heads)
            scales += round(self.row_bits(kind, head_dim) - code_bits) * len(heads)
        rows = 2 * batch_size * self.num_stored(num_slots)
        held = {"kv": rows * codes // 8, "scales": rows * scales // 8, "tables": HEAD_BYTES * num_kv_heads}
        if not self.overwrites:
            held["tail"] = 2 * batch_size * num_kv_heads * BLOCK * head_dim * TAIL_BYTES
        return held

    def read_bytes(self, num_kv_heads: int, head_dim: int, length: int) -> int:
        """Bytes of K and V that attention over `length` tokens of one sequence reads."""
        rows = sum(self.row_bits(kind, head_dim) * len(heads) for kind, heads in self.parts(num_kv_heads)) / 8
        newest = 0 if self.overwrites else length % BLOCK
        return round(2 * ((length - newest) * rows + newest * num_kv_heads * head_dim * TAIL_BYTES))


@dataclass
class Part:
    """The KV heads of one kind; C is a multiple of TILE. All contiguous."""

    kind: str
    heads: tuple[int, ...]
    head_index: Tensor
    "[H] int32: the layer's KV head of each head here"
    k: Tensor
    "uint8: 8 bit [B, H, C, D]; 4 bit [B, H, C, D / 2], channel d low and d + D / 2 high in byte d"
    v: Tensor
    "uint8, transposed in tiles: 8 bit [B, H, C / TILE, D, TILE]; 4 bit [B, H, C / TILE, D / 2, TILE], packed as K"
    k_params: Tensor
    "fp16: 8 bit [B, H, C, 2], K's and V's step in one word; int4 [B, H, C / group, 2, D], step, zero; int4_token as v_params"
    v_params: Tensor | None
    "fp16: 4 bit [B, H, C / TILE, 2, D / group, TILE], step and zero; None for 8 bit"


@dataclass
class QuantKV:
    """K and V of one layer. A tail holds the tokens from lengths // BLOCK * BLOCK on, token t in row t % BLOCK."""

    format: KVFormat
    num_kv_heads: int
    num_slots: int
    "tokens that fit: the width of logits"
    head_dim: int
    parts: list[Part]
    k_tail: Tensor | None
    "[B, Hkv, BLOCK, D] in 16 bit (CPU: any floating dtype); None if the format overwrites"
    v_tail: Tensor | None

    @cached_property
    def num_stored(self) -> int:
        """Quantised slots, C: num_slots in whole tiles, or whole blocks with the rest in the tail."""
        return self.parts[0].k.shape[2]

    @property
    def batch_size(self) -> int:
        return self.parts[0].k.shape[0]

    def tensors(self) -> dict[str, list[Tensor]]:
        """Held tensors by ledger kind."""
        held = {
            "kv": [x for part in self.parts for x in (part.k, part.v)],
            "scales": [x for part in self.parts for x in (part.k_params, part.v_params) if x is not None],
            "tables": [part.head_index for part in self.parts],
        }
        if self.k_tail is not None:
            held["tail"] = [self.k_tail, self.v_tail]
        return held


def allocate(
    format: KVFormat, batch_size: int, num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype, device
) -> QuantKV:
    """Zeroed memory for `num_slots` tokens of every sequence; `dtype` is the tail's.

    Raises:
        ValueError: the head dim is odd, or groups of 4 bit do not divide it.
    """
    parts = []
    stored = format.num_stored(num_slots)
    for kind, heads in format.parts(num_kv_heads):
        lead = (batch_size, len(heads))
        if kind in FOUR_BIT:
            if head_dim % 2 or head_dim % format.group:
                raise ValueError(f"{kind}: group={format.group} does not divide the head dim {head_dim}")
            shapes = {
                "k": (*lead, stored, head_dim // 2),
                "v": (*lead, stored // TILE, head_dim // 2, TILE),
                "k_params": (*lead, stored // format.group, 2, head_dim),
                "v_params": (*lead, stored // TILE, 2, head_dim // format.group, TILE),
            }
            if kind == "int4_token":
                shapes["k_params"] = shapes["v_params"]
        else:
            shapes = {
                "k": (*lead, stored, head_dim),
                "v": (*lead, stored // TILE, head_dim, TILE),
                "k_params": (*lead, stored, 2),
            }
        held = {
            name: torch.zeros(shape, dtype=PARAM_DTYPE if "params" in name else torch.uint8, device=device)
            for name, shape in shapes.items()
        }
        held.setdefault("v_params", None)
        parts.append(Part(kind, heads, torch.tensor(heads, dtype=torch.int32, device=device), **held))
    tail = None, None
    if not format.overwrites:
        shape = (batch_size, num_kv_heads, BLOCK, head_dim)
        tail = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    return QuantKV(format, num_kv_heads, num_slots, head_dim, parts, *tail)


def quantize(kv: QuantKV, seq: int, start: int, k: Tensor, v: Tensor, impl: str = "reference") -> None:
    """Write N tokens of sequence `seq` into slots start .. start + N - 1, in place.

    Args:
        k, v: [1, Hkv, N, D] floating point, |x| < 6000, D contiguous. NaN in what shares a step makes all of that NaN.
        start: any for formats that overwrite, otherwise a multiple of BLOCK; N % BLOCK tokens then go to the tail.
    The error of a number is at most half a step (4 bit: or the rounding of its zero to fp16, if that is more).
    """
    shape = (1, kv.num_kv_heads, k.shape[2] if k.dim() == 4 else -1, kv.head_dim)
    if k.shape != shape or v.shape != shape:
        raise ValueError(f"quantize wants k, v [1, {shape[1]}, N, {shape[3]}], got {tuple(k.shape)}, {tuple(v.shape)}")
    stop = start + k.shape[2]
    if start < 0 or stop > kv.num_slots:
        raise ValueError(f"quantize: tokens {start} .. {stop - 1} do not fit {kv.num_slots} slots")
    if not kv.format.overwrites and start % BLOCK:
        raise ValueError(f"quantize: {kv.format.name} is written in blocks of {BLOCK}, not from slot {start}")
    match impl:
        case "reference":
            from kernels.quantize import reference as chosen
        case "triton":
            need_triton("quantize", k, v, kv.parts[0].k)
            from kernels.quantize import triton as chosen
        case _:
            raise unknown_impl("quantize", impl)
    num_sealed = k.shape[2] if kv.format.overwrites else k.shape[2] // BLOCK * BLOCK
    if num_sealed:
        chosen.quantize(kv, seq, start, k[0, :, :num_sealed], v[0, :, :num_sealed])
    if num_sealed < k.shape[2]:
        kv.k_tail[seq, :, : k.shape[2] - num_sealed] = k[0, :, num_sealed:]
        kv.v_tail[seq, :, : k.shape[2] - num_sealed] = v[0, :, num_sealed:]


def overwrite_keys(kv: QuantKV, start: int, k: Tensor, impl: str = "reference") -> None:
    """Keys k [B, Hkv, N, D] of every sequence into slots start .. start + N - 1, in place; V there stays as it is.

    Raises:
        ValueError: the format does not overwrite.
    """
    shape = (kv.batch_size, kv.num_kv_heads, k.shape[2] if k.dim() == 4 else -1, kv.head_dim)
    if k.shape != shape:
        raise ValueError(f"overwrite_keys wants k [{shape[0]}, {shape[1]}, N, {shape[3]}], got {tuple(k.shape)}")
    if not kv.format.overwrites:
        raise ValueError(f"overwrite_keys: {kv.format.name} seals blocks of tokens and overwrites none; use int8 or fp8")
    if start < 0 or start + k.shape[2] > kv.num_slots:
        raise ValueError(f"overwrite_keys: slots {start} .. {start + k.shape[2] - 1} are not among {kv.num_slots}")
    match impl:
        case "reference":
            from kernels.quantize import reference as chosen
        case "triton":
            need_triton("overwrite_keys", k, kv.parts[0].k)
            from kernels.quantize import triton as chosen
        case _:
            raise unknown_impl("overwrite_keys", impl)
    chosen.overwrite_keys(kv, start, k)


def dequantize(kv: QuantKV, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that are stored, as a kernel sees them: k, v [B, Hkv, num_slots, D], fp32 (they are fp16 or the tail's).

    lengths [B] tells which tokens are still in the tail; what lies at or behind it is unspecified.
    """
    from kernels.quantize import reference

    return reference.dequantize(kv, lengths)
