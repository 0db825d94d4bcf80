"""h2o against the paper's algorithm on full attention matrices in fp64, and what must hold of its slots."""

import pytest
import torch

from harness.engine import Engine
from methods.h2o import H2O

CLEAR = 1e-5  # relative distance of the two lowest scores below which fp32 may evict the other one


class Heavy:
    """H2O as the paper has it, on dictionaries: position -> score, per layer and KV head."""

    def __init__(self, method):
        self.method, self.scores, self.nearest = method, {}, 1.0

    def prompt(self, layer, head, weights):
        planned, length = self.method.planned, weights.shape[-1]
        recent = planned.kept - round(self.method.heavy_fraction * planned.kept)
        sums = {j: float(weights[:, j:, j].sum()) for j in range(length)}
        ranked = sorted(range(max(0, length - recent)), key=lambda j: -self.rank(sums, j, length))
        kept = sorted(ranked[: planned.kept - min(recent, length)] + list(range(max(0, length - recent), length)))
        self.scores[layer, head], self.recent = {j: sums[j] for j in kept}, recent
        return self.make_room(layer, head, kept, length)

    def read(self, layer, head, held, logits):
        return held

    def after(self, layer, head, held, weights):
        scores = self.scores[layer, head]
        for j, weight in zip(held, weights.sum(0).tolist(), strict=True):
            scores[j] = scores.get(j, 0.0) + weight
        return self.make_room(layer, head, held, held[-1] + 1)

    def rank(self, scores, j, seen):
        return scores[j] / (seen - j) if self.method.score == "mean" else scores[j]

    def make_room(self, layer, head, held, seen):
        """The next token needs a slot: when all are taken, the lowest outside the recent ones goes."""
        if len(held) < self.method.planned.kept:
            return held
        scores = self.scores[layer, head]
        old = [j for j in held if j < seen - self.recent]
        ranked = sorted(old, key=lambda j: self.rank(scores, j, seen))
        if len(ranked) > 1:
            low, next_low = (self.rank(scores, j, seen) for j in ranked[:2])
            self.nearest = min(self.nearest, (next_low - low) / next_low)
        victim = ranked[0] if ranked else held[0]
        del scores[victim]
        return [j for j in held if j != victim]


def followed(follow, method, *args, **options):
    engine, slow = follow(method, Heavy, *args, **options)
    assert slow.policy.nearest > CLEAR, "a near tie decides nothing: take another seed"
    return engine, slow


