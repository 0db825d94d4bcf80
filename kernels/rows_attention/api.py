"""Causal attention of rows in any order: positions are given, keys come in listed blocks. For prompts that are regrouped."""

import torch
from torch import Tensor

from kernels import unknown_impl

NO_ROW, NO_KEY = -1, torch.iinfo(torch.int32).max  # positions that fill up a block: sees nothing, seen by nothing


def rows_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    blocks: tuple[Tensor, Tensor],
    block_size: int,
    scale: float,
    impl: str = "reference",
    *,
    config: dict | None = None,
) -> Tensor:
    """Row i attends to the keys of its block's list whose position is not behind its own.

    Args:
        q: [B, Hq, P, D]; k, v: [B, Hkv, N, D], Hq a multiple of Hkv, D contiguous, all finite where a position is none too.
        q_positions: [P] int32, NO_ROW for none; k_positions: [N] int32, NO_KEY for none. Shared by the batch.
        blocks: (index [B, Hkv or 1, P / block_size, M], count [B, Hkv or 1, P / block_size]), int32: the blocks of keys that a
            block of rows attends to, each once; entries from `count` on are never read. kernels.prefill_attention.lists_of
            makes them from a mask.
        block_size: rows and keys per block, divides P and N.
        config: overrides of the pinned Triton configuration.
    Returns:
        [B, Hq, P, D] in q's dtype; zeros where a row sees nothing.
    """
    batch, num_heads, num_rows, dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != batch or num_heads % num_kv_heads or k.shape[3] != dim:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"rows_attention wants q [B, Hq, P, D] and k, v [B, Hkv, N, D], got {shapes}")
    if num_rows % block_size or num_keys % block_size:
        raise ValueError(f"rows_attention: block_size={block_size} must divide {num_rows} rows and {num_keys} keys")
    wanted = (num_rows,), (num_keys,)
    if (q_positions.shape, k_positions.shape) != wanted or {q_positions.dtype, k_positions.dtype} != {torch.int32}:
        raise ValueError(f"rows_attention wants int32 positions of {num_rows} rows and {num_keys} keys")
    index, count = blocks
    good = index.dim() == 4 and index.shape[:3] == count.shape and index.shape[1] in (num_kv_heads, 1)
    if not good or count.shape[::2] != (batch, num_rows // block_size) or {index.dtype, count.dtype} != {torch.int32}:
        raise ValueError(
            f"rows_attention wants int32 lists [B, Hkv or 1, {num_rows // block_size}, M] and their counts, got "
            f"{index.dtype} {tuple(index.shape)}, {count.dtype} {tuple(count.shape)}"
        )
    match impl:
        case "reference":
            from kernels.rows_attention import reference as chosen

            return chosen.rows_attention(q, k, v, q_positions, k_positions, index, count, block_size, scale)
        case "triton":
            from kernels.rows_attention import triton as chosen

            return chosen.rows_attention(q, k, v, q_positions, k_positions, index, count, block_size, scale, config)
        case _:
            raise unknown_impl("rows_attention", impl)
