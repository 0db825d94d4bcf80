"""From scores to the positions that stay."""

from torch import Tensor

from kernels import unknown_impl


def select(scores: Tensor, num_kept: int, num_sinks: int, window: int, impl: str = "reference") -> Tensor:
    """Sinks, the most recent `window` and the best of the rest: exactly `num_kept` positions, ascending.

    Args:
        scores: [..., T]; equal scores keep the earlier position; NaN never wins.
        num_kept: 1 <= num_kept <= T, at least num_sinks + window.
    Returns:
        [..., num_kept] int64, ascending: the order of time is the order of slots.
    """
    length = scores.shape[-1]
    if not num_sinks + window <= num_kept <= length:
        raise ValueError(f"select: {num_kept} of {length} cannot hold {num_sinks} sinks and {window} recent tokens")
    match impl:
        case "reference":
            from kernels.select import reference as chosen
        case _:
            raise unknown_impl("select", impl)
    return chosen.select(scores, num_kept, num_sinks, window)
