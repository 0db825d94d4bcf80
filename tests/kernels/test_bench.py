"""The bench's rules and wiring, without its clock: every case runs at toy size on this device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import bench, bench_cases, check
from kernels.bench import Row
from kernels.bench_cases import Case, Problem, Run, Target

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def toy_clock(monkeypatch):
    """Calls everything once; a run takes as many milliseconds as the sets it gets."""
    monkeypatch.setattr(bench, "sets_of", lambda problem, device: [problem.make()])

    def time_ms(calls):
        for call in calls:
            call()
        return [1.0, 2.0, 3.0, 4.0, 5.0]

    monkeypatch.setattr(bench, "time_ms", time_ms)


@pytest.fixture
def toy_sizes(monkeypatch):
    """Small enough for the interpreter, whose bf16 is wrong."""
    monkeypatch.setattr(bench_cases, "DEVICE", DEVICE.type)
    if not CUDA:
        monkeypatch.setattr(bench_cases, "DTYPE", torch.float16)
    monkeypatch.setattr(bench_cases, "NUM_HEADS", 4)
    monkeypatch.setattr(bench_cases, "DIM", 64)


FORMATS = {"fp8": 1.75, "int8": 1.6, "int4": 2.3, "int4_token": None, "mixed": None}
TOY = {
    "dense": lambda: bench_cases.dense(1, 2, 64, bench_cases.one_gib, False),
    "kept": lambda: bench_cases.kept(1, 2, 64, 0.5, 4.0),
    "kept_blocks": lambda: bench_cases.kept_blocks(1, 2, 256, 0.5),
    "h2o": lambda: bench_cases.h2o(1, 2, 64),
    "quantised": lambda: bench_cases.quantised(1, 2, 128, FORMATS),
    "written": lambda: bench_cases.written(1, 1, 128, ("fp8", "int8", "int4")),
    "appended_quant": lambda: bench_cases.appended_quant(1, 1, ("fp8", "int8", "int4")),
    "dense_prefill": lambda: bench_cases.dense_prefill(2, 128),
    "block_sparse": lambda: bench_cases.block_sparse(2, 128, {0.5: 1.6, 0.25: 3.0}, block_size=32),
    "regrouped": lambda: bench_cases.regrouped(2, 128, {0.5: None}, block_size=32),
    "summed_columns": lambda: bench_cases.summed_columns(2, 128),
    "selected": lambda: bench_cases.selected(2, 512, 0.2, 20.0),
    "compacted": lambda: bench_cases.compacted(1, 2, 64, 0.25),
    "appended": lambda: bench_cases.appended(2, 2),
    "normed": lambda: bench_cases.normed(2),
    "gated": lambda: bench_cases.gated(2),
    "rotated": lambda: bench_cases.rotated(2, 2),
}


@pytest.mark.parametrize("name", TOY)
def test_every_problem_runs(name, toy_clock, toy_sizes):
    rows = bench.rows_of(Case("op", "toy", TOY[name]), 4000.0, DEVICE)
    ours = {run for run, spec in TOY[name]().runs.items() if spec.ours}
    failed = {row.run: row.note for row in rows if row.note and row.target is None}
    # a CPU has no cuDNN and no flash of its own
    assert {run: note for run, note in failed.items() if run in ours or run == "-"} == {}
    assert {row.run for row in rows if row.ms == 3.0} >= ours
    assert sum(row.target is not None for row in rows) == len(TOY[name]().targets)


def test_cases_cover_every_op():
    cases = bench_cases.cases()
    assert {case.op for case in cases} == set(check.ops())
    assert len({(case.op, case.name) for case in cases}) == len(cases)
    for op in {case.op for case in cases}:
        assert bench.test_file(op).exists(), op


def test_tune_names_lists_that_exist():
    for op in {case.op for case in bench_cases.cases() if case.main}:
        source = (Path(bench.__file__).parent / op / "triton.py").read_text()
        assert "\nTUNE = [" in source, op


def constant(seconds=0.0, value=1.0, ours=False, **more):
    return Run(lambda s: torch.full((4,), value), ours=ours, gbytes=0.001, **more)


def test_ratios_and_targets(monkeypatch):
    monkeypatch.setattr(bench, "sets_of", lambda problem, device: [{}])
    times = iter([[1.0] * 9, [2.0] * 9, [4.0] * 9])
    monkeypatch.setattr(bench, "time_ms", lambda calls: next(times))
    targets = [
        Target("x best", bench_cases.faster("mine", "a", "b"), 2.0, run="mine"),
        Target("us", lambda ms, copy: ms["mine"] * 1e3, 999, at_least=False, run="mine"),
        Target("x missing", bench_cases.faster("absent", "a"), 1.0, run="absent"),
    ]
    problem = Problem(dict, {"mine": constant(ours=True), "a": constant(), "b": constant()}, targets)
    mine, a, _, met, missed, absent = bench.rows_of(Case("op", "c", lambda: problem), 2.0, DEVICE)
    assert (mine.ms, mine.gb_per_s, mine.of_copy, mine.over_best) == (1.0, 1.0, 0.5, 2.0) and a.over_best is None
    assert (met.figure, met.met, met.target) == (2.0, True, ">= 2 x best")
    assert (missed.figure, missed.met, missed.target) == (1000.0, False, "<= 999 us")
    assert absent.note == "not measured" and absent.met is None


def test_wrong_output_gets_no_number(toy_clock):
    runs = {"good": constant(), "bad": constant(value=1.5, like="good"), "nan": constant(value=float("nan"), like="good")}
    rows = {row.run: row for row in bench.rows_of(Case("op", "c", lambda: Problem(dict, runs)), 1.0, DEVICE)}
    assert rows["good"].ms == 3.0
    assert rows["bad"].ms is None and rows["bad"].note == "wrong: 0.5 away from good"
    assert rows["nan"].ms is None and rows["nan"].note.startswith("wrong: inf")


def test_broken_op_says_why_and_the_rest_goes_on(toy_clock):
    def broken(s):
        raise RuntimeError("out of resources\nmany\nlines")

    runs = {"ours": constant(ours=True, like="theirs"), "theirs": Run(broken)}
    ours, theirs = bench.rows_of(Case("op", "c", lambda: Problem(dict, runs)), 1.0, DEVICE)
    assert ours.ms == 3.0 and theirs.note == "RuntimeError: out of resources"

    def missing():
        raise ModuleNotFoundError("No module named 'kernels.op.triton'")

    (row,) = bench.rows_of(Case("op", "c", missing), 1.0, DEVICE)
    assert row.note == "ModuleNotFoundError: No module named 'kernels.op.triton'"


def test_tune_sorts_and_keeps_failures(monkeypatch):
    from kernels.select import triton

    monkeypatch.setattr(triton, "TUNE", [{"n": 1}, {"n": 2}, {"n": 3}])
    monkeypatch.setattr(bench, "sets_of", lambda problem, device: [{}])
    times = iter([[3.0] * 9, [2.0] * 9, [1.0] * 9])
    monkeypatch.setattr(bench, "time_ms", lambda calls: next(times))

    def call(s, config=None):
        if config == {"n": 2}:
            raise ValueError("too large")
        return torch.ones(2)

    problem = Problem(dict, {"ours": Run(call, ours=True, config=call, like="x"), "x": Run(call)})
    rows = bench.tuned(Case("select", "c", lambda: problem), 1.0, DEVICE)
    assert [(row.config, row.ms) for row in rows] == [({"n": 3}, 1.0), ({"n": 1}, 2.0), (None, 3.0), ({"n": 2}, None)]
    text = bench.markdown(rows, tune=True, keep=1)
    assert "{'n': 3}" in text and "pinned" in text and "{'n': 1}" not in text


def test_gate_runs_the_tests(tmp_path, monkeypatch):
    good, bad, empty = (tmp_path / f"test_{name}.py" for name in ("good", "bad", "empty"))
    good.write_text("def test_it(): pass\n")
    bad.write_text("def test_it(): assert 1 == 2\n")
    empty.write_text("")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "test_file", lambda op: tmp_path / f"test_{op}.py")
    found = bench.gate(["good", "bad", "empty", "none"], 2, tmp_path)
    assert found["good"] is None and found["none"] == "no test_none.py"
    assert found["bad"].startswith("test_bad.py: FAILED") and "no tests ran" in found["empty"]
    assert "1 passed" in (tmp_path / "test_good.log").read_text()


def test_main_prints_no_number_without_passing_tests(monkeypatch, capsys, tmp_path, toy_clock):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "gate", lambda ops, jobs, folder: {"good": None, "bad": "test_bad.py: FAILED"})
    monkeypatch.setattr(bench, "copy_gb_per_s", lambda device: 4000.0)
    monkeypatch.setattr(bench, "facts", lambda *a: {"device": "toy", "torch": "2", "triton": "3"})
    cases = [Case(op, "c", lambda: Problem(dict, {"triton": constant(ours=True)})) for op in ("good", "bad")]
    monkeypatch.setattr(bench_cases, "cases", lambda flex: cases)
    out = tmp_path / "results" / "today.json"
    assert bench.main(["--all", "--json", str(out), "--logs", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "no number: test_bad.py: FAILED" in printed and printed.rstrip().endswith("|")
    held = json.loads(out.read_text())
    assert held["device"] == "toy" and [row.get("ms") for row in held["rows"]] == [3.0, None]
    assert out.with_suffix(".md").read_text().startswith("# Kernels on toy")


def test_markdown_has_targets_last():
    rows = [
        Row("op", "c", "triton", ms=0.02, ms_p20=0.019, ms_p80=0.021, gb_per_s=4000, of_copy=0.97, over_best=1.01),
        Row("op", "c", "triton", target="<= 20 us", figure=20.0, met=True),
    ]
    lines = bench.markdown(rows).splitlines()
    assert lines[2] == "| op | c | triton | 0.0200 | 0.0190 - 0.0210 | 4000 |  | 0.97 | 1.01 |"
    assert lines[-1] == "| op | c | triton | <= 20 us | 20.00 | met |"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--op", "warp"], "no cases of warp; ops: decode_attention"),
        (["--op", "select", "--case", "tiny"], "no case 'tiny'; cases: 8x32k keep 20%"),
        ([], "nothing to measure"),
    ],
    ids=("op", "case", "nothing"),
)
def test_refusals(arguments, told, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert told in capsys.readouterr().err


@pytest.mark.skipif(CUDA, reason="has a CUDA device")
def test_needs_a_gpu():
    done = subprocess.run([sys.executable, "-m", "kernels.bench", "--all"], capture_output=True, text=True)
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr


@pytest.mark.gpu
def test_times_and_cold_sets():
    device = torch.device("cuda", 0)
    problem = Problem(lambda: {"x": torch.ones(1 << 20, device=device)}, {"double": Run(lambda s: s["x"] * 2)})
    sets = bench.sets_of(problem, device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert len(sets) * (4 << 20) >= 2 * cache
    samples = bench.time_ms([lambda s=s: s["x"] * 2 for s in sets])
    assert len(samples) >= bench.MIN_REPLAYS and all(0 < ms < 10 for ms in samples)
    assert 100 < bench.copy_gb_per_s(device) < 20000
