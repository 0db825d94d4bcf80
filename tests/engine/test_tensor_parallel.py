"""Two gloo ranks on a CPU: the tokens of one process, half of its KV heads and bytes on each rank."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import models
from tests.harness.test_models import save_tokenizer

SCRIPT = "tests/engine/ranks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    save_tokenizer(path)
    return path


def test_two_ranks_are_one(folder, tmp_path):
    alone = [sys.executable, SCRIPT, str(folder), str(tmp_path / "alone")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += [SCRIPT, str(folder), str(tmp_path / "ranks")]
    for command in (alone, launch):
        done = subprocess.run(command, capture_output=True, text=True, env=models.os.environ | {"PYTHONPATH": "."}, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
    one = json.loads((tmp_path / "alone.0").read_text())
    ranks = [json.loads((tmp_path / f"ranks.{rank}").read_text()) for rank in range(2)]
    for rank in ranks:
        # embeddings and norms are on both ranks, the projections halved
        assert 0.5 * one["weights"] < rank.pop("weights") < 0.9 * one["weights"]
        for name, result in rank.items():
            assert result["tokens"] == one[name]["tokens"], name
            assert result["positions"] == one[name]["positions"], name
            shared = 168 if "sparda" in name else 0  # its index of 19 int32 a sequence and offsets serve all heads
            assert 2 * (result["resident"] - shared) == one[name]["resident"] - shared, name


@pytest.mark.parametrize(
    ("size", "processes", "reason"),
    (
        (2, 1, "torchrun --nproc-per-node 2 run.py"),
        (1, 2, "set model.tp_size=2"),
        (3, 3, "does not divide the model's 4 KV heads"),
    ),
)
def test_mistakes(folder, monkeypatch, size, processes, reason):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(ValueError, match=reason):
        models.load(models.ModelConf(path=str(folder), tp_size=size, device="cpu"))
