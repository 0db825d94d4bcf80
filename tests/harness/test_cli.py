"""The command line as a user sees it: exit codes, one line on stderr, last line of stdout, the files left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run
from harness.config import blank_row
from harness.results import Row, write_atomic

ROOT = Path(run.__file__).parent


def shell(*arguments, cwd, **env):
    """Run run.py as its own process."""
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def in_process(tmp_path, monkeypatch, capfd):
    """Run run.py in this process with a fake engine: method m ends as `fates[m]`, a status or an exception."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.neighbours.cpu_neighbours", lambda: None)

    def call(*arguments, **fates):
        def run_cell(cfg, out_dir, reproduce):
            row = blank_row(cfg, reproduce)
            fate = fates.get(row.method, "ok")
            if isinstance(fate, BaseException):
                raise fate
            row.status = fate
            write_atomic(out_dir / "row.json", row.to_json())
            print("a card")
            return row

        monkeypatch.setattr("harness.sweep.run_cell", run_cell)
        arguments = [*arguments, "model=dummy", "logger=none"]
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        code = run.cli(arguments)
        captured = capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def test_mistake_is_one_line_and_exit_code_2(tmp_path):
    done = shell("method=windw", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: unknown method 'windw': did you mean window? Valid: ")
    assert list(tmp_path.iterdir()) == []


def test_full_error_shows_the_traceback(tmp_path):
    done = shell("sparcity=1", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback")
    assert "error: unknown key 'sparcity': did you mean sparsity" in done.stderr.splitlines()[-1]


def test_typo_in_a_sweep_stops_it_before_it_starts(tmp_path):
    done = shell("-m", "model=dummy", "method=full,windw", "shape=smoke", cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["h2o, hysparse, int4, int8", "sparsity: 0.8", "python run.py -m"]),
        (["--cfg", "job", "--resolve", "method=window", "sparsity=0.3"], ["  sparsity: 0.3", "  context_len: 1024"]),
        (["--info", "defaults"], ["method/sparda"]),
    ],
    ids=["help", "cfg", "info"],
)
def test_hydra_flags_still_work(tmp_path, arguments, words):
    done = shell(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words)
    assert "full_schema" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_single_cell(in_process, tmp_path):
    code, out, err = in_process("method=window", "sparsity=0.5")
    assert (code, err) == (0, [])
    (file,) = tmp_path.glob("outputs/*/*/row.json")
    row = json.loads(out[-1])
    assert row == json.loads(file.read_text())
    assert row["reproduce"] == "python run.py method=window sparsity=0.5 model=dummy logger=none"


def test_two_runs_of_one_second_keep_their_rows(in_process, tmp_path):
    for _ in range(3):
        assert in_process("method=full")[0] == 0
    assert len(list(tmp_path.glob("outputs/*/*/row.json"))) == 3


@pytest.mark.parametrize(
    ("fate", "code", "status"),
    [
        ("oom_decode", 1, "oom_decode"),
        ("nan", 1, "nan"),
        ("invalid", 2, "invalid"),
        (ValueError("weights.bin is cut short\nsecond line"), 2, "invalid"),
        (KeyError("a bug"), 1, "failed"),
    ],
    ids=["oom", "nan", "invalid", "value-error", "bug"],
)
def test_single_cell_that_fails(in_process, tmp_path, fate, code, status):
    got, out, err = in_process("method=full", full=fate)
    (folder,) = tmp_path.glob("outputs/*/*/")
    row = Row.read(folder / "row.json")
    assert (got, row.status, json.loads(out[-1])["status"]) == (code, status, status)
    if isinstance(fate, Exception):
        assert "Traceback" in (folder / "traceback.txt").read_text()
        assert row.error == {ValueError: "weights.bin is cut short second line", KeyError: "KeyError('a bug')"}[type(fate)]
        assert err == [f"{status}: {row.error}"]


def test_interrupt_leaves_no_row(in_process, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        in_process("method=full", full=KeyboardInterrupt())
    assert list(tmp_path.rglob("row.json")) == []


def test_all_cells_impossible_is_a_mistake(in_process, tmp_path):
    code, out, err = in_process("-m", "method=full", "shape.context_len=8888888,9999999")
    assert (code, out, len(err)) == (2, [], 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ("file", "nowhere"))
def test_unwritable_results_are_one_line(tmp_path, where):
    if where == "file":
        (tmp_path / "outputs").touch()
    extra = [] if where == "file" else ["hydra.run.dir=/proc/nowhere"]
    command = [sys.executable, str(ROOT / "run.py"), "model=dummy", "task=speed", "method=full", "logger=none", *extra]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "results cannot be written" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
