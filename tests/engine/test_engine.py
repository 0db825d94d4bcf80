"""The engine against Hugging Face itself: the same logits and tokens for full, a masked dense forward for every method."""

import pytest
import torch
from transformers import DynamicCache

from harness.engine import Engine
from methods.full import Full
from methods.h2o import H2O
from methods.int8 import Int8
from methods.oracle import Oracle
from methods.random import Random
from methods.snapkv import SnapKV
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window

VOCAB = 512
METHODS = {
    "full": lambda: Full(),
    "int8": lambda: Int8(),
    "window": lambda: Window(sparsity=0.6),
    # 8 bit comes in tiles of 32 slots: 50 tokens take two, these keep one
    "window_int8": lambda: Window(sparsity=0.4, kv_dtype="int8"),
    "streaming_llm": lambda: StreamingLLM(sparsity=0.6),
    "streaming_llm_int8": lambda: StreamingLLM(sparsity=0.3, kv_dtype="int8"),
    "sparda": lambda: SparDA(sparsity=0.6, predict_layers=[1], window=4),
    "sparda_int8": lambda: SparDA(sparsity=0.4, predict_layers=[0, 1], window=4, kv_dtype="int8", observe="all"),
    "h2o": lambda: H2O(sparsity=0.6),
    "h2o_mean_int8": lambda: H2O(sparsity=0.3, score="mean", kv_dtype="int8"),
    "snapkv": lambda: SnapKV(sparsity=0.6, window=4),
    "random": lambda: Random(sparsity=0.6, window=4),
    "oracle": lambda: Oracle(sparsity=0.6),
}
KEEP_ALL = {
    "window": lambda: Window(sparsity=0.0),
    "streaming_llm": lambda: StreamingLLM(sparsity=0.0),
    "sparda": lambda: SparDA(sparsity=0.0, predict_layers=[1]),
    "h2o": lambda: H2O(sparsity=0.0),
    "snapkv": lambda: SnapKV(sparsity=0.0),
    "random": lambda: Random(sparsity=0.0),
    "oracle": lambda: Oracle(sparsity=0.0),
}


def draw(*shape):
    return torch.randint(0, VOCAB, shape)


def build(model, method, ids, steps=40):
    return Engine(model, method, batch_size=len(ids), max_prompt_len=ids.shape[1], max_new_tokens=steps)


