"""From scores to the positions that stay."""

from torch import Tensor

from kernels import need_triton, unknown_impl


def select(
    scores: Tensor,
    num_kept: int,
    num_sinks: int,
    window: int,
    impl: str = "reference",
    *,
    lengths: Tensor | None = None,
    config: dict | None = None,
) -> Tensor:
    """Sinks, the most recent `window` and the best of the rest: exactly `num_kept` positions, ascending.

    Args:
        scores: [..., T], compared in fp32; equal scores keep the earlier position; NaN counts as -inf, it never wins.
        num_kept: 1 <= num_kept <= T, at least num_sinks + window.
        lengths: [...] integers on the device, 0 <= lengths <= T: row by row, only the first lengths scores exist and the window
            ends there. Not checked, since that would wait for the device. None: all T.
        config: launch numbers of impl=triton in place of the pinned ones, for tuning.
    Returns:
        [..., num_kept] int32, ascending: the order of time is the order of slots. A row with lengths < num_kept keeps all of it
        and ends in -1. compact and decode_attention take it as it is; torch's gather wants it as int64.
    """
    length = scores.shape[-1]
    if num_sinks < 0 or window < 0 or num_kept < 1 or not num_sinks + window <= num_kept <= length:
        raise ValueError(f"select: {num_kept} of {length} cannot hold {num_sinks} sinks and {window} recent tokens")
    if lengths is not None and lengths.shape != scores.shape[:-1]:
        raise ValueError(f"select wants lengths {tuple(scores.shape[:-1])} for these scores, got {tuple(lengths.shape)}")
    match impl:
        case "reference":
            from kernels.select import reference

            return reference.select(scores, num_kept, num_sinks, window, lengths)
        case "triton":
            need_triton("select", scores, *([] if lengths is None else [lengths]))
            from kernels.select import triton

            return triton.select(scores, num_kept, num_sinks, window, lengths, config)
        case _:
            raise unknown_impl("select", impl)
