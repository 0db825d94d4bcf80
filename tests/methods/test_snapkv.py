"""snapkv against votes counted on full attention matrices in fp64."""

import pytest
import torch

from harness.engine import Engine
from methods.snapkv import SnapKV


class Votes:
    """SnapKV on lists, per layer and KV head."""

    def __init__(self, method):
        self.method = method

    def prompt(self, layer, head, weights):
        method, length = self.method, weights.shape[-1]
        kept = min(method.planned.kept, length)
        if kept == length:
            return list(range(length))
        votes = weights[:, -method.window :].sum(1)  # [G, T]
        votes = votes.mean(0) if method.head_reduce == "mean" else votes.amax(0)
        first_recent, half = length - method.window, method.pool // 2
        pooled = [float(votes[max(0, j - half) : min(j + half + 1, first_recent)].max()) for j in range(first_recent)]
        # pooling makes equal votes common: the earlier position stays
        ranked = sorted(range(first_recent), key=lambda j: (-pooled[j], j))
        chosen = kept - method.window
        last, next_one = pooled[ranked[chosen - 1]], pooled[ranked[chosen]]
        assert last == next_one or last - next_one > 1e-5 * last, "a near tie decides nothing: take another seed"
        return sorted(ranked[:chosen]) + list(range(first_recent, length))

    def read(self, layer, head, held, logits):
        return held

    def after(self, layer, head, held, weights):
        return held


@pytest.mark.parametrize(
    "knobs", (dict(), dict(pool=1), dict(pool=15, head_reduce="max"), dict(window=1)), ids=("7", "1", "15_max", "window1")
)
def test_is_the_paper(follow, knobs):
    engine, slow = follow(SnapKV(sparsity=0.7, **(dict(window=8) | knobs)), Votes, 101, 20)
    assert engine.method.planned.kept == 29
    held = [tuple(row) for layer in range(2) for row in slow.held(layer)]
    assert len(set(held)) > 1, "heads and layers choose for themselves"


@pytest.mark.parametrize("group", (1, 3, 4, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("length", (1, 7, 28, 29, 30, 101), ids=lambda n: f"T{n}")
def test_shapes_and_groups(follow, length, group):
    """One token, fewer than the window, around the number of slots (29), all of them."""
    follow(SnapKV(sparsity=0.7, window=8), Votes, length, 12, max_prompt_len=101, group=group)


@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, length):
    garbage_is_never_read(SnapKV(sparsity=0.6, window=4), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(SnapKV(sparsity=0.6, window=4))


@pytest.mark.parametrize(
    ("knobs", "message"),
    (
        (dict(window=0), "method.window=0 must be at least 1"),
        (dict(pool=4), "method.pool=4 must be odd"),
        (dict(head_reduce="sum"), "method.head_reduce=sum is not one of mean, max"),
    ),
    ids=("window", "pool", "head_reduce"),
)
def test_knobs_are_checked(knobs, message):
    with pytest.raises(ValueError, match=message):
        SnapKV(**knobs)


def test_budget_below_the_minimum_is_refused(tiny_llama):
    with pytest.raises(
        ValueError, match="fewer than the 33 that hold the last 32 tokens and one chosen; largest sparsity here: 0.6"
    ):
        Engine(tiny_llama(), SnapKV(sparsity=0.8), batch_size=1, max_prompt_len=101, max_new_tokens=5)


def test_index_is_true_positions(tiny_llama):
    method = SnapKV(sparsity=0.7, window=8)
    engine = Engine(tiny_llama(), method, batch_size=3, max_prompt_len=101, max_new_tokens=5)
    engine.prefill(torch.randint(0, 512, (3, 101)), [101, 20, 64])
    for seq, length in enumerate((101, 20, 64)):
        for layer in method.layers:
            rows = layer.index[seq]
            used = rows[:, : min(29, length)]
            assert (used.diff(dim=1) > 0).all() and (used[:, -8:] == torch.arange(length - 8, length)).all()
            assert (rows[:, length:] == -1).all()
