"""The capacity search finds the batch that the bytes allow, survives memory that runs out, and says what it found."""

import json

import pytest
import torch

from harness import capacity
from harness.engine import Engine

SLOT = 16 * 2 * 2 * 16 * 4  # the dummy's bytes of one token: layers, K and V, KV heads, head dim, fp32


def run(capsys, *argv):
    code = capacity.main(["model=dummy", "model.device=cpu", "logger=none", "shape=smoke", *argv])
    out, err = capsys.readouterr()
    return code, (json.loads(out.splitlines()[-1]) if out else None), err


def test_capacity_is_what_the_bytes_allow(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from harness import hf, models
    from harness.config import register

    register()
    with initialize_config_dir(str(capacity.CONF), version_base="1.3"):
        conf = OmegaConf.to_object(compose("config", ["model=dummy", "model.device=cpu"]))
    weights = hf.weight_bytes(models.load(conf.model).model)
    # room for 3 full caches of 256 + 16 tokens and a half one
    limit = weights + int(3.5 * (256 + 16) * SLOT)
    code, result, _ = run(capsys, f"--limit-bytes={limit}", "method=window", "sparsity=0.75")
    assert code == 0 and result["full_batch"] == 3
    # a window keeps 64 slots and overwrites them
    assert result["window_batch"] == int(3.5 * (256 + 16)) // 64


def test_largest_context(capsys, monkeypatch):
    def small(model, method, *, max_prompt_len, **options):
        if max_prompt_len > 5000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Engine(model, method, max_prompt_len=max_prompt_len, **options)

    monkeypatch.setattr(capacity.recurrent, "engine_class", lambda config: small)
    argv = ("--of", "context", "--limit-bytes=13000000", "method=window", "sparsity=0.5", "shape.batch_size=2")
    code, result, _ = run(capsys, *argv)
    # 13 MB less the weights hold two full caches of 1024 tokens and headroom, or half of 2048
    assert code == 0 and result["batch_size"] == 2 and result["full_context"] <= 1024 < result["window_context"] <= 4096


def test_not_even_one(capsys):
    code, result, err = run(capsys, "--limit-bytes=1000", "method=full")
    assert (code, result["full_batch"]) == (0, 0) and "batch 1: out of memory" in err


def test_out_of_memory_is_an_answer(capsys, monkeypatch):
    def small(model, method, *, batch_size, **options):
        if batch_size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Engine(model, method, batch_size=batch_size, **options)

    monkeypatch.setattr(capacity.recurrent, "engine_class", lambda config: small)
    code, result, err = run(capsys, "--limit-bytes=100000000", "method=full")
    assert (code, result["full_batch"]) == (0, 5) and "batch 6: out of memory" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    (
        (["method=full"], "a CPU has no memory limit of its own: give --limit-bytes"),
        (["--limit-bytes=9", "method=h20"], "unknown method 'h20'"),
        (["--limit-bytes=9", "method=window", "sparsity=2"], "outside [0, 1)"),
    ),
    ids=("no_limit", "typo", "sparsity"),
)
def test_mistakes_are_one_line(capsys, argv, message):
    code, result, err = run(capsys, *argv)
    assert code == 2 and result is None and message in err and err.count("\n") == 1
