"""decode_attention against softmax in fp64 on the stored inputs; on CPU interpreted (fp16, fp32), on a GPU compiled."""

import pytest
import torch

from kernels.decode_attention import decode_attention

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# relative RMS; fp32 products are exact to rounding on both sides
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if CUDA else (torch.float16, torch.float32)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)
# small blocks: the interpreter sees several splits, each with several blocks
SMALL = {"block": 16, "num_warps": 4, "num_stages": 2, "programs": 8}
FULL = {**SMALL, "programs": 1}


def oracle(q, k, v, lengths, scale, listed=None):
    """Out [B, Hq, D] and lse [B, Hq] in fp64, one query head at a time; listed [B, Hkv, C] bool."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for seq, used in enumerate(lengths.tolist()):
        for head in range(q.shape[1]):
            rows = torch.arange(used)
            if listed is not None:
                rows = rows[listed[seq, head // group, :used].cpu()]
            if len(rows) == 0:
                continue
            keys, values = (x[seq, head // group].cpu().double()[rows] for x in (k, v))
            logits = keys @ q[seq, head].cpu().double() * scale
            out[seq, head], lse[seq, head] = logits.softmax(0) @ values, logits.logsumexp(0)
    return out, lse


def tensors(batch, heads, group, num_slots, dim, dtype, lengths, spread=1.0):
    """q, k, v, lengths; slots behind the lengths are NaN."""
    q = (torch.randn(batch, heads * group, dim, device=DEVICE) * spread).to(dtype)
    k, v = (torch.randn(batch, heads, num_slots, dim, device=DEVICE).to(dtype) for _ in "kv")
    for seq, used in enumerate(lengths):
        k[seq, :, used:], v[seq, :, used:] = torch.nan, torch.nan
    return q, k, v, torch.tensor(lengths, device=DEVICE)


def check(actual, expected, dtype):
    (out, lse), (want, want_lse) = (x.cpu().double() for x in actual), expected
    assert not out.isnan().any() and not lse.isnan().any()
    assert (out - want).norm() <= TOLERANCE[dtype] * want.norm()
    nothing = want_lse.isinf()
    assert torch.equal(lse.isinf(), nothing)
    assert ((lse - want_lse)[~nothing].abs() <= 1e-3).all()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What a launcher allocates and no program writes is NaN."""
    from kernels.decode_attention import triton

    def poisoned(*shape, dtype, device):
        return torch.empty(*shape, dtype=dtype, device=device).fill_(torch.nan)

    monkeypatch.setattr(triton, "empty", poisoned)


