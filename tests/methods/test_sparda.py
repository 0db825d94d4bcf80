"""sparda in every mode against a slow simulation with dense matrices, its bytes against formulas, its scores against loops."""

import copy
import json
import math

import pytest
import torch

from harness import hf
from harness.engine import Engine
from methods import calibration
from methods.scoring import SelectorMLP, StepScores, fused_scores, page_scores, pool_neighbours, share_of_segment
from methods.sparda import SparDA

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, HEADS, KV_HEADS, DIM = 4, 6, 2, 16
FRUGAL = dict(window=4, num_sinks=2)
MODES = {
    "prefill": dict(sparsity=0.6, predict_layers=[1, 2]),
    "pages": dict(sparsity=0.2, predict_layers=[1, 2], granularity=16),
    "bucket": dict(sparsity=0.3, predict_layers=[1], batching="bucket"),
    "segment": dict(sparsity=0.6, predict_layers=[2, 0], segment=19, fuse="mean"),
    "mlp": dict(sparsity=0.6, predict_layers=[1, 2], selector="mlp"),
    "decode": dict(sparsity=0.35, predict_layers=[2], select="decode"),
    "decode_first": dict(sparsity=0.15, predict_layers=[0, 1], select="decode", ema=1.0, head_reduce="mean"),
    "decode_two": dict(sparsity=0.2, predict_layers=[0, 2], select="decode", fuse="mean", pool=3, segment=23),
    "decode_pages": dict(sparsity=0.08, predict_layers=[1], select="decode", granularity=16),
    "evict": dict(sparsity=0.4, predict_layers=[2], select="decode", evict=True),
    "evict_first": dict(sparsity=0.3, predict_layers=[0, 1], select="decode", evict=True, ema=0.4, pool=1, observe="all"),
}


def make(name, **knobs):
    return SparDA(**(FRUGAL | MODES[name] | knobs))


@pytest.fixture
def tiny(tiny_llama):
    shape = dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM)
    return tiny_llama(hidden_size=HEADS * DIM, **shape)


def build(model, method, batch=1, length=120, new=40, **options):
    return Engine(model, method, batch_size=batch, max_prompt_len=length, max_new_tokens=new, **options)


def draw(*shape):
    return torch.randint(0, 512, shape)


