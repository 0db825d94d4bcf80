"""Quantised caches in the engine: what decode attends to is an independent quantiser's rows in fp64, over sealed blocks too."""

import pytest
import torch

from harness import hf
from harness.engine import Engine
from methods.fp8 import Fp8
from methods.full import Full
from methods.int4 import Int4
from methods.int8 import Int8
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUANT = {"int8": Int8, "fp8": Fp8, "int4": Int4}
STACKED = {
    "int8": lambda: Int8(),
    "fp8": lambda: Fp8(),
    "int4": lambda: Int4(),
    "sparda_int8": lambda: SparDA(sparsity=0.3, predict_layers=[1], kv_dtype="int8"),
    "sparda_int4": lambda: SparDA(sparsity=0.2, predict_layers=[1], kv_dtype="int4"),
    "window_int4": lambda: Window(sparsity=0.5, kv_dtype="int4"),
    "streaming_llm_int4": lambda: StreamingLLM(sparsity=0.5, kv_dtype="int4"),
    "window_fp8": lambda: Window(sparsity=0.5, kv_dtype="fp8"),
    "streaming_llm_int8": lambda: StreamingLLM(sparsity=0.5, kv_dtype="int8"),
}


def draw(*shape):
    return torch.randint(0, 512, shape)


def engine_of(model, method, length, batch=1, steps=40, **options):
    return Engine(model, method, batch_size=batch, max_prompt_len=length, max_new_tokens=steps, **options)


# an independent quantiser: whole history in, fp64 out -----------------------------------------------------------------------


def half(x):
    return x.half().double()


def eight_bits(x, kind):
    """x [..., D], one step a row."""
    largest = {"int8": 127, "fp8": 448}[kind]
    step = half(x.abs().amax(-1, keepdim=True) * (1 + 2**-10) / largest + 2**-24)
    number = (x / step).clamp(-largest, largest)
    return (number.round() if kind == "int8" else number.float().to(torch.float8_e4m3fn).double()) * step


