"""Run by test_tensor_parallel.py on two ranks: prints what each rank's engine decodes and holds, and what one process does."""

import json
import os
import sys

import torch
import torch.distributed

from harness import hf, models
from harness.engine import Engine
from methods.full import Full
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window

KNOBS = dict(sparsity=0.5)
METHODS = {
    "full": Full,
    "int8": lambda: Full(kv_dtype="int8"),
    "window": lambda: Window(**KNOBS),
    "streaming_llm": lambda: StreamingLLM(**KNOBS),
    "sparda-max": lambda: SparDA(**KNOBS, predict_layers=[1], window=4, head_reduce="max"),
    "sparda-mean": lambda: SparDA(**KNOBS, predict_layers=[1], window=4, head_reduce="mean"),
}

folder, out = sys.argv[1:]
torch.manual_seed(0)
ids = torch.randint(0, 300, (2, 40))
tp_size = int(os.environ.get("WORLD_SIZE", 1))
model = models.load(models.ModelConf(path=folder, tp_size=tp_size, device="cpu")).model
results = {"weights": hf.weight_bytes(model)}
for name, make in METHODS.items():
    engine = Engine(model, make(), batch_size=2, max_prompt_len=40, max_new_tokens=15)
    engine.prefill(ids, [40, 23])
    ledger = engine.ledger()
    assert ledger.resident_bytes == engine.resident_bytes
    tokens = engine.decode(15).tolist()
    results[name] = {"tokens": tokens, "resident": ledger.resident_bytes, "positions": engine.positions(2)[:, 0].tolist()}
with open(f"{out}.{models.rank()}", "w") as file:
    json.dump(results, file)
if tp_size > 1:
    torch.distributed.destroy_process_group()
