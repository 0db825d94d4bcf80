"""Our prompts as lm-eval tasks: the same text for lm-eval's own models, scored by the same functions.

    lm_eval --model hf --model_args pretrained=<hub id or folder> --include_path tasks/lm_eval_files --tasks kvgauge_niah \
        --metadata '{"context_len": 4096, "seed": 0, "knobs": {"num_samples": 16, "haystack": "facts"}}'

The text is tokenised again by lm-eval: ids at the joints of two parts may differ by a few from those that `run.py` feeds. Tasks
of several turns have no lm-eval form, and a hidden question has no meaning where nothing is compressed. The tokenizer's chat
template is applied here, with the beginning of the answer behind it: do not give --apply_chat_template. The default model's own
folder has a template that its adapter was not trained on: "knobs": {"chat_template": "none"}.
"""

import functools
import importlib
import json
import sys
from pathlib import Path

import datasets

# lm-eval imports this file by its path, from wherever it is started
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tasks.base import Sample, Task  # noqa: E402


def dataset(kvgauge_task: str, context_len: int = 1024, seed: int = 0, knobs: dict | None = None, **model_args) -> dict:
    """Return the samples of a task as lm-eval's test split; `tokenizer` or `pretrained` in model_args names the tokenizer."""
    from transformers import AutoTokenizer

    source = model_args.get("tokenizer") or model_args.get("pretrained")
    if not isinstance(source, str):
        raise ValueError(
            'kvgauge tasks need a tokenizer to fill the context: --metadata \'{"tokenizer": "<hub id or folder>"}\''
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    knobs = json.dumps(knobs or {})
    docs = []
    for sample in build(kvgauge_task, knobs).samples(tokenizer, context_len, seed):
        prompt = tokenizer.decode(sample.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        docs.append(
            {"id": sample.id, "prompt": prompt, "answers": sample.answers, "kvgauge_task": kvgauge_task, "knobs": knobs}
        )
    return {"test": datasets.Dataset.from_list(docs)}


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """Return the accuracy of lm-eval's output for one document."""
    return {"accuracy": build(doc["kvgauge_task"], doc["knobs"]).score(Sample("", [], answers=doc["answers"]), results[0])}


@functools.cache
def build(name: str, knobs: str) -> Task:
    """Return the task `name` with the knobs of a JSON object."""
    from harness.config import discover

    return discover(importlib.import_module("tasks"), Task)[name](**json.loads(knobs))
