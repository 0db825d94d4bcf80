"""Speed of the kernels on this GPU, each op only after its tests have passed here in the same run.

    python -m kernels.bench --all --json docs/results/2026-12-01-h200-kernels.json    every case; writes the .md beside it
    python -m kernels.bench --op decode_attention --case 1x32k
    python -m kernels.bench --op select --tune                                        candidates of the op's TUNE list

Time is that of a CUDA graph that calls once on each of several sets of tensors, together larger than twice the L2 cache,
divided by the calls; the median of its replays, and the 20th and 80th percentile. Competitors run on the same tensors.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch

from kernels import bench_cases
from kernels.bench_cases import Case, Problem, Run

ROOT = Path(__file__).parent.parent
# three ops share one test file
TESTS = dict.fromkeys(("add_rms_norm", "rope_append", "swiglu"), "test_step_ops.py")
# tensors of all calls of one replay, at least, in multiples of L2
COLD = 2.2
MAX_SETS = 160
# replays of one graph: until this many milliseconds have passed, within bounds
BUDGET_MS, MIN_REPLAYS, MAX_REPLAYS = 60, 11, 101


@dataclasses.dataclass
class Row:
    """One run of one case, or one target of it."""

    op: str
    case: str
    run: str
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    of_copy: float | None = None
    "share of the measured copy bandwidth"
    over_best: float | None = None
    "times the speed of the fastest run that is not ours"
    target: str | None = None
    figure: float | None = None
    met: bool | None = None
    config: dict | None = None
    note: str | None = None


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


# tests first ----------------------------------------------------------------------------------------------------------


def test_file(op: str) -> Path:
    return ROOT / "tests" / "kernels" / TESTS.get(op, f"test_{op}.py")


def failure_of(file: Path, folder: Path, workers: int) -> str | None:
    """Run one test file on this device; None if it passes, else one line. The log stays in `folder`."""
    if not file.exists():
        return f"no {file.name}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    if workers > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder / f"{file.stem}.log").write_text(done.stdout)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    print(f"--- {file.name}", *lines[-30:], sep="\n", file=sys.stderr, flush=True)
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:] or ["no output"]
    return f"{file.name}: {told[0][:160]}"


def gate(ops: list[str], jobs: int, folder: Path) -> dict[str, str | None]:
    """What keeps each op from being measured; test files run side by side in `jobs` processes, before anything is timed."""
    files = {op: test_file(op) for op in ops}
    # long files first, and three processes for each where there are enough: compiling takes the time
    distinct = sorted(set(files.values()), key=lambda file: -file.stat().st_size if file.exists() else 0)
    at_once = max(1, min(jobs // 3, len(distinct)))
    with ThreadPoolExecutor(at_once) as pool:
        told = pool.map(lambda file: failure_of(file, folder, jobs // at_once), distinct)
        failures = dict(zip(distinct, told, strict=True))
    return {op: failures[file] for op, file in files.items()}


# time -----------------------------------------------------------------------------------------------------------------


def tensors_in(value) -> list[torch.Tensor]:
    match value:
        case torch.Tensor():
            return [value]
        case dict():
            return [t for x in value.values() for t in tensors_in(x)]
        case list() | tuple():
            return [t for x in value for t in tensors_in(x)]
    return [t for x in vars(value).values() for t in tensors_in(x)] if dataclasses.is_dataclass(value) else []


def size_of(value) -> int:
    """Bytes of the distinct memory behind all tensors in it."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(value)}.values())


