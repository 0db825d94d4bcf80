"""select against its definition, one row at a time in Python; on CPU interpreted, on a GPU compiled."""

import math

import pytest
import torch

from kernels.select import select

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
IMPLS = ("reference", "triton")


def by_definition(scores, num_kept, num_sinks, window, length):
    """Sinks and window, then the best by (score, earliness), ascending and padded."""
    scores = [-math.inf if math.isnan(x) else x for x in scores[:length].float().tolist()]
    forced = set(range(min(num_sinks, length))) | set(range(max(length - window, 0), length))
    rest = sorted((j for j in range(length) if j not in forced), key=lambda j: (-scores[j], j))
    kept = sorted(forced | set(rest[: max(0, num_kept - len(forced))]))
    return kept + [-1] * (num_kept - len(kept))


def check(scores, num_kept, num_sinks, window, impl, lengths=None):
    """scores [R, T] against the definition."""
    device_lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    kept = select(scores.to(DEVICE), num_kept, num_sinks, window, impl, lengths=device_lengths)
    assert kept.dtype == torch.int32 and kept.shape == (*scores.shape[:-1], num_kept)
    for row, actual in enumerate(kept.tolist()):
        length = scores.shape[1] if lengths is None else lengths[row]
        assert actual == by_definition(scores[row], num_kept, num_sinks, window, length), f"row {row}"


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What a launcher allocates and no program writes is far off."""
    from kernels.select import triton

    def poisoned(*shape, dtype, device):
        return torch.full(shape, -(10**6), dtype=dtype, device=device)

    monkeypatch.setattr(triton, "empty", poisoned)


@pytest.fixture
def small_pieces(monkeypatch):
    """Rows of several pieces and longer than what is held, at sizes that the interpreter can run."""
    from kernels.select import triton

    monkeypatch.setattr(triton, "FUSED", 32)
    monkeypatch.setattr(triton, "STREAMED", 128)
    for config in triton.CONFIGS.values():
        monkeypatch.setitem(config, "piece", 32)
    return triton


@pytest.mark.parametrize("share", (0.1, 0.5, 0.99, 1.0), ids=lambda s: f"keep{s}")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("length", (1, 2, 15, 16, 17, 63, 65, 129, 1000), ids=lambda n: f"T{n}")
def test_normal_scores(length, impl, share):
    num_kept = max(1, int(share * length))
    sinks = min(2, num_kept - 1)
    check(torch.randn(3, length), num_kept, sinks, min(3, num_kept - sinks), impl)


@pytest.mark.parametrize("resident", (128, 32768), ids=("streamed", "held"))
@pytest.mark.parametrize("length", (33, 128, 300, 512), ids=lambda n: f"T{n}")
def test_pieces(length, resident, small_pieces, monkeypatch):
    monkeypatch.setattr(small_pieces, "RESIDENT", resident)
    monkeypatch.setitem(small_pieces.CONFIGS, resident, small_pieces.CONFIGS[2048] | {"piece": 32})
    scores = torch.randn(4, length)
    scores[2] = scores[2].round()
    check(scores, length // 5, 2, 3, "triton")
    check(scores, length // 2, 4, 0, "triton", lengths=[length, length // 2, length // 2 + 5, 1])


SPECIAL = {
    "equal": torch.zeros(70),
    "two_values": (torch.arange(70) % 3 == 0).float(),
    "nan": torch.where(torch.arange(70) % 2 == 0, math.nan, torch.arange(70.0)),
    "all_nan": torch.full((70,), math.nan),
    "nan_and_minus_infinity": torch.tensor([math.nan, -math.inf] * 35),
    "infinities": torch.tensor([math.inf, -math.inf, 0.0, math.inf, 1.0, -1.0, math.nan] * 10),
    "zeros_of_both_signs": torch.tensor([0.0, -0.0, -0.0, 0.0, -1.0, -0.0, 1.0] * 10),
    "denormal": torch.arange(-35, 35) * 1.4e-45,
    "wide": torch.tensor([(-1.0) ** j * 10.0 ** (j - 36) for j in range(70)]),
    "extremes": torch.tensor([3.4028234e38, -3.4028234e38, 1.0000001, 1.0, 0.9999999, -1.0, -1.0000001] * 10),
    "negative": -(torch.arange(1.0, 71.0).flip(0) ** 3),
    "heavy_tail": torch.exp(torch.linspace(-40, 40, 70)).roll(13),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name, impl):
    scores = SPECIAL[name][None]
    for num_kept, sinks, window in ((7, 0, 0), (7, 3, 2), (35, 1, 1), (7, 3, 4), (1, 0, 1), (69, 2, 0)):
        check(scores, num_kept, sinks, window, impl)


def test_infinite_score_does_not_displace_a_forced_one():
    assert select(torch.full((6,), math.inf, device=DEVICE), 3, 1, 1, "triton").tolist() == [0, 1, 5]


@pytest.mark.parametrize("impl", IMPLS)
def test_lengths(impl):
    lengths = [50, 49, 11, 10, 9, 5, 4, 1, 0]
    scores = torch.randn(len(lengths), 50)
    for row, length in enumerate(lengths):
        # what lies behind would win
        scores[row, length:] = math.inf
    check(scores, 10, 2, 3, impl, lengths)
    check(scores, 10, 0, 0, impl, lengths)
    check(scores, 10, 4, 6, impl, lengths)


@pytest.mark.parametrize("impl", IMPLS)
def test_lengths_may_be_expanded(impl):
    """One sequence's length for all of its heads is a view with stride 0; the kernel walks over memory."""
    scores = torch.rand(1, 5, 40, device=DEVICE)
    one = torch.tensor([[17, 999999]], device=DEVICE)[:, :1].expand(1, 5)
    expected = select(scores, 9, 1, 2, "reference", lengths=one.contiguous())
    assert torch.equal(select(scores, 9, 1, 2, impl, lengths=one), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_16_bit_scores(dtype, impl):
    if dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter's bf16 is wrong")
    check(torch.randn(2, 300).to(dtype), 60, 2, 3, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_axes_and_strides(impl):
    scores = torch.randn(2, 90, 3, device=DEVICE)
    kept = select(scores.mT, 20, 1, 2, impl)
    assert torch.equal(kept, select(scores.mT.contiguous(), 20, 1, 2, impl))
    sliced = torch.randn(2, 3, 90, device=DEVICE)[:, :, 10:70]
    assert torch.equal(select(sliced, 20, 1, 2, impl), select(sliced.clone(), 20, 1, 2, impl))
    assert select(torch.randn(40, device=DEVICE), 5, 0, 0, impl).shape == (5,)


def test_refusals():
    with pytest.raises(ValueError, match="3 of 10 cannot hold 2 sinks and 2 recent"):
        select(torch.zeros(10), 3, 2, 2)
    with pytest.raises(ValueError, match=r"wants lengths \(2,\)"):
        select(torch.zeros(2, 10), 3, 0, 0, lengths=torch.ones(3))
    with pytest.raises(ValueError, match="has no implementation 'fast'"):
        select(torch.zeros(10), 3, 0, 0, "fast")


@pytest.mark.gpu
@pytest.mark.parametrize("length", (4097, 8191, 32767, 32768, 32769, 131072), ids=lambda n: f"T{n}")
@pytest.mark.parametrize("kind", ("normal", "mass", "heavy", "bf16", "zeros"))
def test_long_rows(length, kind):
    scores = {
        "normal": lambda x: x,
        "mass": lambda x: (x * 4).softmax(-1) * 1000,
        "heavy": lambda x: (x * 20).exp(),
        "bf16": lambda x: x.bfloat16().float(),
        "zeros": lambda x: x.relu(),
    }[kind](torch.randn(8, length, device=DEVICE))
    lengths = torch.tensor([length, length - 1, length // 2, length // 3, 100, 1, 0, length], device=DEVICE)
    for share in (0.01, 0.2, 0.7):
        num_kept = int(share * length)
        assert torch.equal(select(scores, num_kept, 4, 16, "triton"), select(scores, num_kept, 4, 16))
        ragged = select(scores, num_kept, 4, 16, "triton", lengths=lengths)
        assert torch.equal(ragged, select(scores, num_kept, 4, 16, lengths=lengths))


@pytest.mark.gpu
def test_graph_replay_sees_new_scores():
    scores, lengths = torch.randn(64, 32768, device=DEVICE), torch.full((64,), 32768, device=DEVICE)
    select(scores, 6553, 4, 16, "triton", lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = select(scores, 6553, 4, 16, "triton", lengths=lengths)
    for _ in range(3):
        scores.normal_()
        lengths.random_(1, 32769)
        graph.replay()
        assert torch.equal(kept, select(scores, 6553, 4, 16, lengths=lengths))


@pytest.mark.gpu
def test_rows_past_2_31_elements():
    scores = torch.zeros(2, 2**31 // 2 + 4096, dtype=torch.float16, device=DEVICE)[:, :4096]
    scores = torch.as_strided(scores, (3, 4096), (2**30 + 2048, 1))
    scores.normal_()
    assert torch.equal(select(scores, 500, 4, 16, "triton"), select(scores, 500, 4, 16))
