"""PyTorch twin. Sealing reads the slots on the host: the oracle, not a step of a graph."""

import torch
from torch import Tensor

from kernels.quantize.api import BLOCK, TILE, QuantKV
from kernels.quantize.reference import by_token, encode8, encode_token4, quantize


def append_quant(kv: QuantKV, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """See api.py."""
    if kv.format.overwrites:
        _overwrite(kv, k, v, slot)
        return
    seqs = torch.arange(kv.batch_size, device=k.device)
    row = slot % BLOCK
    kv.k_tail[seqs, :, row], kv.v_tail[seqs, :, row] = k.to(kv.k_tail.dtype), v.to(kv.v_tail.dtype)
    for seq in torch.nonzero(row == BLOCK - 1).flatten().tolist():
        quantize(kv, seq, int(slot[seq]) + 1 - BLOCK, kv.k_tail[seq], kv.v_tail[seq])


def _overwrite(kv: QuantKV, k: Tensor, v: Tensor, slot: Tensor) -> None:
    part = kv.parts[0]
    slot = slot[:, None].expand(k.shape[:2]) if slot.dim() == 1 else slot
    seqs = torch.arange(k.shape[0], device=k.device)[:, None]
    heads = torch.arange(k.shape[1], device=k.device)
    if part.kind == "int4_token":
        at, group = (seqs, heads, slot // TILE, slot % TILE), kv.format.group
        part.k[seqs, heads, slot], by_token(part.k_params)[at] = encode_token4(k, group)
        part.v.transpose(3, 4)[at], by_token(part.v_params)[at] = encode_token4(v, group)
        return
    part.k[seqs, heads, slot], k_step = encode8(k, part.kind)
    codes, v_step = encode8(v, part.kind)
    part.v.transpose(3, 4)[seqs, heads, slot // TILE, slot % TILE] = codes
    part.k_params[seqs, heads, slot] = torch.stack([k_step, v_step], -1)
