"""The same tokens from Triton's kernels as from the reference ones; on a CPU they are interpreted, so everything is small."""

import pytest
import torch

from harness.engine import Engine
from methods.h2o import H2O
from methods.oracle import Oracle
from methods.random import Random
from methods.snapkv import SnapKV

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {
    "h2o": lambda: H2O(sparsity=0.7),
    "h2o_mean": lambda: H2O(sparsity=0.6, score="mean"),
    "snapkv": lambda: SnapKV(sparsity=0.6, window=4),
    "random": lambda: Random(sparsity=0.6, window=4),
    "oracle": lambda: Oracle(sparsity=0.7),
}


@pytest.mark.parametrize("name", METHODS)
def test_triton_is_the_reference(tiny_llama, name):
    # one layer in fp32: nothing is near enough to a tie that rounding could decide it
    model = tiny_llama(num_hidden_layers=1, hidden_size=96, num_attention_heads=6).to(DEVICE)
    ids, forced = torch.randint(0, 512, (2, 40)), torch.randint(0, 512, (2, 8))
    results = []
    for impl in ("reference", "triton"):
        engine = Engine(model, METHODS[name](), batch_size=2, max_prompt_len=40, max_new_tokens=8, impl=impl)
        engine.prefill(ids, [40, 9])
        results.append((engine.score(forced, keep_logits=True)[1], engine.positions()))
    (expected, held), (actual, held_too) = results
    assert torch.equal(held, held_too)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
