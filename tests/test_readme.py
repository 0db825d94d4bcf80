"""The README's example method is used as printed: it must do what the guide says on the first try."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from harness.engine import Engine

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SOURCE = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class Strided" in block)
YAML = next(block for block in re.findall(r"```yaml\n(.*?)```", README, re.S) if "strided_schema" in block)


def test_the_example_method_works(tiny_llama, tmp_path):
    (tmp_path / "strided.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("strided", tmp_path / "strided.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["strided"] = module
    spec.loader.exec_module(module)
    model, ids, forced = tiny_llama(), torch.randint(0, 512, (1, 50)), torch.randint(0, 512, (1, 12))
    method = module.Strided(sparsity=0.6)
    engine = Engine(model, method, batch_size=1, max_prompt_len=50, max_new_tokens=12)
    engine.prefill(ids)
    ledger = engine.ledger()
    assert ledger.resident_bytes == method.planned.resident_bytes <= 0.4 * engine.spec.full_bytes("fp32") + 1e-6
    logits = engine.score(forced, keep_logits=True)[1][0]
    kept = method.planned.kept
    mask = torch.ones(62, 62).tril().bool()
    mask[50:, :50] = False
    mask[50:, [i * 50 // kept for i in range(kept)]] = True
    model.set_attn_implementation("eager")
    additive = torch.zeros(62, 62).masked_fill(~mask, -torch.inf)[None, None]
    expected = model(torch.cat([ids, forced], 1), attention_mask=additive).logits[0, 49:-1]
    assert (logits - expected).abs().max() < 1e-4


def test_the_example_method_conforms(tmp_path):
    """One file and one yaml in a checkout, then the command that the guide ends with."""
    command = next(line for line in README.splitlines() if line.startswith("python -m harness.conform"))
    for folder in ("harness", "kernels", "methods", "tasks", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "methods" / "strided.py").write_text(SOURCE)
    (tmp_path / "conf" / "method" / "strided.yaml").write_text(YAML)
    words = command.split()[1:]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert words == ["-m", "harness.conform", "method=strided"]
    assert done.stdout.startswith("strided, kv_dtype fp32, keeps 18 of 92 tokens")
    assert re.search(r"\d+ pass, 0 fail, [01] not applicable", done.stdout), done.stdout
