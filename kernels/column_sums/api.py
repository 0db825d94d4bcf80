"""Attention mass that each key receives, without a T x T matrix: what selection methods score with."""

from torch import Tensor

from kernels import unknown_impl


def column_sums(
    q: Tensor,
    k: Tensor,
    scale: float,
    num_queries: int | None = None,
    reduce: str = "sum",
    impl: str = "reference",
    *,
    lse: Tensor | None = None,
    lengths: Tensor | None = None,
    config: dict | None = None,
) -> Tensor:
    """Sum over the last `num_queries` queries (None: all) of causal softmax probability, per key and KV head.

    Args:
        q: [B, Hq, Tq, D]; k: [B, Hkv, T, D], D contiguous. The queries are the last Tq <= T of the prompt; query t sees keys
            0 to t.
        scale: factor of q.k.
        reduce: how the query heads of one KV head's group are joined: "sum", "mean" or "max" of their sums.
        lse: [B, Hq, Tq] natural log-sum-exp of each query's logits, as prefill_attention returns it; None: computed here
            for the queries that count. Rows of other queries are never read.
        lengths: [B] integers <= T, the live tokens of each sequence (None: T), for Tq = T; what lies behind is never read.
        config: overrides of the pinned Triton configuration.
    Returns:
        [B, Hkv, T] fp32 (reference on fp64 inputs: fp64), 0 behind `lengths`. With "sum" it adds up to
        min(num_queries, length) * G per KV head.
    """
    batch, num_heads, num_given, dim = q.shape
    length = k.shape[2]
    if (k.shape[0], k.shape[3]) != (batch, dim) or num_heads % k.shape[1] or num_given > length:
        raise ValueError(f"column_sums wants q and k of one prompt, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if reduce not in ("sum", "mean", "max"):
        raise ValueError(f"column_sums: reduce={reduce!r} is not one of sum, mean, max")
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"column_sums wants lse [B, Hq, Tq] = {tuple(q.shape[:3])}, got {tuple(lse.shape)}")
    if lengths is not None and lengths.shape != (batch,):
        raise ValueError(f"column_sums wants lengths [{batch}], got {tuple(lengths.shape)}")
    if lengths is not None and num_given != length:
        raise ValueError(f"column_sums: with lengths q must hold all {length} queries, got {num_given}")
    window = length if num_queries is None else min(num_queries, length)
    if window < 1:
        raise ValueError(f"column_sums wants at least one query, got num_queries={num_queries}")
    if window > num_given:
        raise ValueError(f"column_sums: num_queries={window} are wanted, q holds only the last {num_given}")
    match impl:
        case "reference":
            from kernels.column_sums import reference as chosen

            return chosen.column_sums(q, k, scale, window, reduce, lse, lengths)
        case "triton":
            from kernels.column_sums import triton as chosen

            return chosen.column_sums(q, k, scale, window, reduce, lse, lengths, config)
        case _:
            raise unknown_impl("column_sums", impl)
