"""Attention of one new token per sequence over the slots that are filled."""

from torch import Tensor

from kernels import unknown_impl


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, impl: str = "reference"
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q over slots 0 .. lengths[b] - 1.

    Args:
        q: [B, Hq, D], Hq a multiple of Hkv.
        k, v: slots [B, Hkv, C, D]; what lies at or behind `lengths` is never read into the result, NaN included.
        lengths: [B] integers on the device, 1 <= lengths <= C.
        scale: factor on q . k.
    Returns:
        out [B, Hq, D] in q's dtype and lse [B, Hq] fp32 (natural logarithm).
    """
    if q.dim() != 3 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            f"decode_attention wants q [B, Hq, D] and k, v [B, Hkv, C, D], got {q.shape}, {k.shape}, {v.shape}"
        )
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"decode_attention: q {tuple(q.shape)} does not fit k {tuple(k.shape)}")
    match impl:
        case "reference":
            from kernels.decode_attention import reference as chosen
        case _:
            raise unknown_impl("decode_attention", impl)
    return chosen.decode_attention(q, k, v, lengths, scale)
