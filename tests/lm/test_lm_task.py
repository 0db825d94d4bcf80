"""`task=lm_eval` end to end: lm-eval's command line and the row say the same; every budget is the prompt's own."""

import functools
import json
import math
import shutil
import sys

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf

from harness import cell
from harness.config import CONF, register
from harness.lm_cell import choose_metric, plain
from harness.results import Row
from tasks.lm_eval import LmEval, unknown_name
from tests.lm.conftest import DOCS, make_folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_llama):
    return make_folder(tmp_path_factory.mktemp("model"), tiny_llama, bos=True)


def composed(model_dir, *overrides):
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", ["logger=none", f"model.path={model_dir}", "task=lm_eval", "shape=smoke", *overrides])


@pytest.fixture
def run(tmp_path, monkeypatch, model_dir):
    monkeypatch.chdir(tmp_path)

    def go(*overrides: str) -> Row:
        cfg = composed(model_dir, *overrides)
        return cell.run_cell(cfg, tmp_path / "out", "python run.py " + " ".join(overrides))

    return go


def logged(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]


def test_full_is_lm_evals_command_line(run, model_dir, task_dir, tmp_path, monkeypatch):
    names = {"pick": "acc_norm", "write": "exact_match", "stream": "word_perplexity"}
    argv = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={model_dir},dtype=float32", "--device", "cpu"]
    argv += ["--tasks", ",".join(f"tiny_{name}" for name in names), "--include_path", str(task_dir), "--limit", "4"]
    monkeypatch.setattr(sys, "argv", [*argv, "--batch_size", "1", "--output_path", str(tmp_path / "cli")])
    # its own 14,683 tasks would take most of the time
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    cli_evaluate()
    (file,) = (tmp_path / "cli").rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]
    for name, metric in names.items():
        column = "perplexity" if name == "stream" else "accuracy"
        row = run("method=full", f"task.name={task_dir}/{name}.yaml", f"task.metric={metric}", "task.num_samples=4")
        assert (row.status, row.task, row.metric, row.num_samples) == ("ok", f"lm_eval:{name}", metric, 4)
        assert getattr(row, column) == pytest.approx(theirs[f"tiny_{name}"][f"{metric},none"], rel=1e-4)
        error = theirs[f"tiny_{name}"][f"{metric}_stderr,none"]
        assert row.accuracy_stderr == (pytest.approx(error) if column == "accuracy" else None)
        assert ("double_bos" in row.flags) == (name == "stream"), "lm-eval puts its prefix before the tokenizer's BOS"
    assert all(line["first_ids"][0] == 0 != line["first_ids"][1] for line in logged(tmp_path) if name != "stream")