def sets_of(problem: Problem, device: torch.device) -> list[dict]:
    """Enough sets that a replay moves COLD times L2 through the cache; a set counts as what its smallest run reads."""
    first = problem.make()
    if problem.num_sets:
        return [first] + [problem.make() for _ in range(problem.num_sets - 1)]
    cache = torch.cuda.get_device_properties(device).L2_cache_size or 64 << 20
    touched = min([run.gbytes * 1e9 for run in problem.runs.values() if run.gbytes] or [size_of(first)])
    num = max(2, min(MAX_SETS, math.ceil(COLD * cache / max(1, min(touched, size_of(first))))))
    # 12 GiB are enough of anyone's GPU
    num = max(1, min(num, (12 << 30) // max(1, size_of(first))))
    return [first] + [problem.make() for _ in range(num - 1)]


def time_ms(calls: list) -> list[float]:
    """Milliseconds per call, one number per replay of a graph of all calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in [*calls[:2], *calls[:1]]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    samples, start = [], time.perf_counter()
    while len(samples) < MIN_REPLAYS or (len(samples) < MAX_REPLAYS and (time.perf_counter() - start) * 1e3 < BUDGET_MS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / len(calls))
    return samples


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read plus written by the best of 9 copies of 1 GiB: a ceiling is what can be reached."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # not in a graph: its copy nodes go through the copy engines, which reach two thirds (H200: 2.8 against 4.3 TB/s)
    target.copy_(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(10)]
    for number, event in enumerate(events):
        if number:
            target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    return 2 * source.numel() / min(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / 1e6


def difference(actual, expected) -> float:
    """Relative RMS; of integers the share that differs. NaN is infinitely far."""
    actual, expected = (tensors_in(x)[0] for x in (actual, expected))
    if not expected.is_floating_point():
        return float((actual != expected).double().mean())
    far = (actual.float() - expected.float()).norm() / expected.float().norm()
    return float(far) if not far.isnan() else math.inf


def expected_of(problem: Problem, run: Run, tensors: dict):
    """What the run that this one is compared with gives; None if there is none or it cannot run here."""
    if run.like is None:
        return None
    try:
        return problem.runs[run.like].call(tensors)
    except Exception:  # a competitor that fails says so in its own row
        return None


def rows_of(case: Case, copy: float, device: torch.device) -> list[Row]:
    """Measure a case: a row per run, those that fail with the reason, then a row per target."""
    try:
        problem = case.build()
        sets = sets_of(problem, device)
    except Exception as error:  # one op that breaks must not take the others' numbers along
        return [Row(case.op, case.name, "-", note=one_line(error))]
    rows, medians = {}, {}
    for name, run in problem.runs.items():
        row = rows[name] = Row(case.op, case.name, name)
        try:
            actual = run.call(sets[0])
            if (expected := expected_of(problem, run, sets[0])) is not None:
                off = difference(actual, expected)
                if not off <= run.tolerance:
                    row.note = f"wrong: {off:.2g} away from {run.like}"
                    continue
            del actual, expected
            samples = time_ms([lambda s=s, run=run: run.call(s) for s in sets])
        except Exception as error:
            row.note = one_line(error)
            continue
        quantiles = statistics.quantiles(samples, n=5)
        row.ms, row.ms_p20, row.ms_p80 = statistics.median(samples), quantiles[0], quantiles[3]
        medians[name] = row.ms
        if run.gbytes:
            row.gb_per_s = run.gbytes / row.ms * 1e3
            row.of_copy = row.gb_per_s / copy
        if run.tflop:
            row.tflop_per_s = run.tflop / row.ms * 1e3
    others = [ms for name, ms in medians.items() if not problem.runs[name].ours]
    for name, run in problem.runs.items():
        if run.ours and name in medians and others:
            rows[name].over_best = min(others) / medians[name]
    return [*rows.values(), *(verdict(case, target, medians, copy) for target in problem.targets)]


def verdict(case: Case, target: bench_cases.Target, medians: dict[str, float], copy: float) -> Row:
    sign = ">=" if target.at_least else "<="
    row = Row(case.op, case.name, target.run, target=f"{sign} {target.bound:g} {target.figure}")
    try:
        row.figure = target.value(medians, copy)
    except (KeyError, ValueError):
        return dataclasses.replace(row, note="not measured")
    row.met = row.figure >= target.bound if target.at_least else row.figure <= target.bound
    return row


# tune -----------------------------------------------------------------------------------------------------------------


def tuned(case: Case, copy: float, device: torch.device) -> list[Row]:
    """The op's candidates on every tunable run of a case, fastest first, the pinned numbers (config None) among them."""
    try:
        candidates = importlib.import_module(f"kernels.{case.op}.triton").TUNE
        problem = case.build()
        sets = sets_of(problem, device)
    except Exception as error:
        return [Row(case.op, case.name, "-", note=one_line(error))]
    rows = []
    for name, run in problem.runs.items():
        if run.config is None:
            continue
        try:
            expected = run.call(sets[0])
        except Exception as error:
            rows.append(Row(case.op, case.name, name, note=one_line(error)))
            continue
        found = [tuned_row(case, name, run, config, sets, expected, copy) for config in [None, *candidates]]
        rows += sorted(found, key=lambda row: row.ms or math.inf)
    return rows


def tuned_row(case: Case, name: str, run: Run, config: dict | None, sets: list[dict], expected, copy: float) -> Row:
    row = Row(case.op, case.name, name, config=config)
    try:
        actual = run.config(sets[0], config)
        off = difference(actual, expected) if run.like else 0.0
        del actual
        if not off <= min(run.tolerance, 1e-2):
            return dataclasses.replace(row, note=f"wrong: {off:.2g} away from the pinned numbers")
        samples = time_ms([lambda s=s: run.config(s, config) for s in sets])
    except Exception as error:
        return dataclasses.replace(row, note=one_line(error))
    quantiles = statistics.quantiles(samples, n=5)
    row.ms, row.ms_p20, row.ms_p80 = statistics.median(samples), quantiles[0], quantiles[3]
    if run.gbytes:
        row.gb_per_s = run.gbytes / row.ms * 1e3
        row.of_copy = row.gb_per_s / copy
    if run.tflop:
        row.tflop_per_s = run.tflop / row.ms * 1e3
    return row


# report ---------------------------------------------------------------------------------------------------------------


def facts(device: torch.device, copy: float, argv: list[str]) -> dict:
    """Where the numbers come from."""
    import triton

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "copy_gb_per_s": round(copy, 1),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "git": git.stdout.strip() or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "kernels.bench", *argv]),
    }


