"""From the joined QKV projection of one decode step to a rotated query and rows written into slots, in one kernel."""

from torch import Tensor

from kernels import need_triton, unknown_impl


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    slot: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    impl: str = "reference",
) -> Tensor:
    """Rotate q and k (RoPE in half-split layout, arXiv 2104.09864) and write k, v at slot[b]; roundings as in transformers.

    Args:
        qkv: [B, (Hq + 2 Hkv) D] contiguous; cos, sin: [B, D] in qkv's dtype.
        k_slots, v_slots: [B, Hkv, C, D], same dtype, written in place; slot: [B] int64, 0 <= slot < C.
        q_norm, k_norm: [D] weights of a per-head RMSNorm before the rotation (Qwen3), with eps.
    Returns:
        q [B, Hq, D].
    """
    num_kv_heads, head_dim = k_slots.shape[1], k_slots.shape[3]
    if qkv.shape[1] % head_dim or cos.shape != (qkv.shape[0], head_dim) or k_slots.dtype != qkv.dtype:
        raise ValueError(
            f"rope_append: qkv {tuple(qkv.shape)} {qkv.dtype} does not fit slots {tuple(k_slots.shape)} {k_slots.dtype}"
        )
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_q_heads < 1:
        raise ValueError(
            f"rope_append: qkv {tuple(qkv.shape)} holds no query heads beside {num_kv_heads} KV heads of {head_dim}"
        )
    match impl:
        case "reference":
            from kernels.rope_append import reference as chosen
        case "triton":
            need_triton("rope_append", qkv, k_slots, v_slots, slot)
            from kernels.rope_append import triton as chosen
        case _:
            raise unknown_impl("rope_append", impl)
    return chosen.rope_append(qkv, cos, sin, k_slots, v_slots, slot, num_q_heads, q_norm, k_norm, eps)
