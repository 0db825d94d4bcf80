"""The README's example method is run as printed: it must do what the guide says on the first try."""

import importlib.util
import re
import sys
from pathlib import Path

import torch

from harness.engine import Engine

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_method_works(tiny_llama, tmp_path):
    source = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class Strided" in block)
    (tmp_path / "strided.py").write_text(source)
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