@pytest.mark.parametrize("config", (SMALL, {**SMALL, "fused": False}, FULL, None), ids=("fused", "merged", "one", "pinned"))
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"n{n}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype, length, config):
    # ragged: the second sequence leaves splits empty
    lengths = [length, max(1, length // 3)]
    # one number of slots for all lengths: one compilation each on a GPU
    case = tensors(2, 1, 4, 150, 64, dtype, lengths)
    check(decode_attention(*case, 0.2, "triton", config=config), oracle(*case, 0.2), dtype)


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "merged"))
@pytest.mark.parametrize("dim", (64, 128, 256, 16, 80), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("group", (1, 3, 4, 7, 8, 71), ids=lambda g: f"G{g}")
def test_groups_and_dims(group, dim, fused):
    dtype = DTYPES[0] if group == 4 else DTYPES[1]
    case = tensors(1, 2, group, 70, dim, dtype, [67])
    config = {**SMALL, "programs": 12, "fused": fused}
    check(decode_attention(*case, 0.1, "triton", config=config), oracle(*case, 0.1), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(dtype):
    case = tensors(2, 1, 4, 80, 64, dtype, [80, 33], spread=50.0)
    check(decode_attention(*case, 1.0, "triton", config=SMALL), oracle(*case, 1.0), dtype)


@pytest.mark.parametrize("impl", ("reference", "triton"))
def test_no_slots_give_zero(impl):
    case = tensors(2, 1, 3, 40, 64, torch.float32, [0, 40])
    check(decode_attention(*case, 0.2, impl, config=SMALL), oracle(*case, 0.2), torch.float32)


def test_heads_behind_tokens():
    q, k, v, lengths = tensors(2, 2, 4, 50, 64, torch.float32, [50, 9])
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    fused = torch.cat([q, q], dim=1)[:, :8]
    check(decode_attention(fused, *strided, lengths, 0.2, "triton", config=SMALL), oracle(q, k, v, lengths, 0.2), torch.float32)


def test_same_bits_every_time():
    case = tensors(1, 2, 4, 130, 64, torch.float32, [130])
    first = decode_attention(*case, 0.2, "triton", config=SMALL)
    for _ in range(3):
        again = decode_attention(*case, 0.2, "triton", config=SMALL)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("impl", ("reference", "triton"))
@pytest.mark.parametrize("block_size", (1, 16, 64, 128), ids=lambda b: f"block{b}")
@pytest.mark.parametrize("shared", (True, False), ids=("shared", "per-head"))
@pytest.mark.parametrize("counted", (True, False), ids=("index_lens", "all"))
def test_index(impl, block_size, shared, counted):
    num_slots = 100 if block_size == 1 else 300
    case = tensors(2, 2, 4, num_slots, 64, DTYPES[-1], [num_slots - 7, num_slots // 2])
    num_blocks = -(-num_slots // block_size)
    num_entries = max(1, num_blocks // 2)
    heads = 1 if shared else 2
    index = torch.stack([torch.randperm(num_blocks)[:num_entries].sort().values for _ in range(2 * heads)])
    index = index.view(2, heads, -1).int()
    index_lens = torch.tensor([num_entries, num_entries // 2]) if counted else None
    listed = torch.zeros(2, 2, num_slots, dtype=torch.bool)
    for seq in range(2):
        for head in range(2):
            entries = index[seq, 0 if shared else head]
            for entry in (entries[: index_lens[seq]] if counted else entries).tolist():
                listed[seq, head, entry * block_size : (entry + 1) * block_size] = True
    if counted:
        # behind the count anything may lie
        index[1, :, num_entries // 2 :] = 2**30 // block_size
        index_lens = index_lens.to(DEVICE)
    actual = decode_attention(
        *case, 0.2, impl, index=index.to(DEVICE), index_lens=index_lens, block_size=block_size, config=SMALL
    )
    check(actual, oracle(*case, 0.2, listed), DTYPES[-1])


@pytest.mark.parametrize("impl", ("reference", "triton"))
def test_index_without_slots(impl):
    # negative entries first, last and as whole blocks; slots behind the length
    index = torch.full((2, 1, 40), -1, dtype=torch.int32, device=DEVICE)
    index[0, 0, 20:23] = torch.tensor([3, 8, 31], device=DEVICE)
    index[1, 0, :2] = torch.tensor([30, 35], device=DEVICE)
    case = tensors(2, 1, 4, 40, 64, torch.float32, [32, 30])
    listed = torch.zeros(2, 1, 40, dtype=torch.bool)
    listed[0, 0, [3, 8, 31]] = True
    actual = decode_attention(*case, 0.2, impl, index=index, config=SMALL)
    check(actual, oracle(*case, 0.2, listed), torch.float32)


@pytest.mark.parametrize("impl", ("reference", "triton"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits(dtype, impl):
    q, k, v, lengths = tensors(2, 2, 3, 70, 64, dtype, [65, 18])
    logits = torch.full((3, 6, 70), torch.nan, device=DEVICE)
    actual = decode_attention(q, k, v, lengths, 0.2, impl, logits=logits[:2], config=SMALL)
    check(actual, oracle(q, k, v, lengths, 0.2), dtype)
    for seq, used in enumerate(lengths.tolist()):
        want = torch.einsum("hgd,hcd->hgc", q[seq].view(2, 3, 64).double(), k[seq, :, :used].double()).flatten(0, 1) * 0.2
        assert (logits[seq, :, :used] - want).abs().max() <= 1e-4
    assert logits[2].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("group", (1, 4, 7, 8), ids=lambda g: f"G{g}")
def test_pinned_on_the_gpu(group, dim):
    for batch, lengths in ((1, [4097]), (3, [1, 4096, 8191]), (24, [65] * 23 + [4097])):
        q, k, v, used = tensors(batch, 4, group, 8192, dim, torch.bfloat16, lengths)
        # the loop of oracle() takes minutes here
        expected = decode_attention(q.double(), k.double(), v.double(), used, dim**-0.5)
        actual = decode_attention(q, k, v, used, dim**-0.5, "triton")
        check(actual, [x.cpu() for x in expected], torch.bfloat16)


@pytest.mark.gpu
def test_slots_behind_2_to_the_31():
    num_slots = 9 * 2**20
    q = torch.randn(1, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(1, 2, num_slots, 128, dtype=torch.bfloat16, device=DEVICE)
    # the last slot takes all weight
    k[:, :, -1] = q[:, ::2] * 10
    index = torch.arange(num_slots - 300, num_slots, dtype=torch.int32, device=DEVICE)[None, None]
    lengths = torch.tensor([num_slots], device=DEVICE)
    for options in ({}, {"index": index}):
        out, _ = decode_attention(q, k, k, lengths, 1.0, "triton", **options)
        for head in (0, 2):
            assert torch.equal(out[0, head], k[0, head // 2, -1])


@pytest.mark.gpu
def test_replayed_graph_follows_lengths():
    case = tensors(2, 4, 4, 4096, 128, torch.bfloat16, [4096, 4096])
    lengths = case[3]
    decode_attention(*case, 0.1, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = decode_attention(*case, 0.1, "triton")
    for used in ([4096, 1], [17, 2049]):
        lengths.copy_(torch.tensor(used))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        check(actual, oracle(*case, 0.1), torch.bfloat16)


def test_refuses():
    q, k = torch.zeros(1, 2, 24, device=DEVICE), torch.zeros(1, 1, 4, 24, device=DEVICE)
    lengths = torch.ones(1, device=DEVICE)
    index = torch.zeros(1, 1, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="decode_attention has no implementation 'fast'"):
        decode_attention(q, k, k, lengths, 1.0, "fast")
    with pytest.raises(ValueError, match="block_size=32 is not one of"):
        decode_attention(q, k, k, lengths, 1.0, index=index, block_size=32)
    with pytest.raises(ValueError, match="need an index"):
        decode_attention(q, k, k, lengths, 1.0, block_size=16)
    with pytest.raises(ValueError, match=r"index \[B, Hkv or 1, N\]"):
        decode_attention(q, k, k, lengths, 1.0, index=index[0])
    with pytest.raises(ValueError, match="not with an index"):
        decode_attention(q, k, k, lengths, 1.0, index=index, logits=torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="no head_dim 12"):
        decode_attention(q[..., :12], k[..., :12], k[..., :12], lengths, 1.0, "triton")
    with pytest.raises(ValueError, match="one 16- or 32-bit dtype"):
        decode_attention(q, k.half(), k.half(), lengths, 1.0, "triton")
    with pytest.raises(ValueError, match="int32 index"):
        decode_attention(q, k, k, lengths, 1.0, "triton", index=index.long())