def test_row_of_a_method(run, task_dir, tmp_path, capsys):
    row = run("method=window", "sparsity=0.5", f"task.name={task_dir}/pick.yaml")
    lines = logged(tmp_path)
    assert row.num_samples == len(lines) == len(DOCS) and row.metric == "acc"
    assert row.accuracy == pytest.approx(sum(line["score"] for line in lines) / len(lines))
    lengths = [line["prompt_len"] for line in lines]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 1 and row.context_len == lengths[0]
    slot = 2 * 2 * 2 * 16 * 4
    assert (row.kv_full_bytes, row.kv_resident_bytes) == (lengths[0] * slot, lengths[0] // 2 * slot)
    assert row.num_pairs == len(lines) and row.accuracy_diff_low <= row.accuracy_diff <= row.accuracy_diff_high
    assert row.ttft_ms > 0 and row.tpot_ms_p50 > 0 and "short_decode" in row.flags
    assert (row.num_noop, "partly_noop" in row.flags) == (0, False)
    assert row.verdict in capsys.readouterr().out


def test_prompts_too_short_for_the_budget_are_counted(run, task_dir, tmp_path):
    """20 slots for sinks and observation: the short document stays whole and the row says so."""
    row = run("method=streaming_llm", "sparsity=0.8", "method.num_sinks=20", f"task.name={task_dir}/pick.yaml")
    lines = logged(tmp_path)
    assert [line["noop"] for line in lines] == [0.2 * line["prompt_len"] < 41 for line in lines]
    assert 0 < row.num_noop == sum(line["noop"] for line in lines) and "partly_noop" in row.flags


def test_documents_from_a_file(run, task_dir, tmp_path):
    shutil.copy(task_dir / "pick.yaml", tmp_path / "named.yaml")
    docs = [{"text": f"Item {i} is", "choices": [f" own{i}", " other"], "label": 0} for i in range(6)]
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    row = run("method=full", f"task.name={tmp_path}/named.yaml", f"task.data={data}")
    assert row.status == "ok" and row.num_samples == 6
    task = LmEval(name=f"{tmp_path}/named.yaml", data=str(data))
    before = task.versions()
    (loaded,) = task.load()["tasks"].values()
    loaded.set_fewshot_seed(1234)
    loaded.build_all_requests()
    for request in loaded.instances:
        shot, asked = request.args[0].split("\n\n")
        assert asked == f"Item {request.doc_id} is" and shot.startswith("Item") and asked not in shot, "never its own example"
    data.write_text(json.dumps(docs[0]) + "\n")
    assert task.versions() != before, "a row of other documents is not reused"


def test_groups_weigh_and_name_the_worst(run, task_dir, tmp_path):
    for name in ("pick", "write"):
        shutil.copy(task_dir / f"{name}.yaml", tmp_path / f"{name}.yaml")
    second = (task_dir / "pick.yaml").read_text().replace("tiny_pick", "tiny_pick2").replace("num_fewshot: 1", "num_fewshot: 0")
    (tmp_path / "pick2.yaml").write_text(second)
    (tmp_path / "both.yaml").write_text(
        "group: tiny_both\ntask: [tiny_pick, tiny_pick2]\naggregate_metric_list:\n  - {metric: acc, weight_by_size: true}\n"
    )
    row = run("method=window", "sparsity=0.9", f"task.name={tmp_path}/both.yaml", "task.num_samples=3")
    lines = logged(tmp_path)
    assert {line["task"] for line in lines} == {"tiny_pick", "tiny_pick2"} and row.num_samples == len(lines) == 6
    assert row.accuracy == pytest.approx(sum(line["score"] for line in lines) / 6) and row.metric == "acc"
    assert row.worst_task in ("tiny_pick", "tiny_pick2") and row.worst_task_diff <= row.accuracy_diff


def test_a_rerun_takes_all_but_the_timed_documents_from_the_log(run, task_dir, tmp_path):
    overrides = ("method=window", "sparsity=0.5", f"task.name={task_dir}/write.yaml", "compare=false")
    first, lines = run(*overrides), logged(tmp_path)
    second = run(*overrides)
    assert (first.num_resumed, second.num_resumed) == (0, len(DOCS) - 2), "shape=smoke times two"
    assert logged(tmp_path) == lines
    same = ("accuracy", "accuracy_stderr", "output_len_mean", "num_samples", "num_noop")
    assert [getattr(first, name) for name in same] == [getattr(second, name) for name in same]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.name=''"], "task.name is empty: give an lm-eval task or the path of a task yaml, as in task.name=gsm8k"),
        (["task.name=none.yaml"], "task.name=none.yaml: there is no such file"),
        (["task.name=gsm8k", "task.data=none.jsonl"], "task.data=none.jsonl: there is no such file"),
        (
            ["task.name=gsm8k", "shape.batch_size=2"],
            "shape.batch_size=2: task=lm_eval gives each prompt a budget of its own length, one at a time; "
            "use shape.batch_size=1",
        ),
    ],
    ids=["empty", "no-yaml", "no-data", "batch"],
)
def test_mistakes_before_anything_is_loaded(model_dir, overrides, message):
    cfg = composed(model_dir, "method=full", *overrides)
    OmegaConf.resolve(cfg)
    with pytest.raises(ValueError) as caught:
        cell.check(cfg)
    assert str(caught.value) == message


def test_mistakes_in_a_task_are_one_line(run, task_dir, tmp_path):
    row = run("method=full", f"task.name={task_dir}/pick.yaml", "task.metric=f1")
    assert (row.status, row.error) == ("invalid", "task.metric=f1 is none of this task's metrics: acc, acc_norm")
    (tmp_path / "hub.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: generate_until\n"
    )
    row = run("method=full", f"task.name={tmp_path}/hub.yaml")
    assert row.status == "invalid" and row.error.startswith(
        f"task.name={tmp_path}/hub.yaml takes its data from the Hugging Face hub, which is out of reach; run once with network"
    )
    (tmp_path / "none.yaml").write_text("a: 1\n")
    row = run("method=full", f"task.name={tmp_path}/none.yaml")
    assert (
        row.error
        == f"task.name={tmp_path}/none.yaml is no lm-eval task file: it needs a line task: <name>, its own in the folder"
    )


CODE = """
import random

import datasets
import numpy as np


def values(doc, results):
    return {"number": np.float32(0.5), "nothing": float("nan"), "flag": np.bool_(True)}


def made(tokenizer, max_seq_lengths, **kwargs):
    docs = [{"text": f"{random.random()} {n}", "length": n} for n in max_seq_lengths for _ in range(3)]
    return {"test": datasets.Dataset.from_list([doc | {"tokenizer": tokenizer} for doc in docs])}


def by_length(doc, results):
    return {"64": -1.0} | {str(doc["length"]): 0.25}
"""
METRIC = "metric_list:\n  - {metric: %s, aggregation: mean, higher_is_better: true}\n"


@pytest.fixture
def write(tmp_path, task_dir):
    """Writes a generation task with further lines, gives its path."""
    (tmp_path / "code.py").write_text(CODE)
    whole = (task_dir / "write.yaml").read_text()

    def go(name: str, lines: str, without: str = "metric_list:") -> str:
        (tmp_path / f"{name}.yaml").write_text(whole.partition(without)[0].replace("tiny_write", f"tiny_{name}") + lines)
        return f"task.name={tmp_path}/{name}.yaml"

    return go


