"""Attention of one new token per sequence over the slots that are filled, or over a list of them."""

from torch import Tensor

from kernels import unknown_impl

BLOCK_SIZES = (1, 16, 64, 128)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    impl: str = "reference",
    *,
    index: Tensor | None = None,
    index_lens: Tensor | None = None,
    block_size: int = 1,
    logits: Tensor | None = None,
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q over slots 0 .. lengths[b] - 1, or over those of them that `index` names.

    Args:
        q: [B, Hq, D], Hq a multiple of Hkv.
        k, v: slots [B, Hkv, C, D], D contiguous; what lies at or behind `lengths` is never read into the result, NaN included.
        lengths: [B] integers on the device, 0 <= lengths <= C.
        scale: factor on q . k.
        index: [B, Hkv or 1, N] int32, the slots (or blocks of `block_size` slots) to attend to, each at most once; ascending is
            fastest. Entries that are negative, and slots at or behind `lengths`, do not take part.
        index_lens: [B] integers on the device: only the first index_lens[b] entries count. None: all N.
        block_size: 1, 16, 64 or 128 slots per entry of `index`.
        logits: [B, Hq, C] fp32, contiguous; receives scale * q . k of every slot before `lengths`; what
            stands behind is undefined. Not with `index`.
        config: launch numbers of impl=triton in place of the pinned ones, for tuning.
    Returns:
        out [B, Hq, D] in q's dtype and lse [B, Hq] fp32 (natural logarithm). Where nothing takes part: 0 and -inf.
    """
    if q.dim() != 3 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"decode_attention wants q [B, Hq, D] and k, v [B, Hkv, C, D], got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"decode_attention: q {tuple(q.shape)} does not fit k {tuple(k.shape)}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"decode_attention: block_size={block_size} is not one of {BLOCK_SIZES}")
    if index is None and (index_lens is not None or block_size != 1):
        raise ValueError("decode_attention: index_lens and block_size need an index")
    if index is not None:
        if index.dim() != 3 or index.shape[0] != q.shape[0] or index.shape[1] not in (1, k.shape[1]):
            raise ValueError(f"decode_attention wants index [B, Hkv or 1, N], got {tuple(index.shape)}")
        if logits is not None:
            raise ValueError("decode_attention: logits are written for all slots, so not with an index")
    if logits is not None and logits.shape != (*q.shape[:2], k.shape[2]):
        raise ValueError(f"decode_attention wants logits [B, Hq, C], got {tuple(logits.shape)}")
    match impl:
        case "reference":
            from kernels.decode_attention import reference

            return reference.decode_attention(q, k, v, lengths, scale, index, index_lens, block_size, logits)
        case "triton":
            from kernels.decode_attention import triton

            return triton.decode_attention(q, k, v, lengths, scale, index, index_lens, block_size, logits, config)
        case _:
            raise unknown_impl("decode_attention", impl)
