"""The fused decode step against the Hugging Face module, and the graph against eager launches: same tokens, same logits."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import hf
from harness.engine import Engine
from harness.step import can_fuse
from methods.full import Full
from methods.int8 import Int8
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {
    "full": lambda: Full(),
    "int8": lambda: Int8(),
    "window": lambda: Window(sparsity=0.6),
    "streaming_llm": lambda: StreamingLLM(sparsity=0.6),
    "sparda": lambda: SparDA(sparsity=0.6, predict_layers=[1], window=4),
    "sparda_int8": lambda: SparDA(sparsity=0.4, predict_layers=[1], window=4, kv_dtype="int8"),
}


def family(kind: str, dtype=torch.float32, **fields):
    shape = dict(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, initializer_range=0.125, tie_word_embeddings=kind == "qwen3",
    )  # fmt: skip
    if kind == "llama":
        shape["hidden_size"] = 96
    if kind == "mistral":
        shape["sliding_window"] = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | fields))
    for name, parameter in model.named_parameters():
        # norms of one and biases of zero would hide a weight that is not applied
        if "norm" in name or "bias" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def engine_of(model, method, ids, **options):
    return Engine(model, method, batch_size=len(ids), max_prompt_len=ids.shape[1], max_new_tokens=40, **options)


@pytest.mark.parametrize("kind", ("llama", "mistral", "qwen2", "qwen3"))
@pytest.mark.parametrize("name", METHODS)
def test_fused_step_is_the_module(name, kind):
    model = family(kind)
    assert can_fuse(model)
    ids, forced = torch.randint(0, 512, (2, 33)), torch.randint(0, 512, (2, 12))
    lengths = [33, 20]
    plain = engine_of(model, METHODS[name](), ids)
    plain.prefill(ids, lengths)
    _, expected = plain.score(forced, keep_logits=True)
    held = hf.weight_bytes(model)
    fused = engine_of(model, METHODS[name](), ids, step_impl="fused")
    assert hf.weight_bytes(model) == held, "the weights are held twice"
    first = fused.prefill(ids, lengths)
    _, actual = fused.score(forced, keep_logits=True)
    assert torch.equal(first, expected[:, 0]), "prefill runs the module on the same weights"
    assert (actual - expected).abs().max() < 2e-4 * expected.abs().max()
    assert torch.equal(fused.positions(), plain.positions())
    # a second engine on the joined weights
    again = engine_of(model, METHODS[name](), ids, step_impl="fused")
    again.prefill(ids, lengths)
    assert torch.equal(again.score(forced, keep_logits=True)[1], actual)


def test_only_known_families_are_fused():
    assert not can_fuse(family("llama", hidden_act="gelu"))


@pytest.mark.skipif(DEVICE == "cuda", reason="says what happens without a GPU")
def test_graph_without_cuda_is_refused():
    with pytest.raises(ValueError, match="decode_impl=graph needs a CUDA device, the model is on cpu; use decode_impl=eager"):
        engine_of(family("llama"), Full(), torch.zeros(1, 4), decode_impl="graph")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ("reference", "triton"))
@pytest.mark.parametrize("step_impl", ("module", "fused"))
@pytest.mark.parametrize("name", METHODS)
def test_graph_is_eager(name, step_impl, impl):
    model = family("llama", torch.bfloat16, head_dim=64)
    ids = torch.randint(0, 512, (4, 70))
    lengths = [70, 1, 33, 64]
    results = []
    for decode_impl in ("eager", "graph"):
        engine = engine_of(model, METHODS[name](), ids, impl=impl, step_impl=step_impl, decode_impl=decode_impl)
        for _ in range(2):  # the second time over used slots
            engine.prefill(ids, lengths)
            tokens = engine.decode(30)
        results.append((tokens, engine.logits.clone(), engine.positions()))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.gpu
def test_no_step_syncs():
    model = family("llama", torch.bfloat16, head_dim=64)
    ids = torch.randint(0, 512, (2, 40))
    for name, make in METHODS.items():
        for options in ({"decode_impl": "eager"}, {"decode_impl": "graph", "step_impl": "fused"}):
            engine = engine_of(model, make(), ids, impl="triton", **options)
            engine.prefill(ids)
            engine.decode(2)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(5):
                    engine._step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert name
