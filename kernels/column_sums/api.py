"""Attention mass that each key receives, without a T x T matrix: what selection methods score with."""

from torch import Tensor

from kernels import unknown_impl


def column_sums(
    q: Tensor, k: Tensor, scale: float, num_queries: int | None = None, reduce: str = "sum", impl: str = "reference"
) -> Tensor:
    """Sum over the last `num_queries` queries (None: all) of causal softmax probability, per key and KV head.

    Args:
        q: [B, Hq, T, D]; k: [B, Hkv, T, D]; the last query sees all keys.
        reduce: how the query heads of one KV head's group are joined: "sum", "mean" or "max" of their sums.
    Returns:
        [B, Hkv, T] fp32. With "sum" it adds up to num_queries * G per KV head.
    """
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"column_sums wants q and k of one prompt, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if reduce not in ("sum", "mean", "max"):
        raise ValueError(f"column_sums: reduce={reduce!r} is not one of sum, mean, max")
    length = k.shape[2]
    window = length if num_queries is None else min(num_queries, length)
    match impl:
        case "reference":
            from kernels.column_sums import reference as chosen
        case _:
            raise unknown_impl("column_sums", impl)
    return chosen.column_sums(q, k, scale, window, reduce)
