"""prefill_attention against fp64 on the stored inputs: dense and by block lists, whole prompts and continuing chunks."""

import math

import pytest
import torch

from kernels.prefill_attention import backend_of, lists_of, prefill_attention

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# the interpreter has no bf16 products
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if CUDA else (torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}
SMALL = {"BM": 32, "BN": 16, "num_warps": 4, "num_stages": 2}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that an op takes without filling it holds NaN."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, plain=plain, **options: plain(*args, **options).fill_(math.nan))


def draw(batch, num_heads, num_kv_heads, num_queries, num_keys, dim, dtype, spread=1.0):
    """Views of [B, T, H, D] memory, as projections give them."""
    make = lambda n, h: (spread * torch.randn(batch, n, h, dim, device=DEVICE)).to(dtype).transpose(1, 2)  # noqa: E731
    return make(num_queries, num_heads), make(num_keys, num_kv_heads), make(num_keys, num_kv_heads)


def oracle(q, k, v, scale, seen=None):
    """fp64 output and log-sum-exp; seen [B, Hq | 1, Tq, Tk] bool narrows causality."""
    group, num_queries, num_keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    seen = causal if seen is None else causal & seen
    logits = (q.double() @ k.mT * scale).masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None].nan_to_num(neginf=0.0)).exp() @ v, lse


def close(actual, expected, dtype, tolerance=None):
    (out, lse), (out_64, lse_64) = actual, expected
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert float((out.double() - out_64).norm() / out_64.norm()) < (tolerance or TOLERANCE[dtype])
    assert torch.equal(lse.isneginf(), lse_64.isneginf())
    finite = ~lse_64.isneginf()
    assert float((lse.double() - lse_64)[finite].abs().max()) < 1e-3


@pytest.mark.parametrize("chunk", (None, 5), ids=("whole", "chunk5"))
@pytest.mark.parametrize("num_keys", (1, 15, 16, 17, 63, 64, 65), ids=lambda n: f"n{n}")
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("impl", ("sdpa", "triton", "reference"))
def test_dense(impl, dtype, num_keys, chunk):
    num_queries = min(chunk or num_keys, num_keys)
    if impl == "sdpa" and CUDA and dtype == torch.float32 and num_queries < num_keys:
        pytest.skip("no library kernel takes an fp32 chunk")
    q, k, v = draw(2, 6, 2, num_queries, num_keys, 64, dtype)
    config = SMALL if impl == "triton" else None
    actual = prefill_attention(q, k, v, 0.2, return_lse=True, impl=impl, config=config)
    # PyTorch's fp32 kernel on a GPU goes through the tensor cores
    close(actual, oracle(q, k, v, 0.2), dtype, 1e-4 if CUDA and impl == "sdpa" and dtype == torch.float32 else None)


