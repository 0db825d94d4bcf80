"""The same prompts through lm-eval's own Hugging Face model: same text, same greedy output as our engine, same score."""

from pathlib import Path

import pytest
import torch
import yaml

import tasks
from harness.config import discover
from harness.engine import Engine
from methods.full import Full
from tasks.base import Task
from tasks.niah import Niah
from tasks.retrieval import Retrieval
from tests.tasks.test_chat import TEMPLATES, byte_level

lm_eval = pytest.importorskip("lm_eval")
FOLDER = Path(tasks.__path__[0]) / "lm_eval_files"
FOUND = discover(tasks, Task)


def evaluate(model, tokenizer, folder, name, knobs):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer.save_pretrained(folder)
    metadata = {"tokenizer": str(folder), "context_len": 1203, "knobs": knobs}
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    return lm_eval.simple_evaluate(model=lm, tasks=[name], task_manager=manager, log_samples=True, bootstrap_iters=0)


@pytest.mark.parametrize("template", [None, "bos-in-template"], ids=["plain", "chat"])
def test_lm_eval_says_what_our_engine_says(tiny_llama, tmp_path, template):
    tokenizer = byte_level(TEMPLATES.get(template))
    model = tiny_llama()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    results = evaluate(model, tokenizer, tmp_path, "kvgauge_niah", {"num_samples": 2})
    samples = Niah(num_samples=2).samples(tokenizer, 1203, 0)
    engine = Engine(model, Full(), batch_size=1, max_prompt_len=1203, max_new_tokens=12)
    logged = sorted(results["samples"]["kvgauge_niah"], key=lambda one: one["doc_id"])
    assert len(logged) == 2
    for sample, one in zip(samples, logged, strict=True):
        assert one["arguments"][0][0] == tokenizer.decode(sample.prompt_ids)
        engine.prefill(torch.tensor([sample.prompt_ids]))
        ours = engine.decode(12)[0].tolist()
        ours = ours[: ours.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ours else ours
        assert one["resps"][0][0] == tokenizer.decode(ours, skip_special_tokens=True)
    assert results["results"]["kvgauge_niah"]["accuracy,none"] == 0, "random weights"


@pytest.mark.parametrize("name", sorted(name for name in FOUND if issubclass(FOUND[name], Retrieval) and name != "multi_turn"))
def test_every_task_has_a_file_and_its_scores(name, tmp_path):
    from lm_eval.tasks import TaskManager

    byte_level(None).save_pretrained(tmp_path)
    metadata = {"tokenizer": str(tmp_path), "context_len": 1700, "seed": 3, "knobs": {"num_samples": 2}}
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
    task = manager.load([f"kvgauge_{name}"])["tasks"][f"kvgauge_{name}"]
    docs = list(task.test_docs())
    samples = FOUND[name](num_samples=2).samples(byte_level(None), 1700, 3)
    assert [doc["answers"] for doc in docs] == [sample.answers for sample in samples]
    assert [task.doc_to_text(doc) for doc in docs] == [doc["prompt"] for doc in docs]
    assert task.config.generation_kwargs["max_gen_toks"] == FOUND[name]().max_answer_tokens
    for doc in docs:
        assert task.process_results(doc, [" " + ", ".join(doc["answers"])]) == {"accuracy": 1.0}
        assert task.process_results(doc, ["no idea"]) == {"accuracy": 0.0}


def test_no_tokenizer_is_one_line():
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    with pytest.raises(ValueError, match="^kvgauge tasks need a tokenizer to fill the context: --metadata"):
        manager.load(["kvgauge_niah"])


def test_files_begin_with_their_command():
    for path in FOLDER.glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# lm_eval ") and lines[0].endswith(f"--tasks {path.stem}")
        assert yaml.safe_load("\n".join(lines))["task"] == path.stem
