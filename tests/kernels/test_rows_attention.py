"""rows_attention against masked attention in fp64, over rows and keys in any order."""

import pytest
import torch

from kernels.prefill_attention import lists_of
from kernels.rows_attention import NO_KEY, NO_ROW, rows_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(group, num_lists, block, dtype, num_rows=2, num_keys=3, batch=2):
    """Shuffled positions with gaps, half-filled last blocks, random lists."""
    num_kv_heads, dim = 2, 16
    draw = lambda heads, n: torch.randn(batch, heads, n * block, dim, device=DEVICE).to(dtype)  # noqa: E731
    q, k, v = draw(group * num_kv_heads, num_rows), draw(num_kv_heads, num_keys), draw(num_kv_heads, num_keys)
    rows = torch.randperm(num_rows * block * 2, device=DEVICE)[: num_rows * block].int()
    keys = torch.randperm(num_keys * block * 2, device=DEVICE)[: num_keys * block].int()
    rows[-5:], keys[-7:] = NO_ROW, NO_KEY
    mask = torch.rand(batch, num_lists, num_rows, num_keys, device=DEVICE) < 0.6
    mask[0, 0, 1] = False  # a block of rows that sees nothing
    return q, k, v, rows, keys, mask


def oracle(q, k, v, rows, keys, mask, block, scale):
    wide = [x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    seen = mask.repeat_interleave(block, 2).repeat_interleave(block, 3) & (keys <= rows[:, None])
    seen = seen.repeat_interleave(q.shape[1] // seen.shape[1], 1)
    logits = (q.double() @ wide[0].mT * scale).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0) @ wide[1]


@pytest.mark.parametrize("num_lists", (1, 2), ids=("shared", "per_head"))
@pytest.mark.parametrize("group", (1, 3, 4), ids=lambda g: f"G{g}")
@pytest.mark.parametrize(
    ("impl", "dtype", "block"),
    (
        ("reference", torch.float64, 64),
        ("reference", torch.float32, 16),
        ("triton", torch.float32, 16),
        ("triton", torch.float16, 16),
        ("triton", torch.float16, 64),
    ),
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_is_masked_attention(impl, dtype, block, group, num_lists):
    if impl == "triton":
        pytest.importorskip("triton")
    q, k, v, rows, keys, mask = case(group, num_lists, block, dtype)
    out = rows_attention(q, k, v, rows, keys, lists_of(mask), block, 0.3, impl)
    expected = oracle(q, k, v, rows, keys, mask, block, 0.3)
    assert out.dtype == dtype and (out.double() - expected).abs().max() < TOLERANCE[dtype]
    assert (out[:, :, -5:] == 0).all(), "a row without a position sees nothing"


@pytest.mark.parametrize("impl", ("reference", "triton"))
def test_what_no_list_names_is_not_read(impl):
    q, k, v, rows, keys, mask = case(3, 2, 16, torch.float32)
    mask[..., 2] = False
    lists = lists_of(mask)
    expected = rows_attention(q, k, v, rows, keys, lists, 16, 0.3, impl)
    k[:, :, 32:48] = v[:, :, 32:48] = torch.nan
    assert torch.equal(rows_attention(q, k, v, rows, keys, lists, 16, 0.3, impl), expected)


def test_mistakes_are_named():
    q, k, v, rows, keys, mask = case(1, 1, 16, torch.float32)
    lists = lists_of(mask)
    with pytest.raises(ValueError, match="block_size=24 must divide 32 rows and 48 keys"):
        rows_attention(q, k, v, rows, keys, lists, 24, 1.0)
    with pytest.raises(ValueError, match="wants int32 positions of 32 rows and 48 keys"):
        rows_attention(q, k, v, rows.long(), keys, lists, 16, 1.0)
    with pytest.raises(ValueError, match=r"wants int32 lists \[B, Hkv or 1, 2, M\]"):
        rows_attention(q, k, v, rows, keys, lists_of(mask[:, :, :1]), 16, 1.0)
    with pytest.raises(ValueError, match=r"wants q \[B, Hq, P, D\] and k, v"):
        rows_attention(q, k, v[:, :, :16], rows, keys, lists, 16, 1.0)
    with pytest.raises(ValueError, match="rows_attention has no implementation 'sdpa'"):
        rows_attention(q, k, v, rows, keys, lists, 16, 1.0, "sdpa")