@torch.no_grad()
def hf_logits(model, ids, mask=None):
    """All logits of one dense forward of transformers' own attention; mask [T, T] bool adds to causality nothing by itself."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if mask is None else "eager")
    try:
        return _logits(model, ids, mask)
    finally:
        model.set_attn_implementation(before)


def _logits(model, ids, mask):
    if mask is None:
        return model(ids).logits
    return model(ids, attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None, None]).logits


@torch.no_grad()
def forced_logits(engine, ids, forced):
    """Logits that predict forced[0], forced[1], ..., and those after the last: [n + 1, V]."""
    first = engine.prefill(ids)[0]
    _, logits = engine.score(forced, keep_logits=True)
    assert torch.equal(logits[0, 0], first)
    return torch.cat([logits[0], engine.logits])


@pytest.mark.parametrize("kv_heads", (8, 4, 2, 1), ids=lambda n: f"G{8 // n}")
@pytest.mark.parametrize("length", (1, 2, 33), ids=lambda n: f"T{n}")
def test_full_is_hugging_face(tiny_llama, length, kv_heads):
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=kv_heads)
    ids, forced = draw(1, length), draw(1, 9)
    expected = hf_logits(model, torch.cat([ids, forced], 1))[0, length - 1 :]
    actual = forced_logits(build(model, Full(), ids), ids, forced)
    assert (actual - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ("qwen2", "qwen3", "mistral", "granite"))
def test_full_on_other_families(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2,
        **({"attention_multiplier": 0.31} if kind == "granite" else {}),
        **({"sliding_window": None} if kind == "mistral" else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, forced = draw(1, 19), draw(1, 5)
    expected = hf_logits(model, torch.cat([ids, forced], 1))[0, 18:]
    actual = forced_logits(build(model, Full(), ids), ids, forced)
    assert (actual - expected).abs().max() < 1e-4


def test_decode_is_greedy_generate(tiny_llama):
    model = tiny_llama()
    ids = draw(3, 21)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 21:]
    engine = build(model, Full(), ids)
    engine.prefill(ids)
    assert torch.equal(torch.cat([engine.decode(5), engine.decode(7)], 1), expected)


def test_score_is_log_softmax(tiny_llama):
    model = tiny_llama()
    ids, forced = draw(2, 17), draw(2, 6)
    logits = hf_logits(model, torch.cat([ids, forced], 1))[:, 16:-1]
    expected = logits.log_softmax(-1).gather(2, forced[..., None])[..., 0]
    engine = build(model, Full(), ids)
    engine.prefill(ids)
    assert (engine.score(forced) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", KEEP_ALL)
def test_keep_all_is_dense(tiny_llama, name):
    model = tiny_llama()
    ids, forced = draw(1, 50), draw(1, 30)
    expected = hf_logits(model, torch.cat([ids, forced], 1))[0, 49:]
    engine = build(model, KEEP_ALL[name](), ids)
    assert (forced_logits(engine, ids, forced) - expected).abs().max() < 1e-4
    assert engine.method.planned.noop


@pytest.mark.parametrize("length", (3, 40, 61), ids=lambda n: f"T{n}")
def test_window_is_masked_dense(tiny_llama, length):
    model = tiny_llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    ids, forced = draw(1, length), draw(1, 45)
    # the budget belongs to the longest prompt; a shorter one lives in the same ring
    engine = Engine(model, Window(sparsity=0.6), batch_size=1, max_prompt_len=61, max_new_tokens=60)
    slots = engine.method.planned.num_slots
    assert slots == 24
    total = length + 45
    row, column = torch.arange(total)[:, None], torch.arange(total)
    # prompt rows attend densely, decoded rows to the last `slots` tokens with themselves
    mask = (column <= row) & ((row < length) | (column > row - slots))
    expected = hf_logits(model, torch.cat([ids, forced], 1), mask)[0, length - 1 :]
    assert (forced_logits(engine, ids, forced) - expected).abs().max() < 1e-4
    held = engine.positions()[0, 0].sort().values.tolist()
    assert held == [-1] * max(0, slots - total) + list(range(max(0, total - slots), total))


@pytest.mark.parametrize(
    "knobs",
    (
        dict(predict_layers=[1, 2]),
        dict(predict_layers=[0], pool=1, observe=1),
        dict(predict_layers=[3], head_reduce="mean", observe="all"),
        dict(predict_layers=[2, 0], fuse="mean", pool=5),
    ),
    ids=("two", "first", "all_queries", "mean"),
)
def test_sparda_is_masked_dense(tiny_llama, knobs):
    """The index from transformers' own attention weights, then a dense forward that hides what it drops."""
    model = tiny_llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=4)
    ids, forced = draw(1, 71), draw(1, 20)
    method = SparDA(sparsity=0.7, window=5, num_sinks=2, **knobs)
    engine = build(model, method, ids)
    actual = forced_logits(engine, ids, forced)

    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    kept = method.planned.kept
    queries = 71 if method.observe == "all" else method.observe
    scores = []
    for layer in method.predict_layers:
        mass = weights[layer][0, :, -queries:].sum(1)  # [Hq, T]
        mass = mass.amax(0) if method.head_reduce == "max" else mass.mean(0)
        half = method.pool // 2
        scores.append(torch.stack([mass[max(0, j - half) : j + half + 1].max() for j in range(71)]))
    fused = torch.stack(scores).amax(0) if method.fuse == "max" else torch.stack(scores).mean(0)
    fused[:2], fused[-5:] = torch.inf, torch.inf
    # pooling makes equal scores common: the earlier position stays
    index = sorted(sorted(range(71), key=lambda j: (-float(fused[j]), j))[:kept])

    held = engine.positions()[0, 0]
    assert held[:kept].tolist() == index
    assert held[kept : kept + 20].tolist() == list(range(71, 91))
    mask = torch.ones(91, 91).tril().bool()
    dropped = torch.ones(71, dtype=torch.bool)
    dropped[index] = False
    mask[71:, :71] &= ~dropped
    expected = hf_logits(model, torch.cat([ids, forced], 1), mask)[0, 70:]
    assert (actual - expected).abs().max() < 1e-4


