"""One decode step of H2O (arXiv 2306.14048): add the step's probabilities, claim a slot for the next token."""

import torch
from torch import Tensor

from kernels import unknown_impl


def h2o_update(
    scores: Tensor,
    positions: Tensor,
    logits: Tensor,
    lse: Tensor,
    lengths: Tensor,
    seen: Tensor,
    num_recent: int,
    score: str = "sum",
    impl: str = "reference",
    *,
    config: dict | None = None,
) -> Tensor:
    """Scores of the filled slots grow by the step's probabilities, summed over the heads of the group; then each KV head names
    the slot that the next token overwrites, and that slot's score and position become the next token's.

    The slot is the first empty one while lengths[b] < C. Behind that it is the lowest score among slots whose token is older
    than the newest `num_recent`; equal scores give the earliest position; with nothing older, the oldest token goes.

    Args:
        scores: [B, Hkv, C] fp32, contiguous, in place; not negative.
        positions: [B, Hkv, C] int32, contiguous, in place: each slot's token position in its sequence.
        logits, lse: [B, Hq, C] and [B, Hq] fp32, contiguous, as decode_attention gives them for this step.
        lengths: [B] integers, filled slots, the same for all heads.
        seen: [B] integers, tokens so far, the one of this step included: it has position seen - 1, the next one seen.
        num_recent: positions seen - num_recent .. seen - 1 are kept.
        score: what is compared: "sum", or "mean" = sum / (seen - position), the number of queries that saw the key.
        config: launch numbers of impl=triton in place of the pinned ones, for tuning.
    Returns:
        slot [B, Hkv] int64, where the next token goes (append takes it as it is); there scores is 0 and positions is seen.
    """
    batch, num_kv_heads, num_slots = scores.shape
    if positions.shape != scores.shape or logits.shape[::2] != (batch, num_slots) or logits.shape[1] % num_kv_heads:
        raise ValueError(
            f"h2o_update wants scores, positions [B, Hkv, C] and logits [B, Hq, C], got {tuple(scores.shape)}, "
            f"{tuple(positions.shape)}, {tuple(logits.shape)}"
        )
    if lse.shape != logits.shape[:2] or lengths.shape != (batch,) or seen.shape != (batch,):
        raise ValueError("h2o_update wants lse [B, Hq], lengths [B] and seen [B]")
    if positions.dtype != torch.int32 or scores.dtype != torch.float32:
        raise ValueError(f"h2o_update wants fp32 scores and int32 positions, got {scores.dtype}, {positions.dtype}")
    if score not in ("sum", "mean"):
        raise ValueError(f"h2o_update: score={score!r} is not one of sum, mean")
    match impl:
        case "reference":
            from kernels.h2o_update import reference

            return reference.h2o_update(scores, positions, logits, lse, lengths, seen, num_recent, score)
        case "triton":
            from kernels.h2o_update import triton

            return triton.h2o_update(scores, positions, logits, lse, lengths, seen, num_recent, score, config)
        case _:
            raise unknown_impl("h2o_update", impl)
