"""Fidelity to full: exact where nothing is dropped, and the acceptance rate against Hugging Face's own greedy continuation."""

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness import cell, models
from harness.config import CONF, register
from harness.engine import Engine
from methods.window import Window

COMMON = (
    "model=dummy",
    "shape=smoke",
    "task=fidelity",
    "task.num_samples=3",
    "shape.context_len=96",
    "task.num_scored=24",
    "logger=none",
)
COMMON += ("model.config.num_hidden_layers=3",)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def go(*overrides):
        register()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("config", [*COMMON, *overrides])
        return cell.run_cell(cfg, tmp_path / "out", "python run.py"), OmegaConf.to_object(cfg)

    return go


def test_nothing_dropped_is_full(run):
    row, _ = run("method=window", "sparsity=0")
    assert (row.top1_agreement, row.acceptance_rate, row.kl_nats) == (1.0, 1.0, pytest.approx(0, abs=1e-6))


def test_acceptance_is_the_share_of_fulls_greedy_tokens(run):
    row, conf = run("method=window", "sparsity=0.8", "shape.batch_size=2")
    loaded = models.load(conf.model)
    rates = []
    for sample in conf.task.samples(loaded.tokenizer, 96, 0):
        ids = torch.tensor([sample.prompt_ids])
        loaded.model.generation_config.eos_token_id = None
        greedy = loaded.model.generate(ids, max_new_tokens=24, do_sample=False)[:, 96:]
        engine = Engine(loaded.model, Window(sparsity=0.8), batch_size=1, max_prompt_len=96, max_new_tokens=24)
        engine.prefill(ids)
        drafted = engine.score(greedy, keep_logits=True)[1].argmax(-1)
        rates.append((drafted == greedy)[0, 1:].double().mean())
    assert row.acceptance_rate == pytest.approx(float(torch.stack(rates).mean())) and row.acceptance_rate < 1
    assert row.kl_nats > 1e-9 and row.num_samples == 3


def test_full_has_nothing_to_compare_with(run):
    row, _ = run("method=full")
    assert row.perplexity > 1 and row.acceptance_rate is row.top1_agreement is row.kl_nats is None


def test_without_full_it_is_refused(run):
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*COMMON, "method=window", "compare=false"])
    with pytest.raises(ValueError, match="^task=fidelity compares with full: leave compare=true, or use task=perplexity$"):
        cell.check(cfg)
