"""Models with a fixed state: the engine's numbers are Hugging Face's own, the ledger is the formula, methods are refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.recurrent import RecurrentEngine
from methods.full import Full
from methods.int8 import Int8
from methods.window import Window
from tests.engine.test_step import DEVICE

SHAPES = {
    "mamba2": dict(num_heads=4, head_dim=32, hidden_size=64, state_size=16, n_groups=2, chunk_size=16, expand=2),
    "rwkv": dict(hidden_size=64, attention_hidden_size=96, rescale_every=2),
}
LAYERS = 3
# per sequence and layer in fp32: convolution and recurrent state; two hidden states and three accumulators
STATE_BYTES = {"mamba2": (192 * 4 + 4 * 32 * 16) * 4, "rwkv": (2 * 64 + 3 * 96) * 4}


def recurrent(kind, dtype=torch.float32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_hidden_layers=LAYERS, vocab_size=300, **SHAPES[kind])
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(DEVICE)


def build(model, batch_size, **options):
    return RecurrentEngine(model, Full(), batch_size=batch_size, max_prompt_len=50, max_new_tokens=12, **options)


@pytest.mark.parametrize("chunk", (None, 1, 7), ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("kind", SHAPES)
def test_scores_are_hugging_face(kind, chunk):
    model, lengths = recurrent(kind), [50, 1, 23] if kind == "mamba2" else [23]
    size = len(lengths)
    ids, forced = torch.randint(0, 300, (size, 50), device=DEVICE), torch.randint(0, 300, (size, 9), device=DEVICE)
    engine = build(model, size, prefill_chunk=chunk)
    # a second prompt forgets the first
    for _ in range(2):
        engine.prefill(ids, lengths)
        logprobs = engine.score(forced)
    for row, length in enumerate(lengths):
        whole = torch.cat([ids[row, :length], forced[row]])[None]
        with torch.no_grad():
            expected = model(whole, use_cache=False).logits[0, length - 1 : -1].log_softmax(-1)
        assert (logprobs[row] - expected.gather(1, forced[row, :, None])[:, 0]).abs().max() < 1e-3


@pytest.mark.parametrize("kind", SHAPES)
def test_ledger_is_the_formula(kind):
    size = 2 if kind == "mamba2" else 1
    engine = build(recurrent(kind), size)
    engine.prefill(torch.randint(0, 300, (size, 50)))
    expected = {"state": size * LAYERS * STATE_BYTES[kind]}
    assert engine.ledger().kinds == expected
    assert engine.resident_bytes == engine.spec.full_bytes("fp32") == expected["state"]
    engine.decode(12)
    assert engine.ledger().kinds == expected


@pytest.mark.parametrize("method", (Window(), Int8(), Full(kv_dtype="int8")), ids=("window", "int8", "full in int8"))
def test_methods_are_refused(method):
    with pytest.raises(ValueError, match="mamba2 has no KV cache that .* use method=full"):
        RecurrentEngine(recurrent("mamba2"), method, batch_size=1, max_prompt_len=5, max_new_tokens=1)


def test_rwkv_in_batches_is_refused():
    with pytest.raises(ValueError, match="mixes up the 2 sequences of a batch; use shape.batch_size=1"):
        build(recurrent("rwkv"), 2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SHAPES)
def test_graph_is_eager(kind):
    size = 2 if kind == "mamba2" else 1
    model, ids = recurrent(kind, torch.bfloat16), torch.randint(0, 300, (size, 40), device=DEVICE)
    tokens = []
    for decode_impl in ("eager", "graph"):
        engine = build(model, size, decode_impl=decode_impl)
        engine.prefill(ids)
        tokens.append(engine.decode(12))
    assert torch.equal(*tokens)
