"""hysparse: gate, regrouped prefill, lists of a step and monitor against loops and fp64."""

import pytest
import torch

from harness import hf
from harness.engine import Engine
from harness.masked_dense import record, replay
from harness.models import ByteTokenizer
from harness.trainers import hysparse as trainer
from methods.gate import CLASSES, Gate, class_of, token_classes
from methods.hysparse import MONITOR_STEPS, HySparse, ListedLayer, Regrouped, best_and_worst
from tasks.base import Sample

SMALL = dict(gate_layer=0, num_first=8, window=8, local_window=16, observe=16, focus=6, pool=3)


def engine_of(model, length=200, batch=1, steps=20, **knobs):
    method = HySparse(**(SMALL | knobs))
    return Engine(model, method, batch_size=batch, max_prompt_len=length, max_new_tokens=steps)


# the gate


@pytest.mark.parametrize(
    ("text", "name"),
    ((" 7", "number"), ("4th", "number"), (" Paris", "proper"), ("THE", "other"), (" river", "content"), (" which", "other"),
     ("the", "other"), (",", "other"), ("", "other"), ("\n", "other"), ("Über", "proper"), (" Which", "other")),
)  # fmt: skip
def test_class_of_a_token(text, name):
    assert class_of(text) == name


def test_token_classes_cover_the_vocabulary():
    class Words:
        vocab_size = 3

        def decode(self, ids):
            return ("a", " 1", " Ada")[ids[0]]

    assert token_classes(Words(), 5) == bytes((0, 3, 2, 0, 0)) and token_classes(Words(), 2) == bytes((0, 3))


def test_convolution_is_depthwise_and_causal():
    gate, values = Gate(6), torch.randn(9, 6)
    torch.nn.init.normal_(gate.conv)
    kernel = gate.conv.flip(0).T[:, None]  # conv1d wants the oldest first
    padded = torch.nn.functional.pad(values.T[None], (Gate.KERNEL, 0))[..., :-1]
    expected = torch.nn.functional.conv1d(padded, kernel, groups=6)[0].T
    assert torch.allclose(gate.expected(gate.before(values)), expected, atol=1e-6)


def test_sensitivity_is_distance_from_the_neighbours():
    gate = Gate(6)
    values = torch.randn(1, 6).repeat(9, 1)
    values[7] *= -1
    sensitivity = gate.sensitivity(gate.distances(values, gate.before(values)))
    assert (sensitivity[4:7] < 1e-3).all() and sensitivity[7] > 0.99 and sensitivity[0] > 0.99
    assert ((sensitivity >= 0) & (sensitivity <= 1)).all()


def test_the_gate_ranks_as_counted_from_full_attention(tiny_llama):
    """Logits from the attention matrices of Hugging Face, written out; the best of them are key tokens and kept."""
    model, ids = tiny_llama(attn_implementation="eager"), torch.randint(0, 512, (1, 101))
    engine = engine_of(model, 101, gate_layer=1, sparsity=0.7)
    method, seen = engine.method, {}
    method.token_classes = bytes(i % 4 for i in range(512))
    layers = method.layers[1]
    method.look, look = lambda *args: (seen.update(classes=method.prompt_classes), look(*args)), method.look
    engine.prefill(ids)
    decoder = model.model
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[1][0].double()  # [Hq, T, T]
        values = decoder.layers[0].self_attn.v_proj(decoder.layers[0].input_layernorm(decoder.embed_tokens(ids)))[0]
    grouped = weights.unflatten(0, (2, 2))
    received = sum(grouped[:, :, -n:].mean(2).amax(1) for n in (16, 6)).amax(0) / 2
    pooled = torch.stack([received[max(0, j - 1) : j + 2].max() for j in range(101)])
    expected = []
    for j in range(101):
        before = [values[j - i] if j >= i else torch.zeros(32) for i in range(1, 5)]
        guess = sum(before) / 4
        sensitivity = (values[j] - guess).norm() / (values[j].norm() + guess.norm())
        prior = (0.0, 0.25, 0.5, 0.75)[int(ids[0, j]) % 4]
        weight = method.weights.sense.item(), method.weights.attention.item(), method.weights.bias.item()
        expected.append(weight[2] + prior + weight[0] * sensitivity + weight[1] * (pooled[j] * 101).log2().clamp(-12, 12))
    expected = torch.stack(expected)
    assert (seen["classes"] == ids[0] % 4).all()
    average = torch.stack([(pooled[j] * 101).log2().clamp(-12, 12) for j in range(101)]).mean()
    assert abs(float(method.average[0]) - average) < 1e-3
    order = [int(j) for j in expected.argsort(descending=True) if 4 <= j < 93]
    kept = sorted([*range(4), *order[: method.planned.kept - 12], *range(93, 101)])
    assert layers.positions(engine.seen)[0, 0, : len(kept)].tolist() == kept