@torch.no_grad()
def streaming_reference(model, ids, num_sinks, num_slots, prompt_len):
    """StreamingLLM the slow way: dense prompt, then every step rotates the whole cache by place. Logits [T, V]."""
    decoder, config = model.model, model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def rotated(x, positions):  # [H, N, D]
        cos, sin = decoder.rotary_emb(x, position_ids=positions[None])
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * cos + turned * sin

    keys = [[] for _ in decoder.layers]
    values = [[] for _ in decoder.layers]
    # the prompt's hidden states come from the dense model, token by token causal attention over all of it
    logits = []
    for position in range(ids.shape[1]):
        hidden = decoder.embed_tokens(ids[0, position : position + 1])
        for number, layer in enumerate(decoder.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q = attention.q_proj(normed).view(heads, 1, dim)
            keys[number].append(attention.k_proj(normed).view(kv_heads, 1, dim))
            values[number].append(attention.v_proj(normed).view(kv_heads, 1, dim))
            kept = list(range(position + 1))
            if position >= prompt_len and len(kept) > num_slots:
                kept = kept[:num_sinks] + kept[len(kept) - (num_slots - num_sinks) :]
            places = torch.arange(len(kept))
            k = rotated(torch.cat([keys[number][j] for j in kept], 1), places).repeat_interleave(heads // kv_heads, 0)
            v = torch.cat([values[number][j] for j in kept], 1).repeat_interleave(heads // kv_heads, 0)
            weights = (rotated(q, places[-1:]) @ k.transpose(1, 2) * dim**-0.5).softmax(-1)
            hidden = hidden + attention.o_proj((weights @ v).view(1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits.append(model.lm_head(decoder.norm(hidden))[0])
    return torch.stack(logits)


@pytest.mark.parametrize("length", (2, 30, 57), ids=lambda n: f"T{n}")
def test_streaming_llm_is_the_slow_rotation(tiny_llama, length):
    model = tiny_llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    ids, forced = draw(1, length), draw(1, 40)
    engine = Engine(model, StreamingLLM(sparsity=0.6), batch_size=1, max_prompt_len=57, max_new_tokens=60)
    slots = engine.method.planned.num_slots
    expected = streaming_reference(model, torch.cat([ids, forced], 1), 4, slots, length)[length - 1 :]
    assert (forced_logits(engine, ids, forced) - expected).abs().max() < 2e-4
    total = length + 40
    assert total > slots, "the case must evict"
    held = engine.positions()[0, 0].sort().values.tolist()
    assert held == [0, 1, 2, 3, *range(total - (slots - 4), total)]


@pytest.mark.parametrize("name", METHODS)
def test_batch_and_padding_change_nothing(tiny_llama, name):
    """B = 1 and B = 8, ragged, give the same tokens: padding enters no score, no cache, no softmax."""
    model = tiny_llama()
    lengths = [50, 1, 37, 16, 2, 49, 20, 50]
    ids = draw(8, 50)
    engine = Engine(model, METHODS[name](), batch_size=8, max_prompt_len=50, max_new_tokens=40)
    engine.prefill(ids, lengths)
    together = engine.decode(12)
    # what stands in the padding must not matter
    other = ids.clone()
    for seq, length in enumerate(lengths):
        other[seq, length:] = 7
    engine.prefill(other, lengths)
    assert torch.equal(engine.decode(12), together)
    single = Engine(model, METHODS[name](), batch_size=1, max_prompt_len=50, max_new_tokens=40)
    for seq, length in enumerate(lengths):
        single.prefill(ids[seq : seq + 1, :length])
        assert torch.equal(single.decode(12)[0], together[seq]), seq


def test_forced_question_is_ragged(tiny_llama):
    model = tiny_llama()
    ids, forced = draw(2, 20), draw(2, 6)
    engine = build(model, Full(), ids)
    engine.prefill(ids)
    ragged = forced.clone()
    ragged[1, 2:] = -1
    tokens = engine.decode(12, forced=ragged)
    for seq, length in enumerate((6, 2)):
        prompt = torch.cat([ids[seq], forced[seq, :length]])[None]
        new = 12 - length
        expected = model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(tokens[seq], expected[0, 20:])


def test_a_conversation_is_what_generate_says_turn_by_turn(tiny_llama):
    """Questions of different lengths, answers of 3 and 4 tokens between them: each sequence keeps its own script."""
    model, free = tiny_llama(), -1
    ids, questions = draw(2, 20), draw(2, 9)
    scripts = [[free] * 3 + questions[0, :5].tolist(), questions[1, :2].tolist() + [free] * 3 + questions[1, 2:8].tolist()]
    forced = torch.tensor([scripts[0] + [free] * 3, scripts[1]])
    engine = build(model, Full(), ids)
    engine.prefill(ids)
    tokens = engine.decode(15, forced=forced)
    for seq, script in enumerate(scripts):
        said = ids[seq].tolist()
        for token in script + [free] * (15 - len(script)):
            greedy = int(model(torch.tensor([said])).logits[0, -1].argmax())
            said.append(greedy if token == free else token)
        assert tokens[seq].tolist() == said[20:]


def test_int8_is_close_to_dense_and_not_equal(tiny_llama):
    model = tiny_llama()
    ids, forced = draw(1, 60), draw(1, 10)
    dense = forced_logits(build(model, Full(), ids), ids, forced)
    coded = forced_logits(build(model, Int8(), ids), ids, forced)
    error = (coded - dense)[1:].norm() / dense[1:].norm()
    assert 1e-5 < error < 2e-2
    assert torch.equal(coded[0], dense[0]), "the prompt itself is attended unquantised"


def test_decoding_past_the_slots_is_refused(tiny_llama):
    ids = draw(1, 9)
    engine = build(tiny_llama(), Full(), ids, steps=5)
    engine.prefill(ids)
    engine.decode(4)
    with pytest.raises(ValueError, match="2 more tokens do not fit: 1 of max_new_tokens=5 are left"):
        engine.decode(2)


def test_prompt_longer_than_planned_is_refused(tiny_llama):
    engine = Engine(tiny_llama(), Full(), batch_size=1, max_prompt_len=8, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompt lengths \[9\] must lie in 1 .. 8"):
        engine.prefill(draw(1, 9))


@pytest.mark.parametrize("name", METHODS)
def test_a_used_engine_starts_clean(tiny_llama, name):
    """A second prompt sees nothing of the first, also when it is shorter."""
    model, method = tiny_llama(), METHODS[name]
    first, second = draw(1, 50), draw(1, 23)
    engine = Engine(model, method(), batch_size=1, max_prompt_len=50, max_new_tokens=30)
    engine.prefill(first)
    engine.decode(30)
    engine.prefill(second)
    fresh = Engine(model, method(), batch_size=1, max_prompt_len=50, max_new_tokens=30)
    fresh.prefill(second)
    assert torch.equal(engine.decode(25), fresh.decode(25))
    assert torch.equal(engine.positions(), fresh.positions())


def test_model_is_left_as_it_was(tiny_llama):
    model = tiny_llama()
    ids = draw(1, 12)
    before = hf_logits(model, ids)
    engine = build(model, Window(sparsity=0.5), ids)
    engine.prefill(ids)
    engine.decode(3)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        assert torch.equal(model(ids, past_key_values=cache, use_cache=True).logits, before)


def test_rewind_repeats_the_decode(tiny_llama):
    ids = draw(2, 30)
    engine = build(tiny_llama(), SparDA(sparsity=0.5, predict_layers=[1], window=4), ids, steps=12)
    engine.prefill(ids, [30, 11])
    first = engine.decode(12)
    engine.rewind()
    assert torch.equal(engine.decode(12), first)
