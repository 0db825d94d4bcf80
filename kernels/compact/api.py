"""Gather of the rows that stay, bit exact."""

from torch import Tensor

from kernels import need_triton, unknown_impl


def compact(
    rows: Tensor, index: Tensor, out: Tensor | None = None, impl: str = "reference", *, config: dict | None = None
) -> Tensor:
    """Rows at `index`, in new memory of their own or in `out`.

    Args:
        rows: [B, H, T, D], D contiguous.
        index: int32 or int64: [N] shared by all, or [B, H or 1, N]. An entry of -1 (select's padding) gives a row of zeros; too
            large entries raise with impl=reference and give zeros with impl=triton, which cannot raise without a host sync.
        out: [B, H, N, D] of rows' dtype, D contiguous, such as a stretch of slots; in other memory than rows.
        config: launch numbers of impl=triton in place of the pinned ones, for tuning.
    Returns:
        [B, H, N, D], same dtype and bits; `out` itself if given.
    """
    batch, num_heads, _, dim = rows.shape
    if index.dim() not in (1, 3) or (index.dim() == 3 and (index.shape[0] != batch or index.shape[1] not in (1, num_heads))):
        raise ValueError(f"compact wants index [N] or [{batch}, {num_heads} or 1, N], got {tuple(index.shape)}")
    shape = (batch, num_heads, index.shape[-1], dim)
    if out is not None and (out.shape != shape or out.dtype != rows.dtype):
        raise ValueError(f"compact wants out {shape} {rows.dtype}, got {tuple(out.shape)} {out.dtype}")
    if out is not None and out.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():
        raise ValueError("compact: out shares memory with rows, which are read while it is written")
    match impl:
        case "reference":
            from kernels.compact import reference

            return reference.compact(rows, index, out)
        case "triton":
            need_triton("compact", rows, index, *([] if out is None else [out]))
            from kernels.compact import triton

            return triton.compact(rows, index, rows.new_empty(shape) if out is None else out, config)
        case _:
            raise unknown_impl("compact", impl)