@pytest.mark.parametrize("forced", (["number"], ["number", "proper"]), ids=lambda names: "_".join(names))
def test_forced_classes_are_kept_and_key(tiny_llama, forced):
    method = HySparse(**SMALL, sparsity=0.5, forced=forced)
    method.token_classes = bytes(
        CLASSES.index("number") if i < 10 else CLASSES.index("proper") if i < 20 else 0 for i in range(512)
    )
    engine = Engine(tiny_llama(), method, batch_size=1, max_prompt_len=200, max_new_tokens=4)
    ids = torch.randint(20, 512, (1, 200))
    ids[0, 50:58], ids[0, 70:75] = torch.arange(8), torch.arange(10, 15)
    engine.prefill(ids)
    held = set(engine.positions(1)[0, 0].tolist())
    assert set(range(50, 58)) <= held and (set(range(70, 75)) <= held or "proper" not in forced)


def test_the_tokenizer_is_read(tiny_llama):
    method = HySparse(**SMALL, sparsity=0.5, forced=["number"])
    method.read_tokenizer(ByteTokenizer(), 512)
    engine = Engine(tiny_llama(), method, batch_size=1, max_prompt_len=100, max_new_tokens=4)
    engine.prefill(torch.tensor([list(b"7" * 20 + b"." * 80)]))
    assert set(range(20)) <= set(engine.positions(1)[0, 0].tolist()) and method.facts()["class_prior"] == "lexical"


def test_forced_needs_the_classes(tiny_llama):
    with pytest.raises(ValueError, match=r"method.forced=\['number'\] needs the classes of tokens, and there is no tokenizer"):
        engine_of(tiny_llama(), forced=["number"])


# prefill


def seen_by(key_tokens, q, k, block, local_window, max_k, min_k):
    """[Hkv, T, T] bool by loops over rows, from what the docstring says."""
    length, num_kv_heads = len(key_tokens), k.shape[1]
    q, k = q[0].double(), k[0].double()
    keys = key_tokens.nonzero()[:, 0].tolist()
    ordinary = (~key_tokens).nonzero()[:, 0].tolist()
    groups = [ordinary[i : i + block] for i in range(0, len(ordinary), block)]
    seen = torch.zeros(num_kv_heads, length, length, dtype=torch.bool)
    seen[:, keys] = True
    for head in range(num_kv_heads):
        own = q.unflatten(0, (num_kv_heads, -1))[head].mean(0)  # [T, D]
        for i, rows in enumerate(groups):
            taken, left = list(keys), []
            for j in range(i + 1):
                if groups[j][-1] > rows[0] - local_window:
                    taken += groups[j]
                else:
                    left.append(j)
            score = {j: float(own[rows].mean(0) @ k[head, groups[j]].mean(0)) for j in left}
            left.sort(key=score.get, reverse=True)
            for j in {*left[:max_k], *left[max(0, len(left) - min_k) :]}:
                taken += groups[j]
            for row in rows:
                seen[head, row, taken] = True
    return seen & torch.ones(length, length, dtype=torch.bool).tril()


PREFILLS = [(3, length, ks) for length in (1, 63, 333, 700) for ks in ((2, 1), (1, 0), (0, 2), (0, 0), (50, 50))]


