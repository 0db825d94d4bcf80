"""compact is bit exact: against plain indexing; on CPU interpreted, on a GPU compiled."""

import pytest
import torch

from kernels.compact import compact

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
IMPLS = ("reference", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.float8_e4m3fn)


def rows_of(*shape, dtype=torch.float16):
    """Random bits, NaN with payloads and negative zeros among them."""
    width = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, device=DEVICE).view(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8)


def index_of(kind, batch, heads, num_rows, num_kept, dtype):
    shape = {"shared": (1,), "per_sequence": (batch, 1), "per_head": (batch, heads)}[kind]
    picks = torch.rand(*shape, num_rows, device=DEVICE).argsort(-1)[..., :num_kept].sort(-1).values.to(dtype)
    return picks[0] if kind == "shared" else picks


def expected_of(rows, index):
    batch, heads, _, dim = rows.shape
    index = index.long().expand(batch, heads, -1) if index.dim() == 3 else index.long().expand(batch, heads, -1)
    kept = torch.zeros(batch, heads, index.shape[2], dim, dtype=rows.dtype, device=rows.device)
    for b in range(batch):
        for h in range(heads):
            inside = index[b, h] >= 0
            kept[b, h, inside] = rows[b, h][index[b, h][inside]]
    return kept


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ("shared", "per_sequence", "per_head"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits(dtype, kind, impl):
    rows = rows_of(2, 3, 90, 24, dtype=dtype)
    index = index_of(kind, 2, 3, 90, 37, torch.int32)
    kept = compact(rows, index, impl=impl)
    assert kept.dtype == dtype and torch.equal(bits(kept), bits(expected_of(rows.view(torch.uint8), index)))
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("num_kept", (1, 15, 16, 17, 63, 64, 65), ids=lambda n: f"n{n}")
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
def test_shapes(dim, num_kept, index_dtype, impl):
    rows = rows_of(1, 2, 70, dim)
    index = index_of("per_head", 1, 2, 70, num_kept, index_dtype)
    assert torch.equal(bits(compact(rows, index, impl=impl)), bits(expected_of(rows, index)))


@pytest.mark.parametrize("impl", IMPLS)
def test_out_is_a_stretch_of_slots(impl):
    rows, index = rows_of(2, 2, 50, 32), index_of("per_head", 2, 2, 50, 20, torch.int64)
    slots = rows_of(2, 2, 40, 32)
    before = slots.clone()
    kept = compact(rows, index, slots[:, :, 5:25], impl)
    assert kept.data_ptr() == slots[:, :, 5:].data_ptr()
    assert torch.equal(bits(slots[:, :, 5:25]), bits(expected_of(rows, index)))
    assert torch.equal(bits(slots[:, :, :5]), bits(before[:, :, :5]))
    assert torch.equal(bits(slots[:, :, 25:]), bits(before[:, :, 25:]))


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_rows_and_index(impl):
    rows = rows_of(2, 50, 3, 32).transpose(1, 2)
    index = index_of("per_head", 2, 3, 50, 20, torch.int32).repeat_interleave(2, dim=-1)[..., ::2]
    assert torch.equal(bits(compact(rows, index, impl=impl)), bits(expected_of(rows, index)))


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_gives_zeros(impl):
    rows, index = rows_of(1, 2, 30, 16), torch.tensor([[[3, 29, -1], [0, -1, -1]]], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, 2, 3, 16), torch.nan, dtype=rows.dtype, device=DEVICE)
    compact(rows, index, out, impl)
    assert torch.equal(bits(out), bits(expected_of(rows, index)))


def test_refusals():
    rows = torch.zeros(2, 3, 8, 4)
    with pytest.raises(ValueError, match=r"wants index \[N\] or \[2, 3 or 1, N\], got \(2, 2, 4\)"):
        compact(rows, torch.zeros(2, 2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"wants out \(2, 3, 4, 4\) torch.float32, got \(2, 3, 5, 4\)"):
        compact(rows, torch.arange(4), torch.zeros(2, 3, 5, 4))
    with pytest.raises(ValueError, match="out shares memory with rows"):
        compact(rows, torch.arange(4), rows[:, :, :4])
    with pytest.raises((IndexError, RuntimeError)):
        compact(rows, torch.tensor([8]))
    with pytest.raises(ValueError, match="compact has no implementation 'fast'"):
        compact(rows, torch.arange(4), impl="fast")


@pytest.mark.gpu
def test_selected_positions_at_size():
    from kernels.select import select

    rows = torch.randn(4, 8, 4097, 128, device=DEVICE, dtype=torch.bfloat16)
    kept = select(torch.randn(4, 8, 4097, device=DEVICE), 819, 4, 64, "triton")
    assert torch.equal(compact(rows, kept, impl="triton"), compact(rows, kept))


@pytest.mark.gpu
def test_offsets_past_2_31():
    rows = torch.randint(-128, 128, (3, 2**30 // 128 + 5, 1, 128), dtype=torch.int8, device=DEVICE).transpose(1, 2)
    index = torch.tensor([0, 5, 2**30 // 128 + 4], device=DEVICE)
    assert torch.equal(compact(rows, index, impl="triton"), rows[:, :, index])
