"""PyTorch twin. The formulas here define the formats; triton.py gives the same bits."""

import torch
from torch import Tensor

from kernels.quantize.api import (
    BIAS_INT4,
    BIAS_INT8,
    BLOCK,
    MAX_FP8,
    MAX_INT4,
    MAX_INT8,
    PARAM_DTYPE,
    ROUND,
    TILE,
    UNIT,
    Part,
    QuantKV,
)  # fmt: skip


def encode8(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """x [..., D] as codes [..., D] uint8 and step [...] fp16: x is about step * number of the code."""
    x = x.float()
    largest = MAX_FP8 if kind == "fp8" else MAX_INT8
    step = (x.abs().amax(-1) * ((1 + ROUND) / largest) + UNIT).to(PARAM_DTYPE)
    scaled = (x * (1 / step.float())[..., None]).clamp(-largest, largest)
    if kind == "fp8":
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), step
    return (scaled.nan_to_num(0).round() + BIAS_INT8).to(torch.uint8), step


def decode8(codes: Tensor, step: Tensor, kind: str) -> Tensor:
    """Inverse of encode8, fp32."""
    numbers = codes.view(torch.float8_e4m3fn).float() if kind == "fp8" else codes.float() - BIAS_INT8
    return numbers * step.float()[..., None]


def encode4(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x as codes 0 .. 15 (uint8) and step, zero (fp16, `dim` kept as 1): those along `dim` share them."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = ((high - low) * ((1 + ROUND) / MAX_INT4) + UNIT).to(PARAM_DTYPE)
    zero = (low - BIAS_INT4 * step.float()).to(PARAM_DTYPE)
    base = zero.float() + BIAS_INT4 * step.float()
    codes = ((x - base) * (1 / step.float())).clamp(0, MAX_INT4).nan_to_num(0).round()
    return codes.to(torch.uint8), step, zero


def decode4(codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """Inverse of encode4, fp32 that is fp16: kernels round so."""
    return (zero.float() + step.float() * (codes.float() + BIAS_INT4)).to(PARAM_DTYPE).float()


def pack4(codes: Tensor) -> Tensor:
    """[..., D] codes as [..., D / 2] bytes."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def unpack4(packed: Tensor) -> Tensor:
    """Inverse of pack4."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def tiled(x: Tensor) -> Tensor:
    """[H, N, D] as transposed tiles [H, N / TILE, D, TILE]."""
    return x.unflatten(1, (-1, TILE)).transpose(2, 3)


def untiled(x: Tensor) -> Tensor:
    """Inverse of tiled, with a leading axis: [B, H, C / TILE, D, TILE] to [B, H, C, D]."""
    return x.transpose(3, 4).flatten(2, 3)


def quantize(kv: QuantKV, seq: int, start: int, k: Tensor, v: Tensor) -> None:
    """See api.py; k, v [Hkv, N, D], whole blocks if the format has a tail."""
    stop = start + k.shape[1]
    for part in kv.parts:
        heads = list(part.heads)
        if part.kind == "int4":
            put4(part, seq, start, k[heads], v[heads], kv.format.group)
        else:
            put8(part, seq, torch.arange(start, stop, device=k.device), k[heads], v[heads])


def overwrite_keys(kv: QuantKV, start: int, k: Tensor) -> None:
    """See api.py."""
    part, stop = kv.parts[0], start + k.shape[2]
    part.k[:, :, start:stop], part.k_params[:, :, start:stop, 0] = encode8(k, part.kind)


def put8(part: Part, seq: int, slot: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [H, N, D] into slots [N] of one sequence."""
    codes, part.k_params[seq, :, slot, 0] = encode8(k, part.kind)
    part.k[seq, :, slot] = codes
    codes, part.k_params[seq, :, slot, 1] = encode8(v, part.kind)
    # the indexed axes come first: [N, H, D]
    part.v[seq].permute(1, 3, 0, 2)[slot // TILE, slot % TILE] = codes.transpose(0, 1)


def put4(part: Part, seq: int, start: int, k: Tensor, v: Tensor, group: int) -> None:
    """k, v [H, N, D] into slots start .. start + N - 1 of one sequence; start and N are multiples of BLOCK."""
    stop = start + k.shape[1]
    codes, step, zero = encode4(k.unflatten(1, (-1, group)), 2)
    part.k[seq, :, start:stop] = pack4(codes.flatten(1, 2))
    part.k_params[seq, :, start // group : stop // group] = torch.cat([step, zero], 2)
    codes, step, zero = encode4(v.unflatten(2, (-1, group)), 3)
    tiles = slice(start // TILE, stop // TILE)
    part.v[seq, :, tiles] = tiled(pack4(codes.flatten(2, 3)))
    part.v_params[seq, :, tiles] = torch.stack([tiled(step[..., 0]), tiled(zero[..., 0])], 2)


def dequantize_part(part: Part, group: int) -> tuple[Tensor, Tensor]:
    """All stored numbers of a part: k, v [B, H, C, D] fp32."""
    if part.kind != "int4":
        k_step, v_step = part.k_params.unbind(3)
        return decode8(part.k, k_step, part.kind), decode8(untiled(part.v).contiguous(), v_step, part.kind)
    step, zero = part.k_params.split(1, dim=3)
    k = decode4(unpack4(part.k).unflatten(2, (-1, group)), step, zero).flatten(2, 3)
    step, zero = (untiled(x)[..., None] for x in part.v_params.unbind(3))  # [B, H, C, D / group, 1]
    v = decode4(unpack4(untiled(part.v)).unflatten(3, (-1, group)), step, zero).flatten(3, 4)
    return k, v


def dequantize(kv: QuantKV, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """See api.py."""
    shape = (kv.batch_size, kv.num_kv_heads, kv.num_slots, kv.head_dim)
    dense = [torch.zeros(shape, dtype=torch.float32, device=lengths.device) for _ in "kv"]
    num = min(kv.num_slots, kv.num_stored)
    for part in kv.parts:
        for rows, values in zip(dense, dequantize_part(part, kv.format.group), strict=True):
            rows[:, part.head_index.long(), :num] = values[:, :, :num]
    if kv.k_tail is None:
        return dense[0], dense[1]
    token = torch.arange(kv.num_slots, device=lengths.device)
    sealed = (lengths // BLOCK * BLOCK)[:, None]  # [B, 1]
    row = (token - sealed).clamp(0, BLOCK - 1)[:, None, :, None].expand(shape)
    in_tail = (token >= sealed)[:, None, :, None]
    tails = (tail.float().gather(2, row) for tail in (kv.k_tail, kv.v_tail))
    k, v = (torch.where(in_tail, tail, rows) for tail, rows in zip(tails, dense, strict=True))
    return k, v
