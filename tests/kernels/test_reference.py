"""The reference ops against formulas in fp64: they are the oracle of every faster kernel, so they need one themselves."""

import math

import pytest
import torch

from kernels.column_sums import column_sums
from kernels.compact import compact
from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from kernels.select import select

LENGTHS = (1, 15, 16, 17, 63, 65, 257)
GROUPS = (1, 3, 4, 7, 8)


def dense_rows(q, k, v, scale):
    """Causal softmax attention and probabilities, fp64, one query head at a time: q [Hq, T, D], k, v [Hkv, T, D]."""
    group = q.shape[0] // k.shape[0]
    length = q.shape[1]
    causal = torch.ones(length, length).tril().bool()
    outs, probabilities = [], []
    for head in range(q.shape[0]):
        logits = q[head].double() @ k[head // group].double().T * scale
        weights = logits.masked_fill(~causal, -math.inf).softmax(-1)
        probabilities.append(weights)
        outs.append(weights @ v[head // group].double())
    return torch.stack(outs), torch.stack(probabilities)


def relative_rms(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"G{g}")
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"n{n}")
def test_decode_attention(length, group):
    q, k, v = torch.randn(2, 2 * group, 24), torch.randn(2, 2, length + 3, 24), torch.randn(2, 2, length + 3, 24)
    lengths = torch.tensor([length, max(1, length // 2)])
    for seq, used in enumerate(lengths):
        k[seq, :, used:], v[seq, :, used:] = math.nan, math.nan
    out, lse = decode_attention(q, k, v, lengths, 0.3)
    for seq, used in enumerate(lengths):
        for head in range(2 * group):
            logits = k[seq, head // group, :used].double() @ q[seq, head].double() * 0.3
            assert lse[seq, head] == pytest.approx(float(logits.logsumexp(0)), rel=1e-5, abs=1e-5)
            expected = logits.softmax(0) @ v[seq, head // group, :used].double()
            assert relative_rms(out[seq, head], expected) < 1e-5


def test_decode_attention_large_scores():
    q = torch.full((1, 1, 8), 1e4)
    k = torch.stack([torch.full((8,), 1e4), torch.full((8,), -1e4)])[None, None]
    v = torch.stack([torch.ones(8), torch.zeros(8)])[None, None]
    out, _ = decode_attention(q, k, v, torch.tensor([2]), 1.0)
    assert torch.equal(out, torch.ones(1, 1, 8))


@pytest.mark.parametrize("group", (1, 3), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"n{n}")
def test_prefill_attention(length, group):
    q, k, v = torch.randn(1, 2 * group, length, 16), torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16)
    expected, _ = dense_rows(q[0], k[0], v[0], 0.2)
    assert relative_rms(prefill_attention(q, k, v, 0.2)[0], expected) < 1e-5


@pytest.mark.parametrize("reduce", ("sum", "mean", "max"))
@pytest.mark.parametrize("window", (1, 32, None), ids=lambda w: f"w{w}")
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"n{n}")
def test_column_sums(length, window, reduce):
    q, k = torch.randn(1, 6, length, 16), torch.randn(1, 2, length, 16)
    _, probabilities = dense_rows(q[0], k[0], k[0], 0.2)
    rows = length if window is None else min(window, length)
    mass = probabilities[:, -rows:].sum(1).view(2, 3, length)
    expected = {"sum": mass.sum(1), "mean": mass.mean(1), "max": mass.amax(1)}[reduce]
    actual = column_sums(q, k, 0.2, window, reduce)[0]
    assert relative_rms(actual, expected) < 1e-5
    if reduce == "sum":
        assert actual.sum(-1).tolist() == pytest.approx([rows * 3] * 2, rel=1e-5)


@pytest.mark.parametrize("length", (1, 40, 333), ids=lambda n: f"n{n}")
@pytest.mark.parametrize("share", (0.1, 0.5, 1.0))
def test_select_is_forced_plus_best_in_order(length, share):
    scores = torch.randn(length)
    sinks, window = min(2, length - 1), min(3, length)
    num_kept = max(sinks + window, int(share * length))
    num_kept = min(num_kept, length)
    window = min(window, num_kept - sinks)
    kept = select(scores, num_kept, sinks, window).tolist()
    forced = set(range(sinks)) | set(range(length - window, length))
    rest = sorted(set(range(length)) - forced, key=lambda j: -float(scores[j]))
    assert kept == sorted(forced | set(rest[: num_kept - len(forced)]))


def test_select_ties_nan_and_infinity():
    assert select(torch.zeros(9), 5, 1, 1).tolist() == [0, 1, 2, 3, 8]
    scores = torch.tensor([0.0, math.nan, 1.0, math.inf, math.nan, 2.0, 0.0])
    assert select(scores, 4, 1, 1).tolist() == [0, 3, 5, 6]
    # an infinite score elsewhere must not push a sink or the newest token out
    assert select(torch.full((6,), math.inf), 3, 1, 1).tolist() == [0, 1, 5]


def test_select_refuses_too_few():
    with pytest.raises(ValueError, match="3 of 10 cannot hold 2 sinks and 2 recent"):
        select(torch.zeros(10), 3, 2, 2)


def test_compact_is_bit_exact():
    slots = torch.randn(3, 2, 7, 5)
    shared = torch.tensor([1, 4, 6])
    kept = compact(slots, shared)
    assert torch.equal(kept, slots[:, :, shared])
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
    per_head = torch.randint(0, 7, (3, 2, 4))
    expected = torch.stack([torch.stack([slots[b, h, per_head[b, h]] for h in range(2)]) for b in range(3)])
    assert torch.equal(compact(slots, per_head), expected)


def test_unknown_impl_is_an_error():
    with pytest.raises(ValueError, match="decode_attention has no implementation 'fast'"):
        decode_attention(torch.zeros(1, 1, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.ones(1), 1.0, "fast")
