"""`task=lm_eval` end to end: lm-eval's command line and the row say the same; every budget is the prompt's own."""

import functools
import json
import shutil
import sys

import pytest
from hydra import compose, initialize_config_dir
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf

from harness import cell
from harness.config import CONF, register
from harness.lm_cell import choose_metric
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
    assert row.error == f"task.name={tmp_path}/none.yaml is no lm-eval task file: it needs a line task: <name>"


def test_names():
    assert unknown_name("gsm8", ["gsm8k", "mmlu"]).startswith("task.name=gsm8 is no task of lm-eval: did you mean gsm8k?")
    keys = ["exact_match,strict-match", "exact_match,flexible-extract"]
    assert choose_metric(keys, None) == choose_metric(keys, "exact_match") == keys[0]
    assert choose_metric(keys, "exact_match/flexible-extract") == keys[1]