def four_bits(x, dim):
    """Those along `dim` share a step and a zero."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = half((high - low) * (1 + 2**-10) / 15 + 2**-24)
    zero = half(low - 64 * step)
    code = ((x - zero - 64 * step) / step).round().clamp(0, 15)
    return half(zero + step * (64 + code))


def stored(k, v, kind, prompt_len):
    """History k, v [H, N, D] as the cache holds it: whole blocks of a prompt are quantised at once, others wait in 16 bits."""
    k, v = k.double(), v.double()
    if kind != "int4":
        return eight_bits(k, kind), eight_bits(v, kind)
    sealed, direct = k.shape[1] // 128 * 128, prompt_len // 128 * 128
    k, v = (torch.cat([x[:, :direct], half(x[:, direct:])], 1) for x in (k, v))
    old_k = four_bits(k[:, :sealed].unflatten(1, (-1, 32)), 2).flatten(1, 2)
    old_v = four_bits(v[:, :sealed].unflatten(2, (-1, 32)), 3).flatten(2, 3)
    return torch.cat([old_k, k[:, sealed:]], 1), torch.cat([old_v, v[:, sealed:]], 1)


class Recorder:
    """Notes what goes through a layer."""

    def __init__(self, layer):
        self.k, self.v, self.steps = [], [], []
        prefill, decode = layer.prefill, layer.decode

        def noted_prefill(q, k, v, seq):
            self.k, self.v, self.steps = [k[0]], [v[0]], []
            return prefill(q, k, v, seq)

        def noted_decode(q, k, v):
            self.k.append(k[0])
            self.v.append(v[0])
            out = decode(q, k, v)
            self.steps.append((q[0, :, 0], out[0, :, 0]))
            return out

        layer.prefill, layer.decode = noted_prefill, noted_decode


@pytest.mark.parametrize(("head_dim", "kv_heads"), ((64, 1), (128, 3)), ids=("D64-H1", "D128-H3"))
@pytest.mark.parametrize(("length", "num"), ((1, 130), (127, 3), (128, 2), (129, 2), (300, 86)), ids=lambda n: str(n))
@pytest.mark.parametrize("name", QUANT)
def test_decode_is_attention_over_the_stored_rows(tiny_llama, name, length, num, head_dim, kv_heads):
    model = tiny_llama(hidden_size=96, num_attention_heads=3, num_key_value_heads=kv_heads, head_dim=head_dim)
    engine = engine_of(model, QUANT[name](), length, steps=num)
    recorders = [Recorder(layer) for layer in engine.method.layers]
    engine.check_bytes = lambda: None  # it would find what the recorders hold
    engine.prefill(draw(1, length))
    engine.score(draw(1, num))
    for recorder in recorders:
        k, v = torch.cat(recorder.k, 1), torch.cat(recorder.v, 1)
        # every step near the end of a block, and some others
        for step in [i for i in range(num) if (length + i + 1) % 128 in (126, 127, 0, 1, 2) or i % 40 == 0]:
            q, out = recorder.steps[step]
            own_k, own_v = (
                x.repeat_interleave(3 // kv_heads, 0)
                for x in stored(k[:, : length + step + 1], v[:, : length + step + 1], name, length)
            )
            weights = (own_k @ q.double()[..., None] * head_dim**-0.5).softmax(1)
            expected = (weights.transpose(1, 2) @ own_v)[:, 0]
            assert (out.double() - expected).norm() < 2e-3 * expected.norm(), step


@pytest.mark.parametrize("length", (1, 90, 100), ids=lambda n: f"n{n}")
@pytest.mark.parametrize("name", QUANT)
def test_a_full_ring_holds_the_newest_rows(tiny_llama, name, length):
    """Two turns of a quantised ring: every slot is the row of the position it claims, quantised once (keys_values#140)."""
    # the full cache in int4 has a 16-bit tail, so half of its bytes would hold the whole prompt
    sparsity = 0.85 if name == "int4" else 0.5
    engine = engine_of(tiny_llama(head_dim=64), Window(sparsity=sparsity, kv_dtype=name), 100, steps=150)
    assert not engine.method.planned.noop
    recorders = [Recorder(layer) for layer in engine.method.layers]
    engine.check_bytes = lambda: None
    engine.prefill(draw(1, length))
    engine.score(draw(1, 150))
    for number, recorder in enumerate(recorders):
        held = engine.positions(number)[0, 0]
        assert sorted(held.tolist()) == list(range(length + 150 - len(held), length + 150))
        rows = engine.method.layers[number].slots.rows(engine.method.step["lengths"])
        for own, history in zip(rows, (recorder.k, recorder.v), strict=True):
            x = torch.cat(history, 1).double()
            want = four_bits(x.unflatten(-1, (-1, 32)), -1).flatten(-2) if name == "int4" else eight_bits(x, name)
            assert (own[0].double() - want[:, held]).abs().max() < 1e-5


def test_sealing_holds_constant_bytes(tiny_llama):
    """300 decoded tokens: three seals, no byte more and no tensor new."""
    engine = engine_of(tiny_llama(head_dim=64), Int4(), 100, steps=300)
    engine.prefill(draw(1, 100))
    before = engine.ledger()
    pointers = [x.data_ptr() for layer in engine.method.layers for xs in layer.tensors().values() for x in xs]
    parts = [layer.slots.kv.parts[0] for layer in engine.method.layers]
    assert not any(part.k.any() for part in parts), "nothing is sealed yet"
    engine.decode(300)
    assert all(part.k[:, :, :384].view(-1, 128, 32).any(2).any(1).all() for part in parts), "three blocks are"
    after = engine.ledger()
    assert {k: v for k, v in after.kinds.items() if k != "workspace"} == before.kinds
    assert pointers == [x.data_ptr() for layer in engine.method.layers for xs in layer.tensors().values() for x in xs]


@pytest.mark.parametrize("name", STACKED)
def test_batch_and_padding_change_nothing(tiny_llama, name):
    """Ragged, one sequence that seals while the others do not: each decodes as it does alone."""
    model, lengths, ids = tiny_llama(head_dim=64), [125, 3, 260], draw(3, 260)
    together = engine_of(model, STACKED[name](), 260, batch=3)
    together.prefill(ids, lengths)
    tokens = together.decode(8)
    single = engine_of(model, STACKED[name](), 260)
    for seq, length in enumerate(lengths):
        single.prefill(ids[seq : seq + 1, :length])
        assert torch.equal(single.decode(8)[0], tokens[seq]), seq


@pytest.mark.parametrize("name", QUANT)
def test_fused_step_is_the_module(tiny_llama, name):
    model, ids, forced = tiny_llama(head_dim=64), draw(2, 126), draw(2, 6)
    results = []
    for step_impl in ("module", "fused"):
        engine = engine_of(model, QUANT[name](), 126, batch=2, step_impl=step_impl)
        engine.prefill(ids, [126, 60])
        results.append(engine.score(forced, keep_logits=True)[1])
    # a code may round the other way
    assert (results[1] - results[0]).abs().max() < 1e-2 * results[0].abs().max()


def test_rewind_stops_at_a_sealed_block(tiny_llama):
    engine = engine_of(tiny_llama(head_dim=64), Int4(), 100, batch=2, steps=60)
    ids = draw(2, 100)
    engine.prefill(ids, [100, 40])
    first = engine.decode(27)
    assert engine.can_rewind()
    engine.rewind()
    assert torch.equal(engine.decode(27), first)
    engine.decode(2)
    assert not engine.can_rewind()
    with pytest.raises(ValueError, match="rewind: kv_dtype=int4 has sealed tokens of the prompt since; prefill again"):
        engine.rewind()
    engine.prefill(ids, [100, 40])
    assert torch.equal(engine.decode(27), first)


@pytest.mark.parametrize("name", QUANT)
def test_nan_is_found(tiny_llama, name):
    model = tiny_llama(head_dim=64)
    model.get_input_embeddings().weight[7] = torch.nan
    engine = engine_of(model, QUANT[name](), 140)
    ids = draw(1, 140).clamp(min=8)
    engine.prefill(ids)
    engine.score(torch.full((1, 1), 9))
    assert engine.finite()
    engine.score(torch.full((1, 1), 7))
    engine.score(torch.full((1, 1), 9))
    assert not engine.finite(), "a NaN in the cache must reach the next token"
    engine.prefill(ids[:, :30])
    engine.score(torch.full((1, 3), 9))
    assert engine.finite(), "and a new prompt must not read the old one's rows"


def test_selection_scores_come_from_unquantised_keys(tiny_llama, monkeypatch):
    scores = []
    original = SparDA.score
    monkeypatch.setattr(SparDA, "score", lambda self, mass: scores.append(original(self, mass)) or scores[-1])
    model, ids = tiny_llama(head_dim=64), draw(1, 300)
    for kv_dtype in ("auto", "int8", "fp8", "int4"):
        engine_of(model, SparDA(sparsity=0.2, predict_layers=[1], kv_dtype=kv_dtype), 300).prefill(ids)
    assert len(scores) == 4 and all(torch.equal(own, scores[0]) for own in scores[1:])


def test_quant_headroom(tiny_llama):
    spec = hf.make_spec(tiny_llama(head_dim=64), batch_size=1, context_len=2000, max_new_tokens=9, impl="reference")

    def window(**knobs):
        return Window(**knobs).plan(spec).kept

    assert window(sparsity=0.8, quant_headroom=0.1, kv_dtype="int8") == window(sparsity=0.7, kv_dtype="int8") == 576
    assert window(sparsity=0.8, kv_dtype="int8") == 384, "unless told so, sparsity is what was asked"
    assert window(sparsity=0.8, quant_headroom=0.1) == window(sparsity=0.8) == 400, "a floating cache needs none"
    method = Window(sparsity=0.8, quant_headroom=0.1, kv_dtype="fp8")
    method.bind(spec)
    assert method.stored_facts() == {"kv_format": "fp8", "kv_bits": 8.25, "allowed_sparsity": pytest.approx(0.7)}
    with pytest.raises(ValueError, match=r"outside \[0, 1\]: 0.1 turns sparsity 0.8 into 0.7"):
        Window(quant_headroom=-0.1)
    with pytest.raises(ValueError, match="changes sparsity, kv_budget fixes the bytes: give only one"):
        Window(quant_headroom=0.1, kv_budget=0.2)
    # the named limit holds with it
    with pytest.raises(ValueError, match="largest sparsity here: ") as caught:
        window(sparsity=0.999, quant_headroom=0.01, kv_dtype="int8")
    limit = float(str(caught.value).rpartition(" ")[2])
    assert window(sparsity=limit, quant_headroom=0.01, kv_dtype="int8") == 32


def test_int4_is_stored_as_the_method_needs_it(tiny_llama):
    """Overwriting: step and zero per token, no tail, tiles of 32. The budget is a share of the same full cache."""
    spec = hf.make_spec(tiny_llama(head_dim=64), batch_size=1, context_len=2000, max_new_tokens=9, impl="reference")
    ring, choice = Window(kv_dtype="int4"), SparDA(predict_layers=[1], kv_dtype="int4")
    for method in (ring, choice):
        method.bind(spec)
    assert ring.stored_facts() == {"kv_format": "int4_token", "kv_bits": 5.0}
    assert choice.stored_facts() == {"kv_format": "int4", "kv_bits": 5.0}
    assert ring.planned.ledger.keys() == {"kv", "scales", "tables"} and "tail" in choice.planned.ledger
    assert ring.planned.kept % 32 == 0
    assert ring.budget_bytes(spec) == choice.budget_bytes(spec) == int(0.2 * spec.full_bytes("int4") + 1e-6)


def test_int4_names_its_tail_when_the_budget_is_too_small(tiny_llama):
    with pytest.raises(
        ValueError, match="the 16-bit tail of 128 tokens is 52% of the full cache; kv_dtype=int8 has none"
    ) as err:
        engine_of(tiny_llama(head_dim=64), SparDA(sparsity=0.8, predict_layers=[1], kv_dtype="int4"), 500)
    assert "\n" not in str(err.value)


# int4 with head dim 64: a dense row has 128 bytes, a sealed one 40, and the tail of 128 rows counts from the first token on.
# With one sealed block 5120 + 16384 bytes are those of 168 dense rows, and the table of heads is there too. int8 takes whole
# tiles of 32 rows at 66 bytes: 2112, those of 16.5 dense rows.
@pytest.mark.parametrize(
    ("make", "context_len", "stamp"),
    [
        (Int4, 1, "none"), (Int4, 127, "none"), (Int4, 128, "none"), (Int4, 168, "none"), (Int4, 169, "freed"),
        (Int8, 16, "none"), (Int8, 17, "freed"), (Fp8, 1, "none"), (Fp8, 127, "freed"), (Full, 300, "none"),
        (lambda: Full(kv_dtype="int4"), 100, "none"), (lambda: Full(kv_dtype="int4"), 300, "freed"),
        (lambda: Window(sparsity=0.5), 100, "freed"), (lambda: Window(sparsity=0.0), 100, "none"),
        (lambda: SparDA(sparsity=0.0, predict_layers=[1], kv_dtype="int4"), 100, "none"),
        (lambda: SparDA(sparsity=0.3, predict_layers=[1], kv_dtype="int4"), 400, "freed"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("batch", (1, 3), ids=lambda b: f"B{b}")
def test_what_holds_no_less_than_dense_is_not_stamped_freed(tiny_llama, make, context_len, stamp, batch):
    model, method = tiny_llama(head_dim=64).to(torch.bfloat16), make()
    engine = engine_of(model, method, context_len, batch, steps=4)
    engine.prefill(draw(batch, context_len))
    dense = engine.spec.full_bytes("bf16")
    assert method.stamp() == stamp
    assert (engine.ledger().resident_bytes < dense) == (stamp == "freed")


@pytest.mark.gpu
@pytest.mark.parametrize("step_impl", ("module", "fused"))
@pytest.mark.parametrize("name", STACKED)
def test_graph_is_eager(name, step_impl, tiny_llama):
    """Blocks are sealed inside the graph, each sequence at its own step."""
    model = tiny_llama(head_dim=64).to(DEVICE, torch.bfloat16)
    ids, lengths, results = draw(4, 260), [260, 1, 100, 127], []
    for decode_impl in ("eager", "graph"):
        options = {"impl": "triton", "step_impl": step_impl, "decode_impl": decode_impl}
        engine = engine_of(model, STACKED[name](), 260, batch=4, steps=150, **options)
        for _ in range(2):  # the second time over used slots
            engine.prefill(ids, lengths)
            tokens = engine.decode(150)
        results.append((tokens, engine.logits.clone(), engine.positions()))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.gpu
@pytest.mark.parametrize("name", STACKED)
def test_triton_is_the_reference(name, tiny_llama):
    model = tiny_llama(head_dim=64).to(DEVICE, torch.bfloat16)
    ids, forced, lengths, results = draw(3, 260), draw(3, 140), [260, 1, 100], []
    for impl in ("reference", "triton"):
        engine = engine_of(model, STACKED[name](), 260, batch=3, steps=140, impl=impl)
        engine.prefill(ids, lengths)
        results.append(engine.score(forced, keep_logits=True)[1])
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert error < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("name", STACKED)
def test_no_step_syncs(name, tiny_llama):
    model = tiny_llama(head_dim=64).to(DEVICE, torch.bfloat16)
    engine = engine_of(model, STACKED[name](), 260, steps=30, impl="triton", decode_impl="graph", step_impl="fused")
    engine.prefill(draw(1, 250))
    engine.decode(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            engine._step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_reference_seals_in_no_graph(tiny_llama):
    model = tiny_llama(head_dim=64).to(DEVICE, torch.bfloat16)
    with pytest.raises(ValueError, match="which no graph can hold; use impl=triton or decode_impl=eager"):
        engine_of(model, Int4(), 100, decode_impl="graph")


def test_full_takes_every_dtype(tiny_llama):
    """method=full kv_dtype=x is method=x."""
    model, ids = tiny_llama(head_dim=64), draw(1, 200)
    for name, method in QUANT.items():
        tokens = []
        for own in (Full(kv_dtype=name), method()):
            engine = engine_of(model, own, 200)
            engine.prefill(ids)
            tokens.append(engine.decode(10))
        assert torch.equal(*tokens)
        with pytest.raises(ValueError, match=f"method={name} stores {name}, not bf16; use method=full kv_dtype=bf16"):
            method(kv_dtype="bf16")