@pytest.mark.parametrize(
    ("group", "length", "ks"),
    (*PREFILLS, (1, 333, (2, 1)), (4, 333, (2, 1))),
    ids=lambda x: f"max{x[0]}_min{x[1]}" if isinstance(x, tuple) else str(x),
)
def test_prefill_is_masked_attention(group, length, ks):
    """Rows, columns and counts of a layer behind the gate are those of a mask made by loops."""
    method = HySparse(**(SMALL | dict(max_k=ks[0], min_k=ks[1])))
    q, k, v = (torch.randn(1, heads, length, 16) for heads in (2 * group, 2, 2))
    method.spec = type("Spec", (), {"scale": 0.3, "impl": "reference"})
    method.regrouped, method.monitor, method.clock = None, Counts(), Nothing()
    method.key_tokens = torch.rand(length) < 0.2
    out = method.attend(q, k, v)
    seen = seen_by(method.key_tokens, q, k, 64, 16, *ks)
    wide = (x.double().repeat_interleave(group, 1) for x in (k, v))
    keys, values = next(wide), next(wide)
    logits = (q.double() @ keys.mT * 0.3).masked_fill(~seen.repeat_interleave(group, 0), -torch.inf)
    assert (out - logits.softmax(-1) @ values).abs().max() < 1e-5
    assert float(method.monitor.pairs) == seen.sum() / 2


class Counts:
    def attended(self, pairs, length):
        self.pairs = pairs


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *args):
        pass


def test_regrouping_is_a_permutation():
    groups = Regrouped(torch.rand(201) < 0.3, 64, 16)
    assert len(groups.order) % 64 == 0 and torch.equal(groups.order[groups.place].long(), torch.arange(201))
    assert int((groups.order >= 0).sum()) == 201 and int(groups.pairs.sum()) == 201 * 202 // 2


def test_best_and_worst_of_candidates():
    scores = torch.tensor([[5.0, 1.0, 3.0, -torch.inf, 2.0, 9.0]])
    candidates = torch.tensor([[True, True, True, True, True, False]])
    assert best_and_worst(scores, candidates, 2, 1).tolist() == [[True, False, True, True, False, False]]
    assert best_and_worst(scores, candidates, 1, 0).tolist() == [[True, False, False, False, False, False]]
    assert best_and_worst(scores, candidates, 4, 4).tolist() == candidates.tolist()


def test_sparse_prefill_skips_and_says_how_much(tiny_llama):
    model, ids = tiny_llama(num_hidden_layers=3), torch.randint(0, 512, (1, 700))
    facts = {}
    for name, knobs in {
        "dense": dict(key_fraction=1.0),
        "sparse": dict(max_k=1, min_k=1),
        "no_blocks": dict(max_k=0, min_k=0),
    }.items():
        engine = engine_of(model, 700, **(dict(key_fraction=0.1) | knobs))
        engine.prefill(ids)
        facts[name] = engine.method.facts()
    assert facts["dense"]["prefill_sparsity"] == 0
    # one of three layers is dense
    assert 0.05 < facts["sparse"]["prefill_sparsity"] < facts["no_blocks"]["prefill_sparsity"] < 2 / 3


def test_chunks_attend_densely_and_keep_the_same(tiny_llama):
    model, ids = tiny_llama(), torch.randint(0, 512, (1, 150))
    whole = engine_of(model, 150, key_fraction=1.0)
    chunks = Engine(model, HySparse(**SMALL), batch_size=1, max_prompt_len=150, max_new_tokens=20, prefill_chunk=40)
    logits = [engine.prefill(ids) for engine in (whole, chunks)]
    assert torch.allclose(*logits, atol=1e-4)
    assert chunks.method.facts()["prefill_sparsity"] == 0
    assert torch.equal(whole.positions(1), chunks.positions(1)) and torch.equal(whole.decode(9), chunks.decode(9))


# the cache


