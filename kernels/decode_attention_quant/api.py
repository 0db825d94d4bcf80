"""Attention of one new token per sequence over quantised KV and its 16-bit tail, dequantised inside the kernel."""

from torch import Tensor

from kernels import need_triton, unknown_impl
from kernels.quantize import QuantKV


def decode_attention_quant(
    q: Tensor,
    kv: QuantKV,
    lengths: Tensor,
    scale: float,
    impl: str = "reference",
    *,
    logits: Tensor | None = None,
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q over the first lengths[b] tokens.

    Args:
        q: [B, Hq, D], Hq a multiple of Hkv; impl=triton: fp16 or bf16, |q| < 65000.
        kv: as quantize and append_quant left it (formats: kernels/quantize/api.py).
        lengths: [B] integers on the device, 0 <= lengths <= kv.num_slots; what lies behind is never read into the result.
        scale: factor on q . k.
        logits: [B, Hq, kv.num_slots] fp32, contiguous; receives scale * q . k of every token before `lengths`.
        config: launch numbers of impl=triton in place of the pinned ones, for tuning.
    Returns:
        out [B, Hq, D] in q's dtype and lse [B, Hq] fp32 (natural logarithm). Where nothing takes part: 0 and -inf.
    """
    if q.dim() != 3 or q.shape[0] != kv.batch_size or q.shape[1] % kv.num_kv_heads or q.shape[2] != kv.head_dim:
        raise ValueError(
            f"decode_attention_quant: q {tuple(q.shape)} does not fit {kv.batch_size} sequences of {kv.num_kv_heads} KV heads "
            f"of {kv.head_dim}"
        )
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"decode_attention_quant wants lengths [B], got {tuple(lengths.shape)}")
    if logits is not None and logits.shape != (*q.shape[:2], kv.num_slots):
        raise ValueError(f"decode_attention_quant wants logits {(*q.shape[:2], kv.num_slots)}, got {tuple(logits.shape)}")
    match impl:
        case "reference":
            from kernels.decode_attention_quant import reference

            return reference.decode_attention_quant(q, kv, lengths, scale, logits)
        case "triton":
            need_triton("decode_attention_quant", q, kv.parts[0].k, lengths)
            from kernels.decode_attention_quant import triton

            return triton.decode_attention_quant(q, kv, lengths, scale, logits, config)
        case _:
            raise unknown_impl("decode_attention_quant", impl)