def markdown(rows: list[Row], tune: bool = False, keep: int | None = None) -> str:
    """Runs as one table and targets as another; of tuned runs the `keep` fastest."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def line(*cells: str) -> str:
        return "| " + " | ".join(cells) + " |"

    titles = ["op", "case", "run", "ms", "p20 - p80", "GB/s", "TFLOP/s", "of copy", "config" if tune else "x best other"]
    lines = [line(*titles), "|" + "---|" * len(titles)]
    seen: dict[tuple, int] = {}
    for row in rows:
        if row.target:
            continue
        seen[row.op, row.case, row.run] = rank = seen.get((row.op, row.case, row.run), 0) + 1
        if tune and keep and rank > keep and row.config is not None:
            continue
        between = f"{row.ms_p20:.4f} - {row.ms_p80:.4f}" if row.ms is not None else ""
        last = row.note or (str(row.config or "pinned") if tune else number(row.over_best, ".2f"))
        if row.note and tune:
            last = f"{row.config or 'pinned'}: {row.note}"
        measured = [number(row.ms, ".4f"), between, number(row.gb_per_s, ".0f"), number(row.tflop_per_s, ".0f")]
        cells = [row.op, row.case, row.run, *measured, number(row.of_copy, ".2f"), last]
        lines.append(line(*(cell.replace("|", "/") for cell in cells)))
    goals = [row for row in rows if row.target]
    if goals:
        titles = ["op", "case", "run", "target", "measured", "result"]
        lines += ["", line(*titles), "|" + "---|" * len(titles)]
        for row in goals:
            result = row.note or ("met" if row.met else "missed")
            lines.append(line(row.op, row.case, row.run, row.target, number(row.figure, ".2f"), result))
    return "\n".join(lines) + "\n"


def write(path: Path, about: dict, rows: list[Row], tune: bool) -> None:
    """JSON at `path` and Markdown beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = [{key: value for key, value in dataclasses.asdict(row).items() if value is not None} for row in rows]
    path.write_text(json.dumps(about | {"rows": held}, indent=1) + "\n")
    about_lines = "\n".join(f"- {key}: {value}" for key, value in about.items())
    path.with_suffix(".md").write_text(f"# Kernels on {about['device']}\n\n{about_lines}\n\n{markdown(rows, tune)}")


def chosen(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Case]:
    every = bench_cases.cases(args.flex)
    known = list(dict.fromkeys(case.op for case in every))
    if unknown := [op for op in args.op if op not in known]:
        parser.error(f"no cases of {', '.join(unknown)}; ops: {', '.join(known)}")
    found = [case for case in every if args.all or case.op in args.op]
    if args.case:
        names = [case.name for case in found]
        found = [case for case in found if case.name in args.case]
        if unknown := [name for name in args.case if name not in names]:
            parser.error(f"no case {', '.join(map(repr, unknown))}; cases: {'; '.join(names)}")
    elif args.tune:
        found = [case for case in found if case.main]
    if not found:
        parser.error("nothing to measure: name ops with --op, or --all")
    return found


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", default=[], help="op to measure; may be repeated")
    parser.add_argument("--case", action="append", default=[], help="only cases of this name; may be repeated")
    parser.add_argument("--all", action="store_true", help="all ops")
    parser.add_argument("--json", type=Path, help="write all rows here, and Markdown beside it")
    parser.add_argument("--tune", action="store_true", help="sweep the TUNE list of each op on its main cases instead")
    parser.add_argument("--flex", action="store_true", help="also FlexAttention, which takes minutes to compile")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes that run tests")
    parser.add_argument("--logs", type=Path, default=Path("outputs/bench"), help="folder of the tests' output")
    args = parser.parse_args(argv)
    todo = chosen(args, parser)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device; `python -m pytest tests/kernels` tests the kernels on a CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    started = time.perf_counter()
    args.logs.mkdir(parents=True, exist_ok=True)
    failures = gate(list(dict.fromkeys(case.op for case in todo)), args.jobs, args.logs)
    passed = sum(failure is None for failure in failures.values())
    print(f"tests: {passed} of {len(failures)} ops pass, {time.perf_counter() - started:.0f} s", flush=True)
    copy = copy_gb_per_s(device)
    about = facts(device, copy, argv)
    rows: list[Row] = []
    for case in todo:
        if failures[case.op]:
            rows.append(Row(case.op, case.name, "-", note=f"no number: {failures[case.op]}"))
        else:
            rows += tuned(case, copy, device) if args.tune else rows_of(case, copy, device)
        torch.cuda.empty_cache()
        print(f"{case.op} {case.name}  {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        if args.json:
            # a run that is cut off keeps what it has
            write(args.json, about, rows, args.tune)
    print(f"{about['device']}, copy {copy:.0f} GB/s, torch {about['torch']}, triton {about['triton']}\n")
    print(markdown(rows, args.tune, keep=5))
    return int(any(failures.values()) or any(row.note and row.note.startswith("wrong") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