@pytest.mark.parametrize("answer_full", (True, False), ids=("full", "gated"))
@pytest.mark.parametrize("group", (1, 3, 4), ids=lambda g: f"G{g}")
def test_steps_are_masked_attention_over_what_is_claimed(tiny_llama, group, answer_full):
    heads = {1: 2, 3: 6, 4: 8}[group]
    model = tiny_llama(hidden_size=96 if group == 3 else 64, num_attention_heads=heads, num_key_value_heads=2)
    engine = engine_of(model, 600, 3, 30, sparsity=0.5, answer_full=answer_full, max_k=1, min_k=1)
    prompts = [torch.randint(0, 512, (length,)) for length in (600, 1, 290)]
    recording = record(engine, prompts, torch.randint(0, 512, (3, 30)))
    for seq in range(3):
        exact = replay(model, recording, seq, torch.float64)
        assert (recording.logits[:, seq] - exact).abs().max() < 1e-4


def test_batch_and_padding_change_nothing(tiny_llama):
    model, ids, lengths = tiny_llama(), torch.randint(0, 512, (3, 300)), [300, 1, 61]
    for answer_full in (True, False):
        together = engine_of(model, 300, 3, 12, answer_full=answer_full)
        together.prefill(ids, lengths)
        tokens = together.decode(12)
        alone = engine_of(model, 300, 1, 12, answer_full=answer_full)
        for seq, length in enumerate(lengths):
            alone.prefill(ids[seq : seq + 1, :length])
            assert torch.equal(alone.decode(12)[0], tokens[seq])


