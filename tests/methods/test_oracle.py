"""oracle against a step that looks at all probabilities in fp64 and reads the best of them."""

import pytest
import torch

from harness.engine import Engine
from methods.full import Full
from methods.oracle import Oracle


class Best:
    """Top k of each step's own attention, summed over the heads of the group."""

    def __init__(self, method):
        self.method, self.num_evictions = method, 0

    def prompt(self, layer, head, weights):
        return list(range(weights.shape[-1]))

    def read(self, layer, head, held, logits):
        mass = logits.softmax(-1).sum(0).tolist()
        num = self.method.num_read(self.method.spec)
        ranked = sorted(range(len(held)), key=lambda i: -mass[i])
        if len(held) > num:
            low, high = mass[ranked[num]], mass[ranked[num - 1]]
            assert high - low > 1e-5 * high, "a near tie decides nothing: take another seed"
        return [held[i] for i in sorted(ranked[:num])]

    def after(self, layer, head, held, weights):
        return held


@pytest.mark.parametrize("group", (1, 3, 4, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("length", (1, 13, 14, 16, 71), ids=lambda n: f"T{n}")
def test_is_the_best_of_all(follow, length, group):
    torch.manual_seed(1)
    engine, _ = follow(Oracle(sparsity=0.8), Best, length, 15, max_prompt_len=71, group=group)
    assert engine.method.num_read(engine.spec) == 14


def test_one_slot_and_many_steps(follow):
    follow(Oracle(kv_budget=0.05), Best, 60, 50)


def test_catches_more_mass_than_any_selector(tiny_llama):
    """Nearer to full than the same number of slots chosen otherwise."""
    from methods.snapkv import SnapKV
    from methods.window import Window

    model, ids, forced = tiny_llama(), torch.randint(0, 512, (1, 80)), torch.randint(0, 512, (1, 20))
    logits = {}
    for name, method in {
        "full": Full(),
        "oracle": Oracle(sparsity=0.8),
        "window": Window(sparsity=0.8),
        "snapkv": SnapKV(sparsity=0.8, window=4),
    }.items():
        engine = Engine(model, method, batch_size=1, max_prompt_len=80, max_new_tokens=20)
        engine.prefill(ids)
        logits[name] = engine.score(forced, keep_logits=True)[1]
    error = {name: float((rows - logits["full"]).norm()) for name, rows in logits.items()}
    assert 0 < error["oracle"] < min(error["window"], error["snapkv"])


def test_claims_no_freed_bytes(tiny_llama):
    method = Oracle(sparsity=0.8)
    engine = Engine(tiny_llama(), method, batch_size=2, max_prompt_len=50, max_new_tokens=10)
    engine.prefill(torch.randint(0, 512, (2, 50)))
    engine.decode(10)
    assert method.memory_class == "none" and method.flags() == ["simulated"]
    full = engine.spec.full_bytes("fp32")
    assert engine.ledger().kinds["kv"] == full and engine.ledger().resident_bytes == method.planned.resident_bytes > full
    assert method.planned.read_bytes > full, "it reads everything to know the best"


@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, length):
    garbage_is_never_read(Oracle(sparsity=0.6), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(Oracle(sparsity=0.6))


def test_budget_below_the_minimum_is_refused(tiny_llama):
    with pytest.raises(
        ValueError, match="leaves 0 slots of 10, fewer than the 1 that hold one token; largest sparsity here: 0.9"
    ):
        Engine(tiny_llama(), Oracle(sparsity=0.95), batch_size=1, max_prompt_len=10, max_new_tokens=5)
