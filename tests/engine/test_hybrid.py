"""Hybrid models: the method serves the full-attention layers, the sliding ones keep their window, the ledger shows both."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import hf, models
from harness.engine import Engine
from harness.sliding import sliding_attention
from methods.full import Full
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window
from tests.engine.test_attach import OPTIONS, prompts
from tests.engine.test_engine import forced_logits, hf_logits
from tests.engine.test_step import DEVICE

WINDOW, SLIDING_LAYERS, FULL_LAYERS = 8, 5, 2
ROW = 2 * 2 * 8 * 4  # bytes of one token in one layer: K and V, 2 heads of 8 in fp32


def hybrid():
    """Gemma 3 with two full layers of seven, odd scale, its two rotary bases."""
    torch.manual_seed(0)
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, sliding_window=WINDOW, max_position_embeddings=512,
        query_pre_attn_scalar=13, layer_types=kinds,
    )  # fmt: skip
    models.check_supported(config)
    return AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


def qwen2_with_window():
    """Qwen2 whose last two of three layers slide."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW,
    )  # fmt: skip
    models.check_supported(config)
    return AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


@pytest.mark.parametrize("length", (1, 7, 8, 9, 37), ids=lambda n: f"T{n}")
@pytest.mark.parametrize("make", (hybrid, qwen2_with_window))
def test_full_is_hugging_face(make, length):
    model = make()
    ids, forced = torch.randint(1, 512, (1, length), device=DEVICE), torch.randint(1, 512, (1, 21), device=DEVICE)
    expected = hf_logits(model, torch.cat([ids, forced], 1))[0, length - 1 :]
    engine = Engine(model, Full(), batch_size=1, max_prompt_len=length, max_new_tokens=21)
    assert (forced_logits(engine, ids, forced) - expected).abs().max() < 1e-4


def test_attach_full_is_plain_generate():
    model, batch = hybrid(), prompts(33, 20, 1)
    expected = model.generate(**batch, max_new_tokens=12, **OPTIONS)
    with hf.attach(model, "full"):
        assert torch.equal(model.generate(**batch, max_new_tokens=12, **OPTIONS), expected)


@pytest.mark.parametrize("length", (5, 8, 60), ids=lambda n: f"T{n}")
@pytest.mark.parametrize("method", (Full(), Window(sparsity=0.2), StreamingLLM(sparsity=0.2, num_sinks=1)), ids=type)
def test_ledger_shows_both(method, length):
    batch_size = 3
    try:
        engine = Engine(hybrid(), method, batch_size=batch_size, max_prompt_len=length, max_new_tokens=20)
    except ValueError as err:
        assert length <= WINDOW and "largest sparsity here" in str(err)  # noqa: PT017
        return
    engine.prefill(torch.randint(1, 512, (batch_size, length)))
    ledger = engine.ledger()
    assert ledger.kinds["sliding"] == SLIDING_LAYERS * batch_size * min(WINDOW, length) * ROW
    assert ledger.resident_bytes == engine.resident_bytes
    dense = batch_size * (SLIDING_LAYERS * min(WINDOW, length) + FULL_LAYERS * length) * ROW
    assert engine.spec.full_bytes("fp32") == dense
    if not isinstance(method, Full):
        assert 0.8 * dense - 3 * batch_size * ROW * FULL_LAYERS < ledger.resident_bytes <= 0.8 * dense + 1e-6
    before = ledger.allocated_bytes - ledger.kinds.get("workspace", 0)
    engine.decode(20)
    after = engine.ledger()
    assert after.allocated_bytes - after.kinds.get("workspace", 0) == before
    assert "undeclared" not in after.kinds


def test_ragged_batch_is_each_alone():
    model, lengths = hybrid(), [40, 3, 11]
    ids = torch.randint(1, 512, (3, 40), device=DEVICE)
    knobs = dict(sparsity=0.3, predict_layers=[1], window=2, num_sinks=1, pool=3)
    engine = Engine(model, SparDA(**knobs), batch_size=3, max_prompt_len=40, max_new_tokens=30)
    engine.prefill(ids, lengths)
    together = engine.decode(30)
    for row, length in enumerate(lengths):
        alone = Engine(model, SparDA(**knobs), batch_size=1, max_prompt_len=40, max_new_tokens=30)
        alone.prefill(ids[row : row + 1, :length])
        assert torch.equal(alone.decode(30)[0], together[row])


@pytest.mark.parametrize(("length", "window"), ((1, 4), (4, 4), (5, 4), (33, 8), (64, 7)))
def test_sliding_attention_is_masked_attention(length, window):
    q, k, v = (torch.randn(1, heads, length, 16, dtype=torch.float64) for heads in (6, 2, 2))
    near = torch.ones(length, length).tril() * torch.ones(length, length).triu(1 - window)
    logits = q @ k.repeat_interleave(3, 1).transpose(2, 3) * 0.3
    expected = logits.masked_fill(near == 0, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(sliding_attention(q, k, v, 0.3, window), expected)


def test_models_without_full_layers_are_refused():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=4, layer_types=["sliding_attention"] * 4)
    with pytest.raises(ValueError, match="no layer with full attention"):
        models.check_supported(config)
