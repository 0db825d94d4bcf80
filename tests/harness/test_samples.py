"""The per-sample log: nothing finished is lost to a kill, nothing stale is reused, several writers do not mix."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from harness import cell
from harness.config import CONF, register
from harness.samples import SampleLog

KEY = {"code_hash": "a", "versions": {"torch": "1"}, "device_name": "cpu"}
ROOT = Path(__file__).resolve().parents[2]
CELL = ["model=dummy", "method=full", "shape=smoke", "task=niah", "task.num_samples=14", "logger=none"]
CELL += ["model.config.num_hidden_layers=2"]


def test_round_trip_newest_wins_and_stale_is_passed_over(tmp_path):
    log = SampleLog(tmp_path / "deep/x.samples.jsonl", KEY)
    assert log.read() == {}
    log.append({"id": "a", "score": 0.0})
    log.append({"id": "b", "score": 1.0})
    log.append({"id": "a", "score": 1.0})
    assert log.read() == {"a": {"id": "a", "score": 1.0}, "b": {"id": "b", "score": 1.0}}
    for changed in ({"code_hash": "b"}, {"versions": {"torch": "2"}}, {"device_name": "gpu"}):
        assert SampleLog(log.path, KEY | changed).read() == {}


def test_half_a_line_costs_one_sample(tmp_path):
    log = SampleLog(tmp_path / "x.jsonl", KEY)
    log.append({"id": "a"})
    whole = log.path.read_bytes()
    for cut in range(1, len(whole)):
        log.path.write_bytes(whole + whole[:cut])
        log.append({"id": "b"})
        assert set(log.read()) - {"a"} == {"b"}


def write_many(path, name):
    log = SampleLog(path, KEY)
    for number in range(40):
        log.append({"id": f"{name}-{number}", "output": name * 5000})


def test_processes_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(SampleLog(path, KEY).read()) == 120
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").touch()
    SampleLog(tmp_path / "file/x.jsonl", KEY).append({"id": "a"})
    assert "cannot be written" in capsys.readouterr().err


def run_here(folder: Path, monkeypatch, *overrides):
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*CELL, *overrides])
    return cell.run_cell(cfg, folder / "out", "python run.py")


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out/samples.jsonl").read_text().splitlines()]


def test_after_kill_9_the_cell_goes_on_at_the_next_sample(tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    killed.mkdir()
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, str(ROOT / "run.py"), *CELL]
    process = subprocess.Popen(command, cwd=killed, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = 0
    while done < 5 and process.poll() is None:
        time.sleep(0.01)
        done = sum(len(path.read_text().splitlines()) for path in killed.glob("outputs/rows/*.samples.jsonl"))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (log,) = killed.glob("outputs/rows/*.samples.jsonl")
    finished = len(log.read_text().splitlines())
    assert 5 <= finished < 14 and not list(killed.glob("outputs/rows/*[0-9a-f].json")), "no row of a killed cell"
    row = run_here(killed, monkeypatch)
    # the first two are run again: they are timed
    assert row.status == "ok" and finished - 3 <= row.num_resumed <= finished - 2
    whole = run_here(tmp_path / "whole", monkeypatch)
    assert whole.num_resumed == 0 and lines_of(killed) == lines_of(tmp_path / "whole")
    same = ("accuracy", "accuracy_stderr", "num_samples", "output_len_mean", "config_hash")
    assert [getattr(row, name) for name in same] == [getattr(whole, name) for name in same]
    assert row.tpot_ms_p50 > 0 and row.num_repeats == whole.num_repeats == 2


def test_scoring_resumes_only_where_full_has_the_sample_too(tmp_path, monkeypatch):
    overrides = ("method=window", "sparsity=0.8", "task=perplexity", "task.num_samples=5", "task.num_scored=8")
    first = run_here(tmp_path / "a", monkeypatch, *overrides)
    second = run_here(tmp_path / "a", monkeypatch, *overrides)
    assert (first.num_resumed, second.num_resumed) == (0, 3)
    same = ("perplexity", "kl_nats", "top1_agreement", "num_samples")
    assert [getattr(first, name) for name in same] == [getattr(second, name) for name in same]
    logs = {path: path.read_text().splitlines() for path in Path("outputs/rows").glob("*.samples.jsonl")}
    (full_log,) = (path for path in logs if first.config_hash not in path.name)
    full_log.write_text("\n".join(line for line in logs[full_log] if '"perplexity-0-4"' not in line) + "\n")
    third = run_here(tmp_path / "a", monkeypatch, *overrides)
    assert third.num_resumed == 2 and third.kl_nats == pytest.approx(first.kl_nats)


def test_other_code_starts_anew(tmp_path, monkeypatch):
    run_here(tmp_path / "a", monkeypatch, "task.num_samples=4")
    monkeypatch.setattr(cell, "code_hash", lambda: "0" * 12)
    assert run_here(tmp_path / "a", monkeypatch, "task.num_samples=4").num_resumed == 0


def test_a_reused_full_row_is_compared_sample_by_sample(tmp_path, monkeypatch, capsys):
    common = ("task.num_samples=4", "sparsity=0.5")
    fresh = run_here(tmp_path / "a", monkeypatch, "method=window", *common)
    reused = run_here(tmp_path / "a", monkeypatch, "method=streaming_llm", *common)
    assert "reused" in capsys.readouterr().out
    assert fresh.num_pairs == reused.num_pairs == 4 and reused.output_len_diff is not None
    assert reused.verdict is None and "baseline_broken" in reused.flags, "random weights answer nothing: no win, no loss"
    assert reused.accuracy_diff_low <= reused.accuracy_diff <= reused.accuracy_diff_high
