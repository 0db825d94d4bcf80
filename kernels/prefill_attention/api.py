"""Causal attention of a prompt or of its next chunk: dense through PyTorch's kernels, block sparse by list through Triton."""

import torch
from torch import Tensor


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    return_lse: bool = False,
    blocks: tuple[Tensor, Tensor] | None = None,
    block_size: int = 128,
    impl: str = "sdpa",
    config: dict | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention; the last query sees all keys, so query i stands at position Tk - Tq + i (bottom right).

    Args:
        q: [B, Hq, Tq, D]; k, v: [B, Hkv, Tk, D], Hq a multiple of Hkv, Tq <= Tk, D contiguous.
        scale: factor of q.k, positive.
        blocks: (index, count), which blocks of `block_size` keys each block of `block_size` queries attends to:
            index [B, Hq | Hkv | 1, ceil(Tq / block_size), M] int32, the first `count` entries ascending without repeats,
            the rest never read; count [B, Hq | Hkv | 1, ceil(Tq / block_size)] int32. Causality applies inside; a query
            that sees none of its listed keys gets 0 and LSE -inf. `lists_of` makes them from a mask.
        impl: "sdpa" (dense only; `backend_of` names the kernel), "triton" or "reference".
        config: overrides of the pinned Triton configuration.
    Returns:
        [B, Hq, Tq, D] in q's dtype and with return_lse the natural log-sum-exp [B, Hq, Tq] (fp32, fp64 of fp64 inputs).
    """
    batch, num_heads, num_queries, dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or num_heads % k.shape[1] or k.shape[3] != dim or num_queries > k.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"prefill_attention wants q [B, Hq, Tq, D] and k, v [B, Hkv, Tk, D] with Tq <= Tk, got {shapes}")
    if blocks is not None:
        index, count = blocks
        num_lists = -(-num_queries // block_size)
        good = index.dim() == 4 and index.shape[:3] == count.shape and index.shape[1] in (num_heads, k.shape[1], 1)
        if not good or index.shape[0] != batch or index.shape[2] != num_lists or {index.dtype, count.dtype} != {torch.int32}:
            raise ValueError(
                f"prefill_attention wants int32 block lists [B, Hq|Hkv|1, {num_lists}, M] and their counts, "
                f"got {index.dtype} {tuple(index.shape)}, {count.dtype} {tuple(count.shape)}"
            )
    match impl:
        case "sdpa":
            from kernels.prefill_attention import sdpa as chosen

            if blocks is not None:
                raise ValueError("prefill_attention: impl=sdpa has no block lists (set impl=triton or impl=reference)")
            out, lse = chosen.prefill_attention(q, k, v, scale, return_lse)
        case "triton":
            from kernels.prefill_attention import triton as chosen

            out, lse = chosen.prefill_attention(q, k, v, scale, blocks, block_size, config)
        case "reference":
            from kernels.prefill_attention import reference as chosen

            out, lse = chosen.prefill_attention(q, k, v, scale, blocks, block_size)
        case _:
            raise ValueError(f"prefill_attention has no implementation {impl!r}; it has: sdpa, triton, reference")
    return (out, lse) if return_lse else out


def lists_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Block lists of a block mask, without a host sync.

    Args:
        mask: [B, H, NQ, NK] bool, True where the block of keys is attended.
    Returns:
        index [B, H, NQ, NK] int32 with the attended blocks first, ascending, then NK; count [B, H, NQ] int32.
    """
    num_blocks = mask.shape[-1]
    ids = torch.arange(num_blocks, dtype=torch.int32, device=mask.device)
    return torch.where(mask, ids, num_blocks).sort(-1).values.int(), mask.sum(-1, dtype=torch.int32)