@pytest.mark.parametrize("score", ("sum", "mean"))
def test_is_the_paper(follow, score):
    """150 decoded tokens with eviction, more than seven times the slots."""
    method = H2O(sparsity=0.75, score=score)
    engine, slow = followed(follow, method, 61, 150, max_prompt_len=83)
    assert method.planned.kept == 18 and method.num_recent == 9
    # scores too, in the order of positions
    for layer in range(2):
        for head in range(2):
            held, scores = (x[layer] for x in ([y.held for y in method.layers], [y.scores for y in method.layers]))
            for j, want in slow.policy.scores[layer, head].items():
                assert float(scores[0, head, held[0, head] == j]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("group", (1, 3, 4, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("more", (-16, -1, 0, 1, 62), ids=lambda n: f"slots{n:+}")
def test_shapes_and_groups(follow, more, group):
    """Around the number of slots: short prompts (the first is 1 to 3 tokens) fill up, then eviction starts."""
    followed(follow, H2O(kv_budget=0.5), None, 30, max_prompt_len=83, group=group, more=more)


def test_prompt_of_one_token(follow):
    followed(follow, H2O(kv_budget=0.3), 1, 30, max_prompt_len=83)


@pytest.mark.parametrize("heavy_fraction", (0.0, 0.2, 1.0))
def test_heavy_fraction(follow, heavy_fraction):
    engine, _ = followed(follow, H2O(sparsity=0.7, heavy_fraction=heavy_fraction), 50, 40)
    kept = engine.method.planned.kept
    assert engine.method.num_recent == {0.0: kept, 0.2: kept - round(0.2 * kept), 1.0: 0}[heavy_fraction]
    if heavy_fraction == 0.0:
        assert set(engine.positions()[0, 0].tolist()) - {-1} == set(range(90 - kept + 1, 90)), "a window"


def test_heads_and_layers_differ(follow):
    engine, slow = follow(H2O(sparsity=0.75), Heavy, 83, 60)
    held = [tuple(row) for layer in range(2) for row in slow.held(layer)]
    assert len(set(held)) > 1


def test_slots_are_overwritten_in_place(tiny_llama):
    """The physical rows are those of the positions that the layer claims to hold: keys of full at the same places."""
    from methods.full import Full

    # one layer: keys depend on nothing that was evicted
    model, ids, forced = tiny_llama(num_hidden_layers=1), torch.randint(0, 512, (2, 60)), torch.randint(0, 512, (2, 70))
    engines = [Engine(model, m, batch_size=2, max_prompt_len=60, max_new_tokens=70) for m in (H2O(sparsity=0.7), Full())]
    for engine in engines:
        engine.prefill(ids, [60, 33])
        engine.score(forced)
    held = engines[0].positions()
    own, full = (engine.method.layers[0].slots for engine in engines)
    assert (held >= 0).sum(2).unique().tolist() == [engines[0].method.planned.kept - 1]
    assert (held.amax(2) == torch.tensor([[129], [102]])).all()
    index = held.clamp(min=0)[..., None].expand_as(own.k)
    for rows, dense in ((own.k, full.k), (own.v, full.v)):
        difference = (rows - dense.gather(2, index)).abs().amax(-1)
        assert difference[held >= 0].max() < 1e-5


@pytest.mark.parametrize("score", ("sum", "mean"))
def test_int8_rows_go_where_the_scores_say(tiny_llama, score):
    model, ids, forced = tiny_llama(), torch.randint(0, 512, (1, 128)), torch.randint(0, 512, (1, 80))
    logits, sparsity = [], 0.5
    for kv_dtype in ("int8", "auto"):
        engine = Engine(
            model, H2O(sparsity=sparsity, score=score, kv_dtype=kv_dtype), batch_size=1, max_prompt_len=128, max_new_tokens=80
        )
        engine.prefill(ids)
        logits.insert(0, engine.score(forced, keep_logits=True)[1])
        # the same number of slots in both: 8 bit comes in tiles of 32
        plans = {share / 400: H2O(sparsity=share / 400).plan(engine.spec).kept for share in range(40, 360)}
        sparsity = next(share for share, kept in plans.items() if kept == engine.method.planned.kept)
    assert 1e-5 < (logits[1] - logits[0])[:, 1:20].norm() / logits[0][:, 1:20].norm() < 0.05


@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, length):
    garbage_is_never_read(H2O(sparsity=0.6), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(H2O(sparsity=0.6))


def test_2000_tokens(stays_constant):
    stays_constant(H2O(sparsity=0.8))


def test_ledger_is_the_formula(tiny_llama):
    """Scores, positions, the claimed slots and the step's logits are bytes of the budget."""
    method = H2O(sparsity=0.6)
    model = tiny_llama(num_hidden_layers=3)
    engine = Engine(model, method, batch_size=2, max_prompt_len=200, max_new_tokens=5)
    engine.prefill(torch.randint(0, 512, (2, 200)))
    kept, heads = method.planned.kept, 2 * 3 * 2
    assert engine.ledger().kinds == method.planned.ledger
    assert method.planned.ledger == {
        "kv": heads * kept * 2 * 16 * 4,
        "scores": heads * kept * 4,
        "index": heads * kept * 4 + heads * 8,
        "logits": 2 * 4 * kept * 4,
    }
    assert kept == int((0.4 * 2 * 200 * 3 * 2 * 2 * 64 - heads * 8) / (2 * (3 * 2 * (2 * 64 + 8) + 4 * 4)))


@pytest.mark.parametrize(
    ("knobs", "message"),
    (
        (dict(score="max"), "method.score=max is not one of sum, mean"),
        (dict(heavy_fraction=1.5), r"method.heavy_fraction=1.5 is outside \[0, 1\]"),
    ),
    ids=("score", "heavy_fraction"),
)
def test_knobs_are_checked(knobs, message):
    with pytest.raises(ValueError, match=message):
        H2O(**knobs)


def test_budget_below_the_minimum_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="leaves 1 slots of 40, fewer than the 2 that hold one heavy and one recent token"):
        Engine(tiny_llama(), H2O(sparsity=0.95), batch_size=1, max_prompt_len=40, max_new_tokens=5)
