"""PyTorch twin: dequantises everything, then attends as decode_attention's reference does."""

import torch
from torch import Tensor

from kernels.decode_attention import decode_attention
from kernels.quantize import QuantKV, dequantize


def decode_attention_quant(
    q: Tensor, kv: QuantKV, lengths: Tensor, scale: float, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See api.py. fp64 q stays fp64."""
    k, v = dequantize(kv, lengths)
    compute = torch.promote_types(q.dtype, torch.float32)
    out, lse = decode_attention(q.to(compute), k.to(compute), v.to(compute), lengths, scale, "reference", logits=logits)
    return out.to(q.dtype), lse