@pytest.mark.parametrize("answer_full", (True, False), ids=("full", "gated"))
@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, monkeypatch, length, answer_full):
    # the weights of the gate are no garbage
    held = HySparse.tensors
    monkeypatch.setattr(HySparse, "tensors", lambda self: {k: v for k, v in held(self).items() if k not in ("gate", "monitor")})
    garbage_is_never_read(HySparse(**(SMALL | dict(window=5)), sparsity=0.3, answer_full=answer_full), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(HySparse(**(SMALL | dict(window=5)), sparsity=0.3))


def test_noop_is_full(tiny_llama):
    model, ids = tiny_llama(), torch.randint(0, 512, (1, 200))
    engine = engine_of(model, sparsity=0.0)
    assert engine.method.planned.noop and engine.method.flags() == []
    with torch.no_grad():
        assert torch.allclose(engine.prefill(ids), model(ids).logits[:, -1], atol=1e-4)


def test_layers_with_a_sparsity_of_their_own(tiny_llama):
    """Bytes as written down, within the budget; each layer keeps the best by the same ranking."""
    model = tiny_llama(num_hidden_layers=4)
    engine = engine_of(model, 300, 2, 20, sparsity=0.6, layer_sparsity={0: 0.2, 2: 0.8})
    method, spec = engine.method, engine.spec
    ids = torch.randint(0, 512, (2, 300))
    engine.prefill(ids, [300, 50])
    sizes = [engine.method.size_of[i] for i in range(4)]
    assert sizes[0] == 240 and sizes[2] == 60 and sizes[1] == sizes[3] == method.planned.kept
    row = 2 * 2 * 16 * 4  # K and V of two heads in fp32
    ledger = engine.ledger()
    assert ledger.kinds["kv"] == 2 * sum(sizes) * row
    assert ledger.kinds["index"] == 2 * sum(4 * size + 8 for size in set(sizes))
    assert ledger.kinds["kv"] + sum(ledger.kinds[k] for k in ("index", "gate", "monitor")) == ledger.resident_bytes
    assert 0.97 * method.budget_bytes(spec) < ledger.resident_bytes <= method.budget_bytes(spec)
    held = [set(engine.positions(i)[0, 0].tolist()) - {-1} for i in range(4)]
    assert [len(h) for h in held] == sizes and held[2] < held[1] < held[0] and held[1] == held[3]
    assert engine.positions(0)[1, 0].tolist()[:50] == list(range(50))
    together = engine.decode(20)
    single = engine_of(model, 300, 1, 20, sparsity=0.6, layer_sparsity={0: 0.2, 2: 0.8})
    single.prefill(ids[1:, :50])
    assert torch.equal(single.decode(20)[0], together[1])


@pytest.mark.parametrize(
    ("knobs", "message"),
    (
        ({7: 0.5}, "layer_sparsity names layer 7; the model has layers 0 to 1"),
        ({0: 0.99}, r"layer_sparsity=\{0: 0.99\} leaves 3 slots, fewer than the 13 .* largest here: 0.95"),
        ({0: 0.1, 1: 0.1}, "gives every layer its own share and takes .* bytes, the budget is .*: leave a layer out"),
        ({0: 0.0}, "sparsity=0.8 leaves 0 slots of 300"),
    ),
    ids=("unknown", "too_few", "over_budget", "starved"),
)
def test_layer_sparsity_that_cannot_be(tiny_llama, knobs, message):
    with pytest.raises(ValueError, match=message):
        engine_of(tiny_llama(), 300, sparsity=0.8, layer_sparsity=knobs)


# decode


def test_lists_of_a_step(tiny_llama):
    """Window, best and worst blocks of slots by mean key; all blocks where the gate is open."""
    model = tiny_llama()
    engine = engine_of(model, 900, 2, 20, sparsity=0.2, answer_full=False, max_k=2, min_k=1)
    engine.prefill(torch.randint(0, 512, (2, 900)), [900, 500])
    method, layer = engine.method, engine.method.layers[1]
    assert isinstance(layer, ListedLayer)
    engine.decode(3)
    method.step["open"] = torch.tensor([False, True])
    q, lengths = torch.randn(2, 4, 16), method.step[f"lengths {layer.size}"]
    options = layer.blocks_to_read(q, lengths - 1, lengths)
    for seq, length in enumerate(lengths.tolist()):
        blocks = range(-(-length // 64))
        recent = [b for b in blocks if b >= (length - 8) // 64]
        for head in range(2):
            mean = [layer.slots.k[seq, head, b * 64 : min(b * 64 + 64, length)].mean(0) for b in blocks]
            asked = q[seq, 2 * head : 2 * head + 2].mean(0)
            order = sorted((b for b in blocks if b not in recent), key=lambda b: -float(asked @ mean[b]))
            wanted = list(blocks) if seq == 1 else sorted({*recent, *order[:2], order[-1]})
            count = int(options["index_lens"][seq])
            assert options["index"][seq, head, :count].tolist() == wanted


def test_a_fed_token_is_judged_by_class_and_neighbours(tiny_llama):
    method = HySparse(**SMALL, sparsity=0.5, answer_full=False)
    method.token_classes = bytes(3 if i == 7 else 0 for i in range(512))
    engine = Engine(tiny_llama(), method, batch_size=2, max_prompt_len=100, max_new_tokens=5)
    method.weights.prior[3], method.weights.bias[...], method.weights.sense[...] = 9.0, -5.0, 1.0
    engine.prefill(torch.randint(8, 512, (2, 100)))
    # that of the prompt counts: both are open if it was far above uniform
    for average, expected in ((9.0, [True, True]), (0.0, [True, False])):
        method.average.fill_(average)
        engine.score(torch.tensor([[7], [8]]))
        assert method.step["open"].tolist() == expected
    # what the convolution saw: values of the last four tokens and the new one, by position
    layer, values = method.layers[0], method.layers[0].slots.v
    last = method.step[f"slot {layer.size}"]
    earlier = layer.earlier(last)
    for seq in range(2):
        rows = [values[seq, :, int(last[seq]) - i].flatten() for i in range(1, 5)]
        assert torch.equal(earlier[seq], torch.stack(rows))
    assert engine.positions(0)[0, 0, int(last[0]) - 4 : int(last[0])].tolist() == list(range(97, 101))


@pytest.mark.parametrize(("bias", "rate"), ((99.0, 1.0), (-99.0, 0.0)), ids=("open", "shut"))
def test_monitor_counts(tiny_llama, bias, rate):
    engine = engine_of(tiny_llama(), 600, 2, 20, sparsity=0.2, answer_full=False, max_k=1, min_k=1)
    engine.method.weights.bias[...] = bias
    engine.prefill(torch.randint(0, 512, (2, 600)))
    engine.decode(20)
    facts = engine.method.facts()
    assert facts["gate_rate_prefill"] == facts["gate_rate_decode"] == rate and facts["fallbacks"] == 0
    assert facts["read_share_decode"] == 1 if rate else 0.3 < facts["read_share_decode"] < 0.6
    assert engine.method.flags() == ["untrained"] and facts["class_prior"] == "neutral: no tokenizer"


def test_outside_the_range_a_sequence_falls_back(tiny_llama):
    engine = engine_of(tiny_llama(), 600, 2, 40, sparsity=0.2, answer_full=False, monitor_range=[0.5, 1.0], max_k=1, min_k=1)
    method = engine.method
    engine.prefill(torch.randint(0, 512, (2, 600)))
    method.monitor.totals.zero_()
    method.monitor.fell_at.fill_(-1)
    method.monitor.earliest.fill_(torch.iinfo(torch.int64).max)
    method.weights.bias[...] = -99.0
    for step in range(1, 20):
        engine._step()
        assert method.step["open"].tolist() == [step >= MONITOR_STEPS] * 2
    facts = method.facts()
    assert facts["fallbacks"] == 2 and facts["first_fallback_step"] == MONITOR_STEPS and facts["gate_rate_decode"] == 0
    engine.rewind()
    engine._step()
    assert method.step["open"].tolist() == [False, False], "the same decode again"


def test_a_prompt_outside_the_range_is_prefilled_densely(tiny_llama):
    model, ids = tiny_llama(), torch.randint(0, 512, (1, 600))
    engine = engine_of(model, 600, answer_full=False, monitor_range=[0.0, 0.5])
    engine.method.weights.bias[...] = 99.0
    with torch.no_grad():
        assert torch.allclose(engine.prefill(ids), model(ids).logits[:, -1], atol=1e-4)
    engine.method.weights.bias[...] = -99.0
    engine.decode(2)
    facts = engine.method.facts()
    assert facts["prefill_sparsity"] == 0 and facts["first_fallback_step"] == 0 and facts["read_share_decode"] == 1


# weights and knobs


def test_trained_weights(tiny_llama, tmp_path):
    model, file = tiny_llama(), tmp_path / "gate.safetensors"
    gate = Gate(32)
    gate.prior.data[3] = 4.0
    facts = dict(gate_layer=0, observe=16, focus=6, head_reduce="max", pool=3)
    gate.save(file, facts)
    engine = engine_of(model, gate=str(file))
    assert (
        engine.method.flags() == []
        and float(engine.method.weights.prior[3]) == 4
        and engine.method.facts()["gate_file"] == str(file)
    )
    with pytest.raises(ValueError, match="was trained for pool=3, not 5: set method.pool=3, or train again"):
        engine_of(model, gate=str(file), pool=5)
    Gate(8).save(file, facts)
    with pytest.raises(ValueError, match="holds no gate of this model"):
        engine_of(model, gate=str(file))
    assert engine_of(model, gate=str(tmp_path / "none")).method.flags() == ["untrained"]


@pytest.mark.parametrize(
    ("knobs", "message"),
    (
        (dict(gate_layer=-1), "method.gate_layer=-1 must be a layer, counted from 0, or auto"),
        (dict(gate_layer="deep"), "method.gate_layer=deep must be a layer"),
        (dict(head_reduce="sum"), "method.head_reduce=sum is not one of max, mean"),
        (dict(block=32), "method.block=32 is not one of 64, 128"),
        (dict(pool=2), "method.pool=2 must be odd"),
        (dict(key_fraction=0), r"method.key_fraction=0 is outside \(0, 1\]"),
        (dict(window=3), "method.window=3 must be at least 4"),
        (dict(min_k=-1), "method.min_k=-1 must be at least 0"),
        (dict(forced=["verb"]), "verb is not one of content, proper, number"),
        (dict(layer_sparsity={0: 1.0}), "must give layers a share in"),
        (dict(monitor_range=[0.5, 0.1]), "must be two shares"),
    ),
    ids=lambda x: "_".join(map(str, next(iter(x.items())))) if isinstance(x, dict) else "",
)
def test_knobs_are_checked(knobs, message):
    with pytest.raises(ValueError, match=message):
        HySparse(**knobs)


def test_a_layer_that_the_model_lacks(tiny_llama):
    with pytest.raises(ValueError, match="gate_layer=15 is a layer that the model lacks; .* try method.gate_layer=1"):
        engine_of(tiny_llama(), gate_layer=15)


def test_auto_needs_a_calibration(tiny_llama):
    with pytest.raises(ValueError, match="method.gate_layer=auto needs a calibration"):
        engine_of(tiny_llama(), gate_layer="auto")


def test_lists_are_not_quantised(tiny_llama):
    with pytest.raises(ValueError, match="kv_dtype=int8 is read whole, and HySparse reads lists"):
        engine_of(tiny_llama(), kv_dtype="int8", answer_full=False)
    engine = engine_of(tiny_llama(), kv_dtype="int8")
    engine.prefill(torch.randint(0, 512, (1, 200)))
    engine.decode(3)
    assert engine.finite()


# training


def test_training_teaches_the_gate(tiny_llama, monkeypatch):
    """Decoys receive more attention than the number that deep layers need: the gate learns the class and counts on it."""
    model = tiny_llama()
    spec = hf.make_spec(model, batch_size=1, context_len=150, max_new_tokens=1, impl="reference")
    method = HySparse(gate_layer=1, window=8)

    def lesson(method, loaded, table, spec, sample):
        generator = torch.Generator().manual_seed(sample)
        places = torch.randperm(130, generator=generator) + 5
        received, classes, need = torch.zeros(150), torch.zeros(150, dtype=torch.long), torch.zeros(150)
        received[places[:60]], received[places[60:64]] = 4.0, 1.0
        classes[places[60:64]], need[places[60:64]] = CLASSES.index("number"), 0.25
        return trainer.Lesson(classes, torch.randn(150, 32, generator=generator), received, need)

    monkeypatch.setattr(trainer, "hysparse_lesson", lesson)
    loaded = type("Loaded", (), {"tokenizer": ByteTokenizer(), "model": model})
    file, summary, gate = trainer.train_hysparse(method, loaded, [(spec, i) for i in range(16)], steps=250)
    assert summary["untrained"]["sparsity 0.7"] == 0 and summary["trained"]["sparsity 0.7"] > 0.95
    assert file == "hysparse_gate.safetensors" and summary["facts"] == method.gate_facts() and gate.prior[3] > gate.prior[0] + 1
    rates = [float((lesson(None, None, None, None, i).logits(gate) >= 0).float().mean()) for i in range(1, 16)]
    assert abs(sum(rates) / len(rates) - 0.2) < 0.03


def test_a_lesson_is_what_the_method_sees(tiny_llama):
    model, tokenizer = tiny_llama(), ByteTokenizer()
    ids = torch.randint(0, 256, (90,)).tolist()
    loaded = type("Loaded", (), {"tokenizer": tokenizer, "model": model})
    classes = token_classes(tokenizer, 512)
    spec = hf.make_spec(model, batch_size=1, context_len=90, max_new_tokens=8, impl="reference")
    method = HySparse(**(SMALL | dict(gate_layer=1)), sparsity=0.5)
    method.layer = 1
    lesson = trainer.hysparse_lesson(method, loaded, torch.tensor(list(classes)), spec, Sample("a", ids, answers=["b"]))
    assert abs(float(lesson.need.sum()) - 1) < 1e-5 and not lesson.need[-8:].any()
    engine = Engine(
        model, HySparse(**(SMALL | dict(gate_layer=1)), sparsity=0.5), batch_size=1, max_prompt_len=90, max_new_tokens=8
    )
    engine.method.token_classes = classes
    seen, keys_of = [], engine.method.keys_of
    engine.method.keys_of = lambda logits: (seen.append(logits), keys_of(logits))[1]
    engine.prefill(torch.tensor([ids]))
    assert torch.allclose(lesson.logits(engine.method.weights), seen[0], atol=1e-4)
