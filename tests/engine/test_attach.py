"""attach(): plain generate() through a method's cache, the same tokens as the engine, and a model that is left as it was."""

import pytest
import torch

from harness.engine import Engine
from harness.hf import attach
from methods.full import Full
from methods.sparda import SparDA
from methods.window import Window
from tests.engine.test_step import DEVICE, family

OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


def prompts(*lengths):
    """Left-padded ids and mask, as tokenizers give them."""
    ids, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long), torch.zeros(len(lengths), max(lengths)).long()
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = torch.randint(0, 512, (length,)), 1
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


@pytest.mark.parametrize("kind", ("llama", "qwen2", "qwen3", "mistral"))
def test_full_is_plain_generate(kind):
    model, batch = family(kind), prompts(33, 20, 1)
    expected = model.generate(**batch, max_new_tokens=10, **OPTIONS)
    with attach(model, "full"):
        assert torch.equal(model.generate(**batch, max_new_tokens=10, **OPTIONS), expected)
        # a second call starts anew
        assert torch.equal(model.generate(**batch, max_new_tokens=10, **OPTIONS), expected)
    assert "forward" not in vars(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=10, **OPTIONS), expected)


def test_method_is_the_engine():
    model, batch = family("llama"), prompts(60, 41)
    knobs = dict(sparsity=0.7, predict_layers=[1], window=4)
    engine = Engine(model, SparDA(**knobs), batch_size=2, max_prompt_len=60, max_new_tokens=20)
    ids = batch["input_ids"]
    engine.prefill(torch.stack([ids[0], torch.cat([ids[1, 19:], ids[1, :19]])]), [60, 41])
    with attach(model, "sparda", **knobs):
        out = model.generate(**batch, max_new_tokens=15, **OPTIONS)
    assert torch.equal(out[:, 60:], engine.decode(15))
    with attach(model, SparDA(**knobs)):
        assert torch.equal(model.generate(**batch, max_new_tokens=15, **OPTIONS), out)


def test_mistakes_and_restoration():
    model, batch = family("llama"), prompts(12)
    with pytest.raises(ValueError, match="unknown method 'windo': did you mean window"), attach(model, "windo"):
        pass
    with pytest.raises(ValueError, match="sparsity=3"), attach(model, "window", sparsity=3):
        pass
    with pytest.raises(ValueError, match="own constructor"), attach(model, Full(), sparsity=0.5):
        pass
    with (
        pytest.raises(ValueError, match="do not fit: 0 of max_new_tokens=4"),
        attach(model, Window(sparsity=0.5), max_new_tokens=4),
    ):
        model.generate(**batch, max_new_tokens=9, **OPTIONS)
    with pytest.raises(ValueError, match="beam search is not supported"), attach(model, "full"):
        model.generate(**batch, max_new_tokens=4, num_beams=2, **OPTIONS)
    with pytest.raises(ValueError, match="assisted decoding is not supported"), attach(model, "full"):
        ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7]], device=DEVICE)
        model.generate(ids, max_new_tokens=8, prompt_lookup_num_tokens=3, **OPTIONS)
    assert "forward" not in vars(model)
