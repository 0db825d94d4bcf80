"""random: what must stay stays, the rest is a fair draw that only the seed and the prompt decide."""

import pytest
import torch

from harness.engine import Engine
from methods.random import Random


def drawn(tiny_llama, prompts, seed=0, batch=1, **knobs):
    """Positions kept of each prompt, [N, kept]."""
    method = Random(sparsity=0.6, num_sinks=2, window=5, seed=seed, **knobs)
    engine = Engine(tiny_llama(), method, batch_size=batch, max_prompt_len=len(prompts[0]), max_new_tokens=4)
    rows = []
    for start in range(0, len(prompts), batch):
        engine.prefill(prompts[start : start + batch])
        held = torch.stack([engine.positions(layer) for layer in range(2)])[..., : method.planned.kept]
        assert (held == held[:1, :, :1]).all(), "all layers and heads forget the same"
        rows.append(held[0, :, 0])
    return torch.cat(rows)


def test_the_draw(tiny_llama):
    prompts = torch.randint(0, 512, (40, 50))
    rows = drawn(tiny_llama, prompts)
    kept = rows.shape[1]
    assert kept == 19 and (rows.diff(dim=1) > 0).all()
    assert (rows[:, :2] == torch.arange(2)).all() and (rows[:, -5:] == torch.arange(45, 50)).all()
    assert len({tuple(row) for row in rows.tolist()}) == 40, "every prompt has its own draw"
    # each of the 43 in the middle stays with probability 12 / 43: within five standard deviations of its count
    share = (kept - 7) / 43
    counts = torch.bincount(rows[:, 2:-5].flatten(), minlength=45)[2:]
    assert (counts - 40 * share).abs().max() < 5 * (40 * share * (1 - share)) ** 0.5
    assert torch.equal(drawn(tiny_llama, prompts, batch=8), rows), "the batch decides nothing"
    assert not torch.equal(drawn(tiny_llama, prompts[:4], seed=1), rows[:4])


class Same:
    """What the engine drew, then dense attention in fp64 over that."""

    def __init__(self, method):
        self.method = method

    def prompt(self, layer, head, weights):
        length = weights.shape[-1]
        if length <= self.method.planned.kept:
            return list(range(length))
        return self.method.layers[layer].index[0, 0].tolist()

    def read(self, layer, head, held, logits):
        return held

    def after(self, layer, head, held, weights):
        return held


@pytest.mark.parametrize("group", (1, 3, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("length", (1, 6, 29, 30, 71), ids=lambda n: f"T{n}")
def test_is_masked_dense(follow, length, group):
    follow(Random(sparsity=0.6, window=5), Same, length, 12, max_prompt_len=71, group=group)


@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, length):
    garbage_is_never_read(Random(sparsity=0.6, window=4), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(Random(sparsity=0.6, window=4))


def test_refuses(tiny_llama):
    with pytest.raises(ValueError, match="method.num_sinks=-1 must be >= 0"):
        Random(num_sinks=-1)
    with pytest.raises(ValueError, match="fewer than the 37 that hold 4 sinks, 32 recent tokens and one drawn"):
        Engine(tiny_llama(), Random(sparsity=0.8), batch_size=1, max_prompt_len=101, max_new_tokens=5)


def test_the_standard_library_is_not_hidden():
    import random

    assert random.__file__ != __import__("methods.random").random.__file__ and random.Random(0).random() < 1