def test_metrics_of_any_type_are_kept(run, write, tmp_path):
    brier = write("brier", PICK.format(metric="brier_score"), "output_type")
    path = write("odd", "process_results: !function code.values\n" + METRIC % "number")
    row = run("method=full", path, "task.num_samples=2")
    assert (row.status, row.accuracy, row.metric) == ("ok", 0.5, "number")
    for line in logged(tmp_path):
        found = {key.partition(",")[0]: value for key, value in line["metrics"].items()}
        assert found == {"number": 0.5, "nothing": None, "flag": True}
    kept = plain({1: (np.int64(1), {"b", "a"}, np.eye(1), math.inf), "text": "a", "other": len})
    assert json.loads(json.dumps(kept)) == {"1": [1, ["a", "b"], [[1.0]], None], "text": "a", "other": repr(len)}
    # brier_score's value per document holds an array
    row = run("method=full", brier, "task.num_samples=3")
    assert (row.status, row.metric, row.accuracy) == ("ok", "brier_score", None) and row.method_facts["brier_score"] > 0, (
        row.error
    )


PICK = """output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {{metric: {metric}}}
"""


def test_a_metric_without_a_number_is_unknown(run, write):
    path = write("nan", "process_results: !function code.values\n" + METRIC % "nothing")
    row = run("method=window", "sparsity=0.5", path, "task.num_samples=3")
    assert (row.status, row.accuracy, row.accuracy_stderr, row.verdict) == ("ok", None, None, None)


def test_a_task_that_makes_its_prompts_gets_tokenizer_and_length(run, write, model_dir, tmp_path):
    """As RULER's do; full and the method see the same ones, and another seed draws others."""
    lines = "custom_dataset: !function code.made\ntest_split: test\noutput_type: generate_until\ndoc_to_text: '{{text}}'\n"
    lines += "doc_to_target: '{{tokenizer}}'\ngeneration_kwargs: {max_gen_toks: 4, until: ['e']}\n"
    path = write("made", lines + "process_results: !function code.by_length\n" + METRIC % 64, "dataset_path")
    rows, shas = [], []
    for seed in (0, 1):
        rows.append(run("method=window", "sparsity=0.2", path, f"seed={seed}", "shape.context_len=96"))
        lines = logged(tmp_path)
        assert {answer for line in lines for answer in line["answers"]} == {str(model_dir)}
        shas.append([line["prompt_sha"] for line in lines])
    assert shas[0] != shas[1]
    for row in rows:
        assert (row.status, row.metric, row.accuracy, row.num_pairs) == ("ok", "96", 0.25, 3), row.error


def test_empty_texts_of_a_rolling_task(run, task_dir, tmp_path):
    """lm-eval scores them 0 and asks the model for nothing; a task of nothing else is refused."""
    docs = tmp_path / "docs.jsonl"
    # this tokenizer has a BOS, so what is left out must be the task's own
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in (DOCS[0], DOCS[1])))
    task = LmEval(name=f"{task_dir}/stream.yaml", data=str(docs))
    loaded = task.load()

    class Nothing:
        def shapes(self, requests):
            return [] if requests[0].doc_id == self.empty else [([5, 6], 3)]

    lm = Nothing()
    lm.empty = 0
    found = task.documents(loaded, lm, 0)
    assert [(document.max_prompt_len, document.max_new_tokens) for document in found] == [(2, 3), (0, 0)]
    lm.shapes = lambda requests: []
    with pytest.raises(ValueError, match="has nothing to score: no document, or empty ones$"):
        task.documents(loaded, lm, 0)


def test_nan_in_the_weights_is_a_status(run, write, model_dir, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    for part in (model, AutoTokenizer.from_pretrained(model_dir)):
        part.save_pretrained(tmp_path / "broken")
    row = run(f"model.path={tmp_path}/broken", "method=full", write("write", METRIC % "exact_match"))
    assert (row.status, row.accuracy) == ("nan", None)


def test_documents_that_cannot_be_read_are_one_line(run, task_dir, tmp_path):
    data, path = tmp_path / "mine.jsonl", f"task.name={task_dir}/pick.yaml"
    data.touch()
    row = run("method=full", path, f"task.data={data}")
    assert (row.status, row.error) == ("invalid", f"task.data={data} has no documents")
    data.write_text('{"text": 1\n')
    row = run("method=full", path, f"task.data={data}")
    assert row.status == "invalid" and "cannot be loaded: An error occurred while generating the dataset; " in row.error


def test_names():
    assert unknown_name("gsm8", ["gsm8k", "mmlu"]).startswith("task.name=gsm8 is no task of lm-eval: did you mean gsm8k?")
    keys = ["exact_match,strict-match", "exact_match,flexible-extract"]
    assert choose_metric(keys, None) == choose_metric(keys, "exact_match") == keys[0]
    assert choose_metric(keys, "exact_match/flexible-extract") == keys[1]
