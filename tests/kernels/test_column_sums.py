"""column_sums against fp64 softmax on the stored inputs: all queries or the last, saved log-sum-exp or its own, ragged."""

import math

import pytest
import torch

from kernels.column_sums import column_sums
from kernels.prefill_attention import prefill_attention

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# the interpreter has no bf16 products
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if CUDA else (torch.float16, torch.float32)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SMALL = {"BM": 16, "BN": 32, "num_warps": 4, "num_stages": 2, "maxnreg": None}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that an op takes without filling it holds NaN."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, plain=plain, **options: plain(*args, **options).fill_(math.nan))


def draw(batch, num_heads, num_kv_heads, length, dim, dtype, spread=1.0):
    """Views of [B, T, H, D] memory, as projections give them."""
    make = lambda h: (spread * torch.randn(batch, length, h, dim, device=DEVICE)).to(dtype).transpose(1, 2)  # noqa: E731
    return make(num_heads), make(num_kv_heads)


def oracle(q, k, scale, num_queries, reduce, lengths):
    """fp64 sums [B, Hkv, T] and log-sum-exp [B, Hq, T] (NaN behind lengths), one sequence at a time."""
    batch, num_heads, length = q.shape[:3]
    num_kv_heads = k.shape[1]
    sums = torch.zeros(batch, num_kv_heads, length, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, num_heads, length), math.nan, device=q.device)
    for seq, end in enumerate(lengths):
        keys = k[seq, :, :end].double().repeat_interleave(num_heads // num_kv_heads, 0)
        causal = torch.ones(end, end, dtype=torch.bool, device=q.device).tril()
        logits = (q[seq, :, :end].double() @ keys.mT * scale).masked_fill(~causal, -math.inf)
        rows = end if num_queries is None else min(num_queries, end)
        mass = logits.softmax(-1)[:, end - rows :].sum(1).unflatten(0, (num_kv_heads, -1))  # [Hkv, G, T]
        sums[seq, :, :end] = {"sum": mass.sum(1), "mean": mass.mean(1), "max": mass.amax(1)}[reduce]
        lse[seq, :, :end] = logits.logsumexp(-1).float()
    return sums, lse


def check(actual, expected, rows, group, reduce):
    assert actual.dtype == torch.float32 and not actual.isnan().any()
    assert float((actual.double() - expected).norm() / expected.norm()) < 2e-3
    if reduce == "sum":
        total = torch.tensor([n * group for n in rows], dtype=torch.float64, device=actual.device)[:, None]
        assert float((actual.double().sum(-1) / total - 1).abs().max()) < 1e-3


def run(q, k, num_queries, reduce, lengths, saved, impl, config):
    """Everything behind the lengths is poison; so is whatever memory the op may get."""
    group = q.shape[1] // k.shape[1]
    expected, lse = oracle(q, k, 0.2, num_queries, reduce, lengths)
    ragged = any(end < q.shape[2] for end in lengths)
    for seq, end in enumerate(lengths):
        q[seq, :, end:], k[seq, :, end:] = math.nan, math.nan
    actual = column_sums(
        q, k, 0.2, num_queries, reduce, impl,
        lse=lse if saved else None, lengths=torch.tensor(lengths, device=q.device) if ragged else None, config=config,
    )  # fmt: skip
    check(actual, expected, [min(num_queries or end, end) for end in lengths], group, reduce)
    for seq, end in enumerate(lengths):
        assert (actual[seq, :, end:] == 0).all()


@pytest.mark.parametrize("saved", (True, False), ids=("saved", "own"))
@pytest.mark.parametrize("num_queries", (None, 1, 20), ids=lambda w: f"w{w}")
@pytest.mark.parametrize("length", (1, 15, 16, 17, 63, 64, 65), ids=lambda n: f"n{n}")
@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_lengths(impl, length, num_queries, saved):
    q, k = draw(1, 4, 2, length, 16, DTYPES[-1])
    run(q, k, num_queries, "sum", [length], saved, impl, SMALL)


@pytest.mark.parametrize("saved", (True, False), ids=("saved", "own"))
@pytest.mark.parametrize("reduce", ("sum", "mean", "max"))
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_reduce(impl, dtype, reduce, saved):
    q, k = draw(2, 6, 2, 50, 32, dtype)
    run(q, k, 24, reduce, [50, 50], saved, impl, SMALL)


@pytest.mark.parametrize("saved", (True, False), ids=("saved", "own"))
@pytest.mark.parametrize("num_queries", (None, 24), ids=lambda w: f"w{w}")
@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_ragged(impl, num_queries, saved):
    q, k = draw(4, 3, 1, 70, 16, DTYPES[0])
    run(q, k, num_queries, "sum", [70, 33, 1, 20], saved, impl, SMALL)


@pytest.mark.parametrize("group", (1, 3, 4, 7, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
def test_heads(dim, group):
    """The pinned configuration."""
    q, k = draw(1, group, 1, 100, dim, DTYPES[0])
    run(q, k, None, "sum", [100], True, "triton", None)
    run(*draw(1, group, 1, 100, dim, DTYPES[0]), 10, "max", [100], False, "triton", None)


def test_few_queries_split_the_keys():
    q, k = draw(1, 2, 1, 1100, 16, DTYPES[-1])
    run(q, k, 8, "sum", [1100], False, "triton", {"BN": 256} | {key: SMALL[key] for key in ("BM", "num_warps")})


def test_large_scores():
    q, k = draw(1, 2, 1, 65, 64, DTYPES[0], spread=8.0)
    run(q, k, None, "sum", [65], False, "triton", SMALL)


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_takes_the_lse_of_prefill(impl):
    q, k = draw(1, 4, 2, 40, 64, DTYPES[-1])
    _, lse = prefill_attention(q, k, torch.zeros_like(k), 0.2, return_lse=True)
    expected, _ = oracle(q, k, 0.2, None, "sum", [40])
    check(column_sums(q, k, 0.2, impl=impl, lse=lse), expected, [40], 2, "sum")


@pytest.mark.parametrize("saved", (True, False), ids=("saved", "own"))
@pytest.mark.parametrize(("num_given", "num_queries"), ((20, 20), (20, 7), (69, 1), (1, 1)))
@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_only_the_last_queries_are_given(impl, num_given, num_queries, saved):
    """A chunked prefill holds no others."""
    q, k = draw(2, 6, 2, 70, 16, DTYPES[0])
    expected, lse = oracle(q, k, 0.2, num_queries, "sum", [70, 70])
    given = slice(70 - num_given, 70)
    lse = lse[:, :, given].contiguous() if saved else None
    check(
        column_sums(q[:, :, given], k, 0.2, num_queries, impl=impl, lse=lse, config=SMALL),
        expected,
        [num_queries] * 2,
        3,
        "sum",
    )


def test_errors():
    q, k = draw(1, 4, 2, 8, 24, torch.float32)
    with pytest.raises(ValueError, match="q and k of one prompt"):
        column_sums(q, k[:, :, :4], 1.0)
    with pytest.raises(ValueError, match="num_queries=8 are wanted, q holds only the last 4"):
        column_sums(q[:, :, :4], k, 1.0)
    with pytest.raises(ValueError, match="with lengths q must hold all 8 queries, got 4"):
        column_sums(q[:, :, :4], k, 1.0, 2, lengths=torch.tensor([8]))
    with pytest.raises(ValueError, match="reduce='median' is not one of sum, mean, max"):
        column_sums(q, k, 1.0, reduce="median")
    with pytest.raises(ValueError, match=r"wants lse \[B, Hq, Tq\]"):
        column_sums(q, k, 1.0, lse=torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="wants at least one query, got num_queries=0"):
        column_sums(q, k, 1.0, 0)
    with pytest.raises(ValueError, match="head dims .* got 24"):
        column_sums(q, k, 1.0, impl="triton")
    with pytest.raises(ValueError, match="column_sums has no implementation 'fast'"):
        column_sums(q, k, 1.0, impl="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("saved", (True, False), ids=("saved", "own"))
@pytest.mark.parametrize("num_queries", (None, 32, 64, 100), ids=lambda w: f"w{w}")
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=NAMES.get)
def test_gpu_shapes(dtype, dim, num_queries, saved):
    q, k = draw(3, 8, 2, 4097, dim, dtype)
    run(q, k, num_queries, "sum", [4097, 2500, 65], saved, "triton", None)


@pytest.mark.gpu
def test_gpu_is_deterministic():
    q, k = draw(1, 8, 2, 3000, 128, torch.bfloat16)
    assert torch.equal(column_sums(q, k, 0.1, impl="triton"), column_sums(q, k, 0.1, impl="triton"))


@pytest.mark.gpu
def test_gpu_offsets_past_2_31():
    """Rows lie 2^20 elements apart, so the last of them past 2^31; what lies between is poison."""
    length, stride = 4096, 2**20
    memory = torch.full((length * stride,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    q = memory.as_strided((1, 4, length, 64), (0, 512, stride, 1)).normal_()
    k = memory.as_strided((1, 2, length, 64), (0, 512, stride, 1), 64).normal_()
    expected, lse = oracle(q, k, 0.2, None, "sum", [length])
    check(column_sums(q, k, 0.2, impl="triton", lse=lse), expected, [length], 2, "sum")
    check(column_sums(q, k, 0.2, impl="triton"), expected, [length], 2, "sum")
