"""reproduce: runs the row's own command, names what differs first, and tells noise from drift."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from harness import reproduce
from harness.reproduce import differences, drifts
from tests.report.conftest import make_row


def verdicts(new):
    return {one.metric: one.verdict for one in drifts(make_row(), new)}


def changed(**factors):
    row = make_row()
    return dataclasses.replace(
        row, **{name: type(getattr(row, name))(getattr(row, name) * factor) for name, factor in factors.items()}
    )


@pytest.mark.parametrize(
    "metric, factor, expected",
    [
        ("kv_resident_bytes", 1.0001, "drift"),
        ("peak_decode_bytes", 1.005, "within noise"),
        ("peak_decode_bytes", 1.05, "drift"),
        ("tpot_ms_p50", 1.08, "within noise"),
        ("tpot_ms_p50", 1.3, "drift"),
        ("ttft_ms", 0.8, "drift"),
        ("accuracy", 0.995, "within noise"),
        ("accuracy", 0.95, "drift"),
        ("ttft_ms", 1, "same"),
    ],
)
def test_noise_and_drift(metric, factor, expected):
    assert verdicts(changed(**{metric: factor}))[metric] == expected


def test_a_row_that_spreads_has_wider_noise():
    assert verdicts(changed(tpot_ms_p50=1.3, tpot_ms_p95=2.0))["tpot_ms_p50"] == "within noise"


@pytest.mark.parametrize("fields", [{"device_name": "another"}, {"flags": ["noisy"]}, {"flags": ["short_decode"]}], ids=str)
def test_times_of_another_device_or_load_are_not_compared(fields):
    found = verdicts(dataclasses.replace(changed(tpot_ms_p50=3), **fields))
    assert found["tpot_ms_p50"] == "not comparable" and found["kv_resident_bytes"] == "same"


def test_a_metric_that_is_gone():
    assert verdicts(dataclasses.replace(make_row(), accuracy=None))["accuracy"] == "gone"


def test_versions_and_code_are_named():
    new = dataclasses.replace(
        make_row(), versions={"python": "3.12.3", "torch": "2.13.0", "cuda": "13.0"}, code_hash="b" * 12, git_commit="c1"
    )
    assert differences(make_row(), new) == [
        "torch: 2.11.0 then, 2.13.0 now",
        "git_commit: – then, c1 now",
        f"code_hash: {'a' * 12} then, {'b' * 12} now",
    ]
    assert differences(make_row(), make_row()) == []


@pytest.fixture
def rerun(monkeypatch, tmp_path):
    """Run the module on a row whose second run is given, without a second run; returns exit code and the command."""

    def run(old, new):
        commands = []

        def fake(command, **kwargs):
            commands.append(command)
            folder = next(Path(word.partition("=")[2]) for word in command if word.startswith("hydra.run.dir="))
            if new is not None:
                folder.mkdir(parents=True)
                (folder / "row.json").write_text(new.to_json())

        with monkeypatch.context() as patch:
            patch.setattr(reproduce, "print_known_differences", lambda old: None)
            patch.setattr(subprocess, "run", fake)
            path = tmp_path / "row.json"
            path.write_text(old.to_json())
            return reproduce.main([str(path)]), commands

    return run


def test_the_rows_own_command_runs(rerun, capsys):
    code, (command,) = rerun(make_row("sparda", 0.8), make_row("sparda", 0.8))
    assert code == 0 and "no drift beyond noise" in capsys.readouterr().out
    assert command[2:6] == ["method=sparda", "sparsity=0.8", "shape.context_len=16384", "shape.batch_size=1"]
    assert "logger=none" in command


def test_drift_is_an_exit_code(rerun, capsys):
    assert rerun(make_row(), changed(kv_resident_bytes=1.1))[0] == 1
    assert "drift: kv_resident_bytes" in capsys.readouterr().out
    assert rerun(make_row(), make_row(status="oom_decode", error="full"))[0] == 1
    assert "oom_decode: full" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", "make demo"], ids=["none", "another"])
def test_a_row_that_cannot_run_again(rerun, capsys, command):
    code, commands = rerun(make_row(reproduce=command), make_row())
    assert (code, commands) == (2, [])
    assert "cannot be run again" in capsys.readouterr().err


def test_a_command_that_gives_nothing(rerun, capsys):
    assert rerun(make_row(), None)[0] == 2
    assert "gave no row" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_row_comes_back(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = "model=dummy method=window sparsity=0.5 shape=smoke shape.repeats=1 task=speed logger=none compare=false"
    run = [__import__("sys").executable, str(reproduce.ROOT / "run.py"), *words.split()]
    line = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    (tmp_path / "row.json").write_text(line)
    assert reproduce.main([str(tmp_path / "row.json")]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"python run.py {words}") and "no drift beyond noise" in out
    assert json.loads(line)["status"] == "ok"
