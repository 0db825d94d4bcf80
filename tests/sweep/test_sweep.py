"""Sweeps survive: every way in which a cell can end, resume, pruning, kills, two sweeps in one folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run
from harness import store, sweep
from harness.results import Row, write_atomic

ROOT = Path(run.__file__).parent


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


ENDS = {
    "segfault": ("failed", "killed by SIGSEGV"),
    "killed": ("failed", "killed by SIGKILL"),
    "exit": ("failed", "exit code 1 without a row: the driver is too old"),
    "hang": ("timeout", "still running after 1.5 s (cell_timeout_s)"),
    "nan": ("nan", ""),
    "oom_decode": ("oom_decode", ""),
}


def test_cells_that_end_badly_are_typed_rows_and_the_sweep_goes_on(sweeps, capfd):
    lengths = {fate: 256 + number for number, fate in enumerate(ENDS)}
    sweeps.fates = {f"full {length}": fate for fate, length in lengths.items()}
    every = ",".join(map(str, lengths.values()))
    code = sweeps.cli("method=full,window", f"shape.context_len={every}", "cell_timeout_s=1.5")
    summary = last_json(capfd.readouterr().out)
    assert (code, summary["ok"], summary["failed"]) == (1, len(ENDS), 3)
    folders = {row.context_len: path.parent for path, row in sweeps.rows(summary["sweep_dir"]) if row.method == "full"}
    for fate, (status, error) in ENDS.items():
        folder = folders[lengths[fate]]
        row = Row.read(folder / "row.json")
        assert row.status == status and (row.error or "").startswith(error), fate
        assert row.code_hash and row.device_name, fate
        # a crash and a hang say where they were
        if fate in ("segfault", "hang"):
            assert 'File "<string>", line' in (folder / "traceback.txt").read_text(), fate


def test_rerun_measures_only_what_is_missing(sweeps, capfd):
    assert sweeps.cli("method=full,window", "sparsity=0.5") == 0
    assert sweeps.cli("method=full,window", "sparsity=0.5,0.8") == 0
    assert sweeps.ran() == ["full None 256", "window 0.5 256", "window 0.8 256"]
    summary = last_json(capfd.readouterr().out)
    assert (summary["ok"], summary["reused"]) == (3, 2)
    # a reused row stands in the new folder too
    assert len(sweeps.rows(summary["sweep_dir"])) == 3


@pytest.mark.parametrize(("rerun", "again"), [("missing", []), ("failed", ["window"]), ("all", ["full", "window"])])
def test_rerun(sweeps, capfd, rerun, again):
    sweeps.fates = {"window": "segfault"}
    assert sweeps.cli("method=full,window") == 1
    sweeps.fates = {}
    assert sweeps.cli("method=full,window", f"rerun={rerun}") == (1 if rerun == "missing" else 0)
    assert [line.split()[0] for line in sweeps.ran()[2:]] == again
    plan = capfd.readouterr().out
    assert ("failed: failed: killed by SIGSEGV; rerun=failed runs it again" in plan) == (rerun == "missing")


def test_stale_rows_are_shown_and_run_again(sweeps, capfd):
    assert sweeps.cli("method=full") == 0
    (path,) = Path(store.STORE).glob("*.json")
    write_atomic(path, json.dumps(json.loads(path.read_text()) | {"code_hash": "other"}))
    capfd.readouterr()
    assert sweeps.cli("method=full") == 0
    out = capfd.readouterr().out
    assert "stale: code other is now" in out
    assert len(sweeps.ran()) == 2
    assert "reused" not in last_json(out)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"code_hash": "b"}, "code a is now b"),
        ({"device_name": "H200"}, "measured on CPU"),
        ({"versions": {"torch": "2", "weights": "x"}}, "torch 1 is now 2"),
        ({"versions": {"torch": "1"}}, "weights x is now None"),
    ],
    ids=["same", "code", "device", "versions", "weights"],
)
def test_why_stale(change, why):
    same = {"code_hash": "a", "device_name": "CPU", "versions": {"torch": "1", "weights": "x"}}
    assert store.why_stale(Row(**same), Row(**same | change)) == why


def test_larger_cells_of_a_method_that_ran_out_of_memory_are_pruned(sweeps, capfd):
    sweeps.fates = {"full 512": "oom_prefill"}
    sizes = ["shape.context_len=1024,512,256", "shape.batch_size=1,2"]
    code = sweeps.cli("method=full", *sizes)
    summary = last_json(capfd.readouterr().out)
    rows = [row for _, row in sweeps.rows(summary["sweep_dir"])]
    pruned = [row for row in rows if "pruned" in row.flags]
    # batch 2 at 512 and both at 1024, though 1024 came first on the command line
    assert {(row.context_len, row.batch_size) for row in pruned} == {(512, 2), (1024, 1), (1024, 2)}
    assert {row.status for row in pruned} == {"oom_prefill"}
    assert {row.error for row in pruned} == {"pruned: out of memory already at context_len=512, batch_size=1"}
    assert all(row.kv_resident_bytes is None and row.accuracy is None for row in pruned)
    assert code == 1 and summary["oom_prefill"] == 4 and summary["ok"] == 2
    assert len(sweeps.ran()) == 3
    # not in the store: a pruned cell was never measured
    assert len(list(Path(store.STORE).glob("*.json"))) == 3
    # another method is not concerned; the answer of the smaller cell holds in a rerun too
    assert sweeps.cli("method=full,window", "shape.context_len=512,1024") == 1
    assert sweeps.ran()[3:] == ["window 0.8 512", "window 0.8 1024"]


def test_memory_that_a_neighbour_took_prunes_nothing(sweeps, monkeypatch):
    def spawn(cfg, row, overrides, out_dir, *rest):
        row.status, row.flags = "oom_prefill", ["shared_device"]
        return sweep._write(row, out_dir)

    monkeypatch.setattr(sweep, "_spawn", spawn)
    assert sweeps.cli("method=full", "shape.context_len=256,512") == 1
    (folder,) = sweeps.folder.glob("outputs/multirun/*/*")
    assert [row.flags for _, row in sweeps.rows(folder)] == [["shared_device"]] * 2


def test_duplicates_run_once_and_impossible_cells_are_rows(sweeps, capfd):
    code = sweeps.cli("method=full", "sparsity=0.1,0.5", "shape.context_len=300,9999999")
    captured = capfd.readouterr()
    summary = last_json(captured.out)
    # each cell was asked for twice, once per sparsity, which full does not know
    assert (code, summary["ok"], summary["invalid"]) == (0, 1, 1)
    folders = list((sweeps.folder / summary["sweep_dir"]).glob("*_*/"))
    rows = [Row.read(folder / "row.json") for folder in folders]
    invalid = next(row for row in rows if row.status == "invalid")
    assert len(rows) == 2 and (invalid.method, invalid.context_len) == ("full", 9999999)
    assert "9999999" in invalid.error
    assert "dropped: sparsity=0.5 shape.context_len=300 is the same cell as sparsity=0.1 shape.context_len=300" in captured.out
    assert sweeps.ran() == ["full None 300"]


def test_a_cell_that_turns_out_invalid_is_a_failure(sweeps, capfd):
    """The plan saw nothing wrong with it: the exit code must tell."""
    sweeps.fates = {"window": "invalid"}
    code = sweeps.cli("method=full,window")
    summary = last_json(capfd.readouterr().out)
    assert (code, summary["ok"], summary["invalid"]) == (1, 1, 1)


def test_a_folder_that_cannot_be_made_is_one_line(sweeps, capfd):
    (sweeps.folder / "outputs").write_text("a file where the folder should be")
    assert sweeps.cli("method=full,window") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: results cannot be written") and sweeps.ran() == []


def test_sweep_folder_of_the_users_choice_twice(sweeps, capfd):
    assert sweeps.cli("method=full,window", "hydra.sweep.dir=mine") == 0
    assert last_json(capfd.readouterr().out) == {"ok": 2, "sweep_dir": "mine"}
    assert len(list((sweeps.folder / "mine").glob("*/row.json"))) == 2
    # rows of the first sweep that are in the folder too are not counted again
    assert sweeps.cli("method=window", "hydra.sweep.dir=mine", "sparsity=0.5") == 0
    assert last_json(capfd.readouterr().out) == {"ok": 1, "sweep_dir": "mine"}


@pytest.mark.parametrize("words", [["method=full,window", "plan=only"], ["method=glob(*)", "plan=only"]], ids=["list", "glob"])
def test_plan_only_runs_nothing(sweeps, capfd, words):
    assert sweeps.cli(*words) == 0
    counts = last_json(capfd.readouterr().out)
    assert counts["run"] == counts["cells"] >= 2
    assert counts["estimated_s"] is None
    assert list(sweeps.folder.iterdir()) == []


def test_plan_estimates_from_earlier_rows(sweeps, capfd):
    assert sweeps.cli("method=full") == 0
    assert sweeps.cli("method=full,window", "shape.context_len=256,1024", "plan=only") == 0
    # 2 s at 256 tokens: done; 4 times as long at 1024; window takes the row of full
    assert last_json(capfd.readouterr().out) == {"cells": 4, "done": 1, "run": 3, "duplicates": 0, "estimated_s": 18}


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_sweep_killed_in_the_middle_loses_only_the_current_cell(sweeps, capfd):
    four = ["method=full,window", "shape.context_len=256,512"]
    sweeps.fates = {"window 256": "hang"}
    first = sweeps.fork(*four)
    wait_for(lambda: "window 0.8 256" in sweeps.ran())
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert first.exitcode == -signal.SIGKILL
    sweeps.fates = {}
    assert sweeps.cli(*four) == 0
    assert sweeps.ran() == ["full None 256", "window 0.8 256", "window 0.8 256", "full None 512", "window 0.8 512"]
    summary = last_json(capfd.readouterr().out)
    assert (summary["ok"], summary["reused"]) == (4, 1)


def test_two_sweeps_in_one_folder_share_the_work(sweeps):
    three = ["method=full,window,streaming_llm"]
    sweeps.fates = dict.fromkeys(("full", "window", "streaming_llm"), "slow")
    both = [sweeps.fork(*three), sweeps.fork(*three)]
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    assert sorted(sweeps.ran()) == ["full None 256", "streaming_llm 0.8 256", "window 0.8 256"]
    logs = [path.read_text() for path in sweeps.folder.glob("sweep-*.log")]
    summaries = [last_json(log) for log in logs]
    assert [summary["ok"] for summary in summaries] == [3, 3]
    assert sum("waiting" in log for log in logs) >= 1
    assert len({summary["sweep_dir"] for summary in summaries}) == 2


def test_cells_on_one_device_take_turns(sweeps):
    sweeps.fates = {"full": "slow", "window": "slow"}
    both = [sweeps.fork("method=full"), sweeps.fork("method=window")]
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    rows = [Row.read(path) for path in Path(store.STORE).glob("*.json")]
    starts = sorted(row.started_at for row in rows)
    seconds = [float(start[17:26]) for start in starts]
    assert (seconds[1] - seconds[0]) % 60 >= 1


def test_interrupt_kills_the_cell_and_keeps_the_finished_ones(sweeps):
    sweeps.fates = {"window": "hang"}
    running = sweeps.fork("method=full,window")
    wait_for(lambda: len(sweeps.ran()) == 2)
    os.kill(running.pid, signal.SIGINT)
    running.join(30)
    assert running.exitcode == 130
    (log,) = [path.read_text() for path in sweeps.folder.glob("sweep-*.log")]
    assert log.splitlines()[-1].startswith("interrupted: finished cells are kept")


def test_a_cell_dies_with_its_sweep():
    script = (
        "import os, subprocess, sys, time\n"
        "code = 'from harness import child; child.die_with_parent(); print(1, flush=True); import time; time.sleep(60)'\n"
        "env = os.environ | {'KVGAUGE_PARENT': str(os.getpid())}\n"
        "cell = subprocess.Popen([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, start_new_session=True)\n"
        "cell.stdout.readline(); print(cell.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    cell = int(parent.stdout.readline())
    parent.kill()
    parent.wait()

    def gone():
        try:
            return Path(f"/proc/{cell}/stat").read_text().split()[2] == "Z"
        except FileNotFoundError:
            return True

    wait_for(gone, 5)


def test_a_threshold_fails_the_job_in_one_line(sweeps, capfd):
    # the stand-in says accuracy 0.75 and 20 % of the bytes
    limits = ["thresholds.all.min_accuracy=0.75", "thresholds.all.max_prediction_error=0"]
    assert sweeps.cli("method=full,window", *limits) == 0
    assert sweeps.cli("method=full,window", *limits, "+thresholds.window.max_kept_ratio=0.1") == 1
    err = [line for line in capfd.readouterr().err.splitlines() if line.startswith("threshold")]
    assert len(err) == 1
    assert err[0].startswith("threshold: window ") and err[0].endswith(": max_kept_ratio=0.1, measured 0.2")


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        ({}, []),
        ({"min_accuracy": 0.5, "max_kept_ratio": 0.2, "max_prediction_error": 0.011}, []),
        ({"min_accuracy": 0.51}, ["min_accuracy=0.51, measured 0.5"]),
        ({"max_prediction_error": 0.009}, ["max_prediction_error=0.009, measured 0.01"]),
        ({"max_bound_ratio": 2}, ["max_bound_ratio=2, measured unknown"]),
    ],
    ids=["none", "reached", "accuracy", "prediction", "unknown"],
)
@pytest.mark.parametrize("scope", ["all", "window", "full"])
def test_violations(limits, broken, scope):
    row = Row(status="ok", method="window", accuracy=0.5, kv_kept_ratio=0.2, kv_resident_bytes=99, kv_predicted_bytes=100)
    lines = [line.partition(": ")[2].partition(": ")[2] for line in sweep.violations(row, {scope: limits})]
    assert lines == ([] if scope == "full" else broken)


def test_objective_of_a_search():
    class Cfg:
        kv_budget = 0.25

    def score(**values):
        return sweep.objective(Cfg, Row(**{"status": "ok", "accuracy": 0.5, "kv_kept_ratio": 0.25} | values))

    assert score() == 0.5
    assert score(accuracy=None, kl_nats=0.3) == -0.3
    assert score(kv_kept_ratio=0.26) < -1e8
    assert score(status="failed") < -1e8


CRASH = '''"""crash: a method that takes its process along."""

import ctypes
from dataclasses import dataclass

from methods.window import Window


@dataclass
class Crash(Window):
    def make_layer(self, layer_idx):
        ctypes.string_at(0)
'''


def test_real_cells_one_impossible_one_crashing(tmp_path):
    """The whole of it, with nothing replaced: a copy of the project with one more method."""
    for name in ("harness", "methods", "kernels", "tasks", "conf", "hydra_plugins"):
        (tmp_path / "project" / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / "project" / name)], check=True)
    project = tmp_path / "project"
    (project / "run.py").write_text((ROOT / "run.py").read_text())
    (project / "methods/crash.py").write_text(CRASH)
    (project / "conf/method/crash.yaml").write_text((ROOT / "conf/method/window.yaml").read_text().replace("window", "crash"))
    words = ["shape=smoke", "task=speed", "task.num_samples=1", "logger=none", "model=dummy"]
    words += ["model.config.num_hidden_layers=2", "method=crash,sparda,window", "compare=false"]
    command = [sys.executable, str(project / "run.py"), "-m", *words]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    summary = last_json(done.stdout)
    assert done.returncode == 1, done.stderr
    folder = tmp_path / summary.pop("sweep_dir")
    assert summary == {"failed": 1, "invalid": 1, "ok": 1}
    rows = {row.method: (row, path.parent) for path in folder.glob("*/row.json") for row in [Row.read(path)]}
    assert rows["crash"][0].error == "killed by SIGSEGV"
    assert "methods/crash.py" in (rows["crash"][1] / "traceback.txt").read_text()
    assert "predict_layers" in rows["sparda"][0].error
    assert rows["window"][0].status == "ok"
    assert rows["window"][0].duration_s > 0
    assert {row.device_name for row, _ in rows.values() if row.status != "invalid"} == {rows["window"][0].device_name}