class Simulation:
    """The same method the slow way, in fp64: every layer keeps every key, and what it may not read is left out of a softmax."""

    def __init__(self, model, knobs, kept):
        self.model, self.knobs, self.kept = copy.deepcopy(model).double(), SparDA(**knobs), kept
        self.keys = [[] for _ in range(LAYERS)]
        self.values = [[] for _ in range(LAYERS)]
        self.predictors = sorted(self.knobs.predict_layers)
        self.margin = math.inf  # smallest relative difference between the last score that stays and the first that goes

    def token(self, token, position, readable):
        """One token through the model; readable(layer) -> positions it may attend to. Logits, and weights of each layer."""
        decoder = self.model.model
        hidden, weights = decoder.embed_tokens(token[None]), []
        for number, layer in enumerate(decoder.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            cos, sin = decoder.rotary_emb(normed, position_ids=torch.tensor([[position]]))

            def rotated(x, cos=cos, sin=sin):
                x = x.view(-1, DIM)
                return x * cos[0] + torch.cat([-x[:, DIM // 2 :], x[:, : DIM // 2]], -1) * sin[0]

            self.keys[number].append(rotated(attention.k_proj(normed)))
            self.values[number].append(attention.v_proj(normed).view(KV_HEADS, DIM))
            places = readable(number)
            group = HEADS // KV_HEADS
            k = torch.stack([self.keys[number][j] for j in places], 1).repeat_interleave(group, 0)
            v = torch.stack([self.values[number][j] for j in places], 1).repeat_interleave(group, 0)
            share = (rotated(attention.q_proj(normed))[:, None] @ k.mT * DIM**-0.5).softmax(-1)[:, 0]  # [Hq, N]
            dense = torch.zeros(HEADS, position + 1, dtype=torch.float64)
            dense[:, places] = share
            weights.append(dense)
            hidden = hidden + attention.o_proj((share[:, None] @ v).view(1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            self.after_layer(number, position, weights)
        return self.model.lm_head(decoder.norm(hidden))[0], weights

    def score(self, masses):
        """One score per key from each predictor's mass [Hq, T], with loops."""
        how, lines = self.knobs, []
        for mass in masses:
            reduced = mass.amax(0) if how.head_reduce == "max" else mass.mean(0)
            line = reduced.tolist()
            if how.segment:
                starts = range(0, len(line), how.segment)
                line = [x / max(sum(line[s : s + how.segment]), 1e-6) for s in starts for x in line[s : s + how.segment]]
            half = how.pool // 2
            lines.append([max(line[max(0, j - half) : j + half + 1]) for j in range(len(line))])
        join = max if how.fuse == "max" else (lambda values: sum(values) / len(values))
        return [join(values) for values in zip(*lines, strict=True)]

    def best(self, scores, num, used):
        """Ascending pages that stay of the first `used` tokens."""
        page = self.knobs.page
        pages = [max(scores[i : min(i + page, used)]) for i in range(0, used, page)]
        sinks, recent = self.knobs.forced_pages
        forced = [j for j in range(len(pages)) if j < sinks or j >= len(pages) - recent]
        rest = sorted((j for j in range(len(pages)) if j not in forced), key=lambda j: (-pages[j], j))
        if len(pages) <= num:
            return list(range(len(pages)))
        last, first_out = (pages[j] for j in (forced + rest)[num - 1 : num + 1])
        if num > len(forced) and last > first_out:
            self.margin = min(self.margin, 1 - first_out / last)
        return sorted((forced + rest)[:num])

    def tokens_of(self, pages, used):
        return [t for p in pages for t in range(p * self.knobs.page, (p + 1) * self.knobs.page) if t < used]

    def prefill(self, ids):
        self.after_layer = lambda *args: None
        history = []
        for position, token in enumerate(ids):
            logits, weights = self.token(token, position, lambda number, n=position: list(range(n + 1)))
            history.append(weights)
        length, last = len(ids), len(ids) if self.knobs.observe == "all" else min(self.knobs.observe, len(ids))
        masses = []
        for layer in self.predictors:
            total = torch.zeros(HEADS, length, dtype=torch.float64)
            for weights in history[-last:]:
                total[:, : weights[layer].shape[1]] += weights[layer]
            # a KV head's group is reduced first; max of max and mean of means are the same over all heads at once
            masses.append(total / last)
        self.smoothed = self.score(masses)
        self.held = self.tokens_of(self.best(self.smoothed, self.kept // self.knobs.page, length), length)
        self.slots = list(self.held)
        return logits

    def step(self, token, position):
        knobs = self.knobs
        if knobs.select == "prefill":
            self.held.append(position)
            return self.token(token, position, lambda number: self.held)[0]
        old = self.smoothed + [0.0]
        if knobs.evict:
            if len(self.slots) < self.kept:
                self.slots.append(position)
            else:
                free = [s for s, p in enumerate(self.slots) if p >= knobs.num_sinks and p <= position - knobs.window]
                victim = min(free, key=lambda s: (old[self.slots[s]], s))
                self.slots[victim] = position
        listed = self.tokens_of(self.best(old, self.kept // knobs.page, position + 1), position + 1)
        index = {"now": listed}

        def after_layer(number, position, weights):
            if number == self.predictors[-1]:
                new = self.score([weights[layer] for layer in self.predictors])
                # in fp32, because what is left of old scores after many steps is below its resolution and breaks no tie
                self.smoothed = torch.tensor(old).lerp(torch.tensor(new), knobs.ema).tolist()
                pages = self.best(self.smoothed, self.kept // knobs.page, position + 1)
                index["now"] = self.tokens_of(pages, position + 1)

        self.after_layer = after_layer

        def readable(number):
            if number in self.predictors:
                return list(range(position + 1))
            return sorted(self.slots) if knobs.evict else index["now"]

        return self.token(token, position, readable)[0]


@torch.no_grad()
@pytest.mark.parametrize("length", (85, 7), ids=lambda n: f"T{n}")
@pytest.mark.parametrize("name", [name for name in MODES if name not in ("mlp", "bucket")])
def test_every_mode_is_the_slow_simulation(tiny, name, length):
    """Logits of 8 forced tokens; a prompt shorter than the budget too."""
    engine = build(tiny, make(name), length=85)
    kept = engine.method.slots_within_budget(engine.spec)
    for _ in range(20):
        ids, forced = draw(1, length), draw(1, 8)
        simulation = Simulation(tiny, FRUGAL | MODES[name], kept)
        expected = [simulation.prefill(ids[0])]
        expected += [simulation.step(token, length + i) for i, token in enumerate(forced[0])]
        # a choice that fp32 rounding decides differs between CPUs: another draw
        if simulation.margin > 5e-6:
            break
    first = engine.prefill(ids)[0]
    _, logits = engine.score(forced, keep_logits=True)
    actual = torch.cat([logits[0], engine.logits]).double()
    assert torch.equal(logits[0, 0], first)
    assert (actual - torch.stack(expected)).abs().max() < 2e-4
    total = length + 8
    others = [layer for layer in range(LAYERS) if layer not in engine.method.predictors]
    held = engine.positions(others[-1])[0, 0]
    if engine.method.evict:
        assert [p for p in held.tolist() if p >= 0] == simulation.slots
    elif engine.method.select == "prefill":
        assert held[held >= 0].tolist() == simulation.held
    else:
        assert held[held >= 0].tolist() == list(range(total))
    if engine.method.select == "decode":
        smoothed = engine.method.step_scores.smoothed[0]
        assert (smoothed[:total] - torch.tensor(simulation.smoothed)).abs().max() < 1e-4 and not smoothed[total:].any()
        whole = engine.positions(engine.method.predictors[0])[0, 0]
        assert whole[whole >= 0].tolist() == list(range(total))


def test_the_simulation_can_fail(tiny):
    """Another budget gives other logits: the comparison above sees one dropped token."""
    ids, forced = draw(1, 85), draw(1, 16)
    engine = build(tiny, make("evict"), length=85)
    kept = engine.method.slots_within_budget(engine.spec)
    simulation = Simulation(tiny, FRUGAL | MODES["evict"], kept - 1)
    with torch.no_grad():
        simulation.prefill(ids[0])
        expected = torch.stack([simulation.step(token, 85 + i) for i, token in enumerate(forced[0])])
    engine.prefill(ids)
    engine.score(forced)
    assert (engine.logits[0] - expected[-1]).abs().max() > 2e-3


@pytest.mark.parametrize("kv_dtype", ("auto", "int8"))
@pytest.mark.parametrize("name", MODES)
def test_bytes_are_the_formula(tiny, name, kv_dtype):
    if kv_dtype == "int8" and make(name).memory_class == "reads_less":
        with pytest.raises(ValueError, match="kv_dtype=int8 is read whole, and SparDA reads lists of slots"):
            build(tiny, make(name, kv_dtype=kv_dtype), batch=2, length=121, new=24)
        return
    # 8 bit comes in tiles of 32 slots, of which a whole layer fills four
    knobs = {"kv_dtype": kv_dtype} | ({"sparsity": 0.15} if name == "evict_first" and kv_dtype == "int8" else {})
    engine = build(tiny, make(name, **knobs), batch=2, length=121, new=24)
    engine.prefill(draw(2, 121), [121, 60])
    method, ledger, spec = engine.method, engine.ledger(), engine.spec
    engine.decode(9)
    assert {kind: size for kind, size in engine.ledger().kinds.items() if kind != "workspace"} == ledger.kinds
    kinds = {kind: size for kind, size in ledger.kinds.items() if kind != "headroom"}
    assert kinds == method.planned.ledger
    if kv_dtype == "int8":
        # tiles and steps have their formula in test_slots.py
        assert ledger.resident_bytes <= method.budget_bytes(spec)
        return
    kept, page, num_predictors = method.slots_within_budget(spec), method.page, len(method.predictors)
    slot, row = 2 * KV_HEADS * 4 * DIM, 2 * 4 * (121 + 24)
    held = kinds["kv"]
    whole = num_predictors if method.evict else LAYERS if method.select == "decode" else 0
    slots = whole * 121 + (LAYERS - whole) * kept
    assert held == 2 * slots * slot
    # the tokens still to come: only where a layer appends
    appends = LAYERS if not method.evict else num_predictors
    assert ledger.kinds["headroom"] == 2 * appends * 24 * slot
    assert kinds["index"] == 2 * (kept // page * 4 + 8 * (method.select == "prefill"))
    assert kinds.get("scores", 0) == (method.select == "decode") * row * (HEADS + num_predictors * KV_HEADS + 1)
    full = spec.full_bytes(method.stored_dtype(spec))
    budget = (1 - method.sparsity) * full + 1e-6
    if method.memory_class == "freed":
        assert ledger.resident_bytes <= budget
        unused = 2 * ((LAYERS - whole) * slot * page + 4) + kinds.get("selector", 0)
        assert ledger.resident_bytes > budget - unused, "less than a page is left over"
    else:
        # what is read falls to the budget: whole predictor layers, the index and its pages elsewhere, the scores
        growth = 2 * num_predictors * slot * (24 + 1) / 2
        traffic = row * (num_predictors * (HEADS + KV_HEADS) + 2)
        read = 2 * num_predictors * 121 * slot + 2 * (LAYERS - num_predictors) * (kept * slot + kept // page * 4) + traffic
        assert method.planned.read_bytes == int(read + growth)
        assert read <= budget < read + 2 * (LAYERS - num_predictors) * (page * slot + 4)
        assert ledger.resident_bytes > full


@pytest.mark.parametrize("name", MODES)
def test_the_named_largest_sparsity_works(tiny, name):
    spec = hf.make_spec(tiny, batch_size=2, context_len=200, max_new_tokens=4, impl="reference")
    with pytest.raises(ValueError, match="largest sparsity here: ") as caught:
        make(name, sparsity=0.9999).plan(spec)
    limit = float(str(caught.value).rpartition(" ")[2])
    assert "\n" not in str(caught.value) and make(name, sparsity=limit).plan(spec).kept > 0
    with pytest.raises(ValueError, match="largest sparsity"):
        make(name, sparsity=min(limit + 0.04, 0.9999)).plan(spec)


@pytest.mark.parametrize("name", MODES)
def test_keep_all_is_full(tiny, name):
    engine = build(tiny, make(name, sparsity=0.0))
    assert engine.method.planned.noop and engine.method.tensors() == {}


@pytest.mark.parametrize("name", MODES)
def test_ragged_batch_is_each_alone(tiny, name):
    ids, lengths = draw(4, 100), [100, 1, 37, 64]
    together = build(tiny, make(name), batch=4, length=100)
    for _ in range(2):  # the second time over used slots
        together.prefill(ids, lengths)
        tokens = together.decode(14)
    # what stands in the padding must not matter
    alone = build(tiny, make(name), length=100)
    for seq, length in enumerate(lengths):
        alone.prefill(ids[seq : seq + 1, :length])
        assert torch.equal(alone.decode(14)[0], tokens[seq]), seq
        for layer in range(LAYERS):
            assert torch.equal(alone.positions(layer)[0], together.positions(layer)[seq])


@pytest.mark.parametrize("name", MODES)
def test_fused_step_is_the_module(tiny, name):
    ids, forced = draw(2, 100), draw(2, 12)
    logits = []
    for step_impl in ("module", "fused"):
        engine = build(tiny, make(name), batch=2, length=100, step_impl=step_impl)
        engine.prefill(ids, [100, 30])
        logits.append(engine.score(forced, keep_logits=True)[1])
    assert (logits[0] - logits[1]).abs().max() < 2e-4 * logits[0].abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ("reference", "triton"))
@pytest.mark.parametrize("kv_dtype", ("auto", "int8"))
@pytest.mark.parametrize("name", MODES)
def test_graph_is_eager_and_never_syncs(tiny, name, kv_dtype, impl):
    if kv_dtype == "int8" and impl == "triton":
        pytest.skip("the quantised kernels have head dims from 64 on; tests/conformance runs them")
    if kv_dtype == "int8" and MODES[name].get("select") == "decode" and not MODES[name].get("evict"):
        pytest.skip("a list of slots is not read from a quantised cache: refused")
    model = copy.deepcopy(tiny).to(DEVICE, torch.bfloat16)
    ids, results = draw(4, 100), []
    for decode_impl in ("eager", "graph"):
        engine = build(model, make(name, kv_dtype=kv_dtype), batch=4, length=100, impl=impl, decode_impl=decode_impl)
        for _ in range(2):
            engine.prefill(ids, [100, 1, 37, 64])
            tokens = engine.decode(30)
        results.append((tokens, engine.logits.clone(), engine.positions(LAYERS - 1)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine._step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.parametrize("name", ("decode", "evict"))
def test_a_forced_question_is_scored_again(tiny, name):
    """question=hidden: what is fed after prefill changes what is read, so that a selection need not stay stale."""
    ids, question = draw(1, 100), draw(1, 12)
    states = []
    for forced in (question, draw(1, 12)):
        engine = build(tiny, make(name), length=100)
        engine.prefill(ids)
        before = engine.method.step_scores.smoothed.clone()
        engine.decode(12, forced=forced)
        assert not torch.equal(before, engine.method.step_scores.smoothed)
        states.append(engine.method.index.clone())
    assert not torch.equal(*states)


def test_pooling_segments_and_pages_are_loops():
    scores = torch.rand(2, 3, 41, dtype=torch.float64)
    for pool in (1, 3, 15):
        half, pooled = pool // 2, pool_neighbours(scores, pool)
        for j in range(41):
            assert torch.equal(pooled[..., j], scores[..., max(0, j - half) : j + half + 1].amax(-1))
    shares = share_of_segment(scores, 16)
    for start in (0, 16, 32):
        part = scores[..., start : start + 16]
        assert torch.allclose(shares[..., start : start + 16], part / part.sum(-1, keepdim=True), atol=0, rtol=1e-12)
    assert torch.equal(share_of_segment(torch.zeros(20), 8), torch.zeros(20))
    pages = page_scores(-scores, 16)
    assert torch.equal(pages, torch.stack([-scores[..., i : i + 16].amin(-1) for i in (0, 16, 32)], -1))


@pytest.mark.parametrize("fuse", ("max", "mean"))
@pytest.mark.parametrize("head_reduce", ("max", "mean"))
def test_fused_scores_are_loops(head_reduce, fuse):
    mass = torch.rand(3, 2, 4, 29, dtype=torch.float64)  # [P, B, Hkv, T]
    fused = fused_scores(mass, head_reduce, fuse, pool=5, segment=0)
    join, heads = (max if fuse == "max" else lambda x: sum(x) / len(x)), (max if head_reduce == "max" else lambda x: sum(x) / 4)
    for batch in range(2):
        for j in range(29):
            near = range(max(0, j - 2), min(29, j + 3))
            expected = join([max(heads(mass[p, batch, :, i].tolist()) for i in near) for p in range(3)])
            assert float(fused[batch, j]) == pytest.approx(expected, rel=1e-12)


def test_step_scores_are_the_softmax(tiny):
    """Mass of a step from logits and lse, with what lies behind the lengths undefined."""
    spec = hf.make_spec(tiny, batch_size=2, context_len=20, max_new_tokens=5, impl="reference")
    state = StepScores(spec, 1)
    logits, lengths = torch.randn(2, HEADS, 25) * 4, torch.tensor([25, 11])
    state.logits.copy_(logits)
    state.logits[1, :, 11:] = math.nan
    lse = torch.stack([logits[i, :, :n].logsumexp(-1) for i, n in enumerate(lengths)])
    state.take(0, lse, lengths, "mean")
    for i, n in enumerate(lengths):
        expected = logits[i, :, :n].double().softmax(-1).view(KV_HEADS, -1, n).mean(1)
        assert (state.mass[0, i, :, :n] - expected).abs().max() < 1e-6 and not state.mass[0, i, :, n:].any()
    assert sum(t.numel() for t in state.tensors()) * 4 == StepScores.num_bytes(spec, 1)


def test_mlp_untrained_is_pool_and_trained_is_not(tiny, tmp_path):
    ids, forced = draw(1, 100), draw(1, 5)

    def logits(**knobs):
        engine = build(tiny, make("prefill", sparsity=0.6, **knobs), length=100)
        engine.prefill(ids)
        return engine, engine.score(forced, keep_logits=True)[1]

    pooled, expected = logits()
    untrained, actual = logits(selector="mlp")
    # the weights of the MLP cost a slot or two
    assert 0 <= pooled.method.planned.kept - untrained.method.planned.kept <= 3
    assert untrained.method.flags() == ["untrained"] and pooled.method.flags() == []
    kept = untrained.positions()[0, 0, : untrained.method.planned.kept].tolist()
    assert set(kept) <= set(pooled.positions()[0, 0, : pooled.method.planned.kept].tolist())
    mlp = SelectorMLP(2, KV_HEADS, 15)
    torch.nn.init.normal_(mlp.last.weight, std=3.0)
    facts = {"predict_layers": [1, 2], "observe": 32, "head_reduce": "max", "pool": 15}
    mlp.save(tmp_path / "mlp.safetensors", facts | {"source": "test"})
    trained, other = logits(selector="mlp", selector_file=str(tmp_path / "mlp.safetensors"))
    assert trained.method.flags() == [] and trained.method.facts()["selector_file"]
    assert trained.positions().tolist() != untrained.positions().tolist() and not torch.allclose(other, actual)
    with pytest.raises(ValueError, match="was trained for pool=15, not 7: set method.pool=15, or train again"):
        logits(selector="mlp", selector_file=str(tmp_path / "mlp.safetensors"), pool=7)
    with pytest.raises(ValueError, match=r"was trained for predict_layers=\[1, 2\], not \[0\]"):
        logits(selector="mlp", selector_file=str(tmp_path / "mlp.safetensors"), predict_layers=[0])


def test_mlp_is_its_formula():
    mlp = SelectorMLP(2, 3, pool=3)
    torch.nn.init.normal_(mlp.last.weight)
    mass = torch.rand(2, 5, 3, 11) ** 8  # [P, B, Hkv, T]
    found = mlp(torch.ones(5, 11), mass)
    for b, j in ((0, 0), (4, 10), (2, 5)):
        near = mass[:, b, :, max(0, j - 1) : j + 2].amax(-1)
        features = torch.cat([mass[:, b, :, j], near], 1).flatten().clamp(min=1e-6).log() / math.log(1e-6)
        expected = mlp.last(torch.nn.functional.gelu(mlp.first(1 - 2 * features))).exp()
        assert found[b, j].item() == pytest.approx(expected.item(), rel=1e-4)
    assert sum(p.numel() for p in mlp.parameters()) * 4 == SelectorMLP.num_bytes(2, 3)


def test_depth_follows_the_length(tiny):
    def layers(length):
        spec = hf.make_spec(tiny, batch_size=1, context_len=length, max_new_tokens=4, impl="reference")
        return make("prefill", predict_layers=[0], depth_by_length={100: [1, 2], 300: [3]}).layers_for(spec)

    assert [layers(n) for n in (99, 100, 299, 300)] == [[0], [1, 2], [1, 2], [3]]
    spec = hf.make_spec(tiny, batch_size=1, context_len=200, max_new_tokens=4, impl="reference")
    with pytest.raises(ValueError, match=r"predict_layers=\[9\] names a layer that the model lacks"):
        make("prefill", depth_by_length={100: [9]}).plan(spec)


def test_auto_reads_the_calibration(tiny, tmp_path):
    spec = hf.make_spec(tiny, batch_size=1, context_len=200, max_new_tokens=4, impl="reference")
    file = tmp_path / "calibration.json"
    auto = make("prefill", predict_layers="auto", calibration=str(file))
    with pytest.raises(ValueError, match=r"auto needs a calibration and .* does not exist: make it with `python -m harness"):
        auto.plan(spec)
    with pytest.raises(ValueError, match="method.calibration names no file"):
        make("prefill", predict_layers="auto").plan(spec)
    written = {"shape": calibration.shape_of(spec), "weights": "these", "sparda": {"predict_layers": [2, 1]}}
    file.write_text(json.dumps(written))
    assert auto.layers_for(spec) == [1, 2]
    engine = build(tiny, auto)
    assert engine.method.facts() == {
        "predict_layers": [1, 2], "predictor_depth": 0.75, "calibration": str(file), "selector_file": None,
        "calibration_weights": "these",
    }  # fmt: skip
    assert "calibration_weights" not in build(tiny, make("prefill")).method.facts()
    file.write_text(json.dumps(written | {"shape": calibration.shape_of(spec) | {"num_layers": 9}}))
    with pytest.raises(ValueError, match="was made for another model"):
        auto.plan(spec)
    file.write_text("{")
    with pytest.raises(ValueError, match="is no calibration of sparda"):
        auto.plan(spec)


@pytest.mark.parametrize(
    ("knobs", "message"),
    (
        (dict(select="both"), "method.select=both is not one of prefill, decode"),
        (dict(granularity=32), "method.granularity=32 is not one of token, 16, 64"),
        (dict(selector="svm"), "method.selector=svm"),
        (dict(batching="sort"), "method.batching=sort"),
        (dict(evict=True), "method.evict and method.ema need method.select=decode"),
        (dict(ema=0.5), "need method.select=decode"),
        (dict(select="decode", ema=0.0), "method.ema=0.0 is outside"),
        (dict(select="decode", batching="bucket"), "method.batching=bucket needs method.select=prefill"),
        (dict(select="decode", evict=True, granularity=16), "needs method.granularity=token"),
        (dict(segment=-1), "method.segment=-1 >= 0"),
        (dict(pool=4), "method.pool=4 must be odd"),
        (dict(observe="some"), "method.observe=some"),
        (dict(predict_layers="deep"), "expected a list as in [1,2], or auto"),
        (dict(predict_layers=[1, 1]), "each once"),
        (dict(depth_by_length={"x": [1]}), "must name layers by length, as in {8192: [15, 22]}"),
        (dict(depth_by_length={100: []}), "method.depth_by_length.100=[] must name at least one layer"),
    ),
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_mistakes_are_one_line(knobs, message):
    with pytest.raises(ValueError) as caught:
        SparDA(**knobs)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_layer_a_predictor_is_refused(tiny):
    spec = hf.make_spec(tiny, batch_size=1, context_len=200, max_new_tokens=4, impl="reference")
    with pytest.raises(ValueError, match="select=decode needs a layer that is no predictor"):
        make("decode", predict_layers=[0, 1, 2, 3]).plan(spec)


def test_bucket_keeps_a_share_of_each_length(tiny):
    engine = build(tiny, make("bucket", sparsity=0.3), batch=3, length=400)
    kept = engine.method.planned.kept
    engine.prefill(draw(3, 400), [400, 300, 120])
    filled = [int((engine.positions()[seq, 0] >= 0).sum()) for seq in range(3)]
    shares = [math.ceil(kept * n / 400 / 64) * 64 for n in (300, 120)]
    assert filled == [kept, *shares] and kept > shares[0] > shares[1] == 128 or filled[2] == 120