@pytest.mark.parametrize("group", (1, 4, 7, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("dim", (16, 64, 128, 256), ids=lambda d: f"D{d}")
def test_triton_heads(dim, group):
    dtype = DTYPES[0]
    q, k, v = draw(1, group, 1, 40, 70, dim, dtype)
    close(prefill_attention(q, k, v, dim**-0.5, return_lse=True, impl="triton"), oracle(q, k, v, dim**-0.5), dtype)


def test_large_scores():
    q, k, v = draw(1, 2, 1, 33, 33, 64, DTYPES[0], spread=8.0)
    close(prefill_attention(q, k, v, 1.0, return_lse=True, impl="triton", config=SMALL), oracle(q, k, v, 1.0), DTYPES[0])


def spread_out(mask, block_size, num_queries, num_keys):
    """Block mask -> token mask."""
    return mask.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)[:, :, :num_queries, :num_keys]


@pytest.mark.parametrize("num_queries, num_keys", ((70, 70), (1, 65), (40, 97), (33, 64)), ids=lambda n: f"{n}")
@pytest.mark.parametrize("lists", ("query", "kv", "one"))
@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_blocks(impl, lists, num_queries, num_keys):
    """Any lists: blocks left out, the diagonal left out, none at all, some in the future; padding is never read."""
    size, dtype = 16, DTYPES[-1] if impl == "triton" else torch.float32
    q, k, v = draw(2, 4, 2, num_queries, num_keys, 64, dtype)
    heads = {"query": 4, "kv": 2, "one": 1}[lists]
    mask = torch.rand(2, heads, -(-num_queries // size), -(-num_keys // size), device=DEVICE) < 0.5
    mask[0, 0, 0] = False
    index, count = lists_of(mask)
    index[torch.arange(index.shape[-1], device=DEVICE) >= count[..., None]] = -(2**30)
    seen = spread_out(mask, size, num_queries, num_keys).repeat_interleave(4 // heads, 1)
    actual = prefill_attention(q, k, v, 0.2, return_lse=True, blocks=(index, count), block_size=size, impl=impl, config=SMALL)
    close(actual, oracle(q, k, v, 0.2, seen), dtype)
    assert not actual[0].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("tile", (64, 32, 16), ids=lambda n: f"tile{n}")
def test_block_of_several_tiles(tile, dtype):
    q, k, v = draw(1, 2, 1, 150, 150, 64, dtype)
    mask = torch.rand(1, 2, 3, 3, device=DEVICE) < 0.6
    mask |= torch.eye(3, dtype=torch.bool, device=DEVICE)
    config = {"BM": 64, "BN": tile, "num_warps": 4, "num_stages": 2}
    actual = prefill_attention(
        q, k, v, 0.2, return_lse=True, blocks=lists_of(mask), block_size=64, impl="triton", config=config
    )
    close(actual, oracle(q, k, v, 0.2, spread_out(mask, 64, 150, 150)), dtype)


def test_lists_of():
    index, count = lists_of(torch.tensor([[[[True, False, True], [False, False, False]]]]))
    assert count.tolist() == [[[2, 0]]] and index[0, 0, 0, :2].tolist() == [0, 2] and index.dtype == torch.int32


def test_all_listed_is_dense():
    q, k, v = draw(1, 4, 2, 50, 50, 64, DTYPES[-1])
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE)
    listed = prefill_attention(q, k, v, 0.2, blocks=lists_of(mask), block_size=16, impl="triton")
    assert torch.allclose(listed, prefill_attention(q, k, v, 0.2, impl="triton", config={"BM": 16, "BN": 16}), atol=1e-6)


def test_errors():
    q, k, v = draw(1, 4, 2, 8, 8, 24, torch.float32)
    with pytest.raises(ValueError, match="Tq <= Tk"):
        prefill_attention(q, k[:, :, :4], v[:, :, :4], 1.0)
    with pytest.raises(ValueError, match=r"head dims \[16, 32, 64, 128, 256\], got 24"):
        prefill_attention(q, k, v, 1.0, impl="triton")
    with pytest.raises(ValueError, match="no implementation 'fast'; it has: sdpa, triton, reference"):
        prefill_attention(q, k, v, 1.0, impl="fast")
    blocks = lists_of(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match="impl=sdpa has no block lists"):
        prefill_attention(q, k, v, 1.0, blocks=blocks)
    with pytest.raises(ValueError, match="int32 block lists"):
        prefill_attention(q, k, v, 1.0, blocks=(blocks[0].long(), blocks[1]))


def test_backend_on_cpu():
    q, k, _ = (x.cpu() for x in draw(1, 4, 2, 8, 8, 64, torch.float32))
    assert backend_of(q, k) == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=NAMES.get)
def test_backend_on_gpu_is_never_math(dtype):
    for dim in (64, 128, 256):
        q, k, v = draw(1, 8, 2, 300, 300, dim, dtype)
        names = ("cudnn", "flash") if torch.cuda.get_device_capability()[0] in (9, 10) else ("flash",)
        assert backend_of(q, k) in names
        assert backend_of(q[:, :, 100:], k) == "flash"
        close(prefill_attention(q, k, v, dim**-0.5, return_lse=True), oracle(q, k, v, dim**-0.5), dtype)
        chunk = q[:, :, 100:]
        close(prefill_attention(chunk, k, v, dim**-0.5, return_lse=True), oracle(chunk, k, v, dim**-0.5), dtype)
        without = prefill_attention(q, k, v, dim**-0.5)
        assert torch.allclose(without, prefill_attention(q, k, v, dim**-0.5, return_lse=True)[0], atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=NAMES.get)
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("num_queries, num_keys", ((4097, 4097), (1000, 4097), (129, 2048)), ids=lambda n: f"{n}")
def test_gpu_shapes(num_queries, num_keys, dim, dtype):
    q, k, v = draw(1, 8, 2, num_queries, num_keys, dim, dtype)
    close(prefill_attention(q, k, v, dim**-0.5, return_lse=True, impl="triton"), oracle(q, k, v, dim**-0.5), dtype)
    mask = torch.rand(1, 8, -(-num_queries // 128), -(-num_keys // 128), device=DEVICE) < 0.4
    actual = prefill_attention(q, k, v, dim**-0.5, return_lse=True, blocks=lists_of(mask), impl="triton")
    close(actual, oracle(q, k, v, dim**-0.5, spread_out(mask, 128, num_queries, num_keys)), dtype)


@pytest.mark.gpu
def test_gpu_offsets_past_2_31():
    """The last head and the last rows of K lie past 2^31 elements; rows between are poison."""
    num_keys, stride = 4096, 2**20
    memory = torch.full((num_keys * stride,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    k = memory.as_strided((1, 2, num_keys, 64), (0, 512, stride, 1)).normal_()
    v = memory.as_strided((1, 2, num_keys, 64), (0, 512, stride, 1), 64).normal_()
    q, _, _ = draw(1, 4, 2, 130, 16, 64, torch.bfloat16)
    close(prefill_attention(q, k, v, 0.2, return_lse=True, impl="triton"), oracle(q, k, v, 0.2), torch.bfloat16)
    mask = torch.ones(1, 1, 2, 32, dtype=torch.bool, device=DEVICE)
    actual = prefill_attention(q, k, v, 0.2, return_lse=True, blocks=lists_of(mask), impl="triton")
    close(actual, oracle(q, k, v, 0.2), torch.bfloat16)


@pytest.mark.gpu
def test_gpu_graph():
    """A captured graph follows new lists: nothing of them was read on the host."""
    q, k, v = draw(1, 8, 2, 512, 512, 128, torch.bfloat16)
    masks = [(torch.rand(1, 8, 4, 4, device=DEVICE) < 0.5) | torch.eye(4, dtype=torch.bool, device=DEVICE) for _ in range(2)]
    index, count = lists_of(masks[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        prefill_attention(q, k, v, 0.1, blocks=(index, count), impl="triton")
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = prefill_attention(q, k, v, 0.1, return_lse=True, blocks=(index, count), impl="triton")
    for mask in masks:
        for held, new in zip((index, count), lists_of(mask), strict=True):
            held.copy_(new)
        graph.replay()
        close(actual, oracle(q, k, v, 0.1, spread_out(mask, 128, 512, 512)), torch.bfloat16)
