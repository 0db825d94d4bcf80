"""Runs cells and counts them: a cell that fails in whatever way becomes a row, and the next one runs.

One cell runs in this process (`run_job`). A cell of a sweep gets a process of its own (`run_isolated`) under any launcher: it
can crash, hang or eat the memory and the sweep goes on. `finish` prints the last line of stdout and gives the exit code.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness import models, store
from harness.cell import check, identify, run_cell
from harness.config import ConfigError, blank_row, cell_of, config_hash, family_hash
from harness.neighbours import Watch
from harness.plan import Plan, print_plan, state_of, too_big
from harness.report.card import print_table
from harness.report.listing import load_rows
from harness.results import Row, write_atomic

ROOT = Path(__file__).resolve().parent.parent
# after the stack has been asked for, before the process is killed
GRACE_S = 5
TRACEBACK_LINES = 200

# rows of single cells in this process, the folder of the sweep if it is one, and rows that ran out of memory by family
_rows: dict[str, Row] = {}
_sweep_dirs: list[Path] = []
_out_of_memory: dict[str, list[Row]] = {}


class SweepFolder(Callback):
    """Hydra calls it where the sweep was started, whatever launcher runs the cells: remembers the sweep's folder."""

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        # a folder that cannot be made is reported where the sweep starts
        with contextlib.suppress(OSError, OmegaConfBaseException):
            _sweep_dirs.append(Path(config.hydra.sweep.dir))


def start(plan: Plan, main: Callable[[], None]) -> int:
    """Print the plan of a sweep, let Hydra run it, count the rows; the exit code, see `finish`."""
    if plan.request.multirun or plan.only:
        print_plan(plan)
    if plan.only:
        return 0
    sys.argv[1:] = plan.request.argv
    # for the processes of cells, and of a launcher's workers
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        main()
    except KeyboardInterrupt:
        if not plan.request.multirun:
            raise
        print("interrupted: finished cells are kept, the same command goes on with the others", file=sys.stderr)
        return 130
    except (ConfigError, OSError, OmegaConfBaseException):
        raise
    # a launcher that gives up has rows to show all the same
    except Exception as err:
        if not plan.request.multirun:
            raise
        print(f"error: the launcher gave up: {' '.join(repr(err).split())[:500]}", file=sys.stderr)
    return finish(plan)


def run_job(cfg: DictConfig) -> float:
    """Run one cell, in a sweep in a process of its own; returns what a search maximises."""
    hydra = HydraConfig.get()
    out_dir, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
    if hydra.mode is RunMode.MULTIRUN:
        return objective(cfg, run_isolated(cfg, overrides, out_dir, Path(hydra.sweep.dir), Path(hydra.runtime.cwd)))
    if "hydra.mode=RUN" in hydra.overrides.hydra:
        overrides = _alone(overrides)
    size = cfg.model.tp_size
    launcher = ["python"] if size == 1 else ["torchrun", "--standalone", "--nproc-per-node", str(size)]
    row = _rows[config_hash(cell_of(cfg))] = _run(cfg, out_dir, shlex.join([*launcher, "run.py", *overrides]))
    return objective(cfg, row)


def objective(cfg: DictConfig, row: Row) -> float:
    """Accuracy, or minus the KL to full; -1e9 for a cell without a result or above kv_budget."""
    score = row.accuracy if row.accuracy is not None else None if row.kl_nats is None else -row.kl_nats
    above = cfg.kv_budget is not None and (row.kv_kept_ratio or 0) > cfg.kv_budget
    return -1e9 if row.status != "ok" or score is None or above else score


def _alone(overrides: list[str]) -> list[str]:
    """Overrides that give one cell of a sweep again, also where the experiment asks for a sweep."""
    return overrides + ["hydra.mode=RUN"] * any(word.startswith("experiment=") for word in overrides)


def _run(cfg: DictConfig, out_dir: Path, reproduce: str) -> Row:
    """The cell's row, written to out_dir/row.json and the store; a crash leaves its traceback beside it."""
    row = blank_row(cfg, reproduce)
    try:
        check(cfg)
    except ValueError as err:
        return _write(_ended(row, "invalid", err), out_dir)
    watch = Watch(torch.device(models.pick_device(cfg.model.device)))
    try:
        row = run_cell(cfg, out_dir, reproduce)
    # whatever a cell raises, the sweep goes on; a ValueError is the user's mistake
    except Exception as err:
        out_of_memory = isinstance(err, MemoryError | torch.OutOfMemoryError)
        mistake = type(err) is ValueError  # not a subclass such as UnicodeError
        status = "invalid" if mistake else "oom_prefill" if out_of_memory else "failed"
        _ended(identify(row, cfg), status, err if mistake else repr(err))
        write_atomic(out_dir / "traceback.txt", traceback.format_exc())
    if who := watch.who():
        row.flags.append("shared_device")
        row.shared_with = who
        print(f"note: shared device: {who}", file=sys.stderr)
    row.duration_s = time.time() - psutil.Process().create_time()
    store.keep(row)
    return _write(row, out_dir)


def _ended(row: Row, status: str, why: Exception | str) -> Row:
    row.status, row.error = status, " ".join(str(why).split())[:500]
    return row


def _write(row: Row, out_dir: Path) -> Row:
    write_atomic(out_dir / "row.json", row.to_json())
    return row


def run_isolated(cfg: DictConfig, overrides: list[str], out_dir: Path, sweep_dir: Path, cwd: Path) -> Row:
    """The row of one cell of a sweep, from the store or from a process of its own; also in out_dir/row.json.

    Two sweeps never run one cell at once: the second waits and takes over the row. Cells on one device take turns.

    Args:
        overrides: those of the cell; cwd: the folder that the sweep was started in, its store is below.
    """
    row = blank_row(cfg, shlex.join(["python", "run.py", *_alone(overrides)]))
    try:
        plan = check(cfg)
        identify(row, cfg)
    except ValueError as err:
        return _write(_ended(row, "invalid", err), out_dir)
    if reason := pruned(cfg, row) or too_big(cfg, plan.resident_bytes):
        status = _smaller(cfg, row)[0].status if _smaller(cfg, row) else "oom_prefill"
        row.flags.append("pruned")
        return _write(_ended(row, status, f"pruned: {reason}"), out_dir)
    locks = cwd / store.STORE / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with _hold(locks / row.config_hash, f"another sweep is at {row.method} {row.config_hash}: waiting for its row"):
        done = _reusable(cfg, row, cwd, _started(cwd / sweep_dir))
        if done is None:
            with _hold(_device_lock(cfg), "another sweep uses the device: waiting for my turn"):
                done = _spawn(cfg, row, overrides, out_dir, sweep_dir, cwd)
        else:
            samples = store.row_path(row.config_hash, cwd).with_suffix(".samples.jsonl")
            if samples.exists():
                out_dir.mkdir(parents=True, exist_ok=True)
                shutil.copy(samples, out_dir / "samples.jsonl")
            _write(done, out_dir)
    if done.status.startswith("oom") and "shared_device" not in done.flags:
        _out_of_memory.setdefault(family_hash(cell_of(cfg)), []).append(done)
    return done


def _smaller(cfg: DictConfig, row: Row) -> list[Row]:
    """Rows of the same method and settings, no larger in context and batch, that ran out of memory in this sweep."""
    rows = _out_of_memory.get(family_hash(cell_of(cfg)), [])
    return [one for one in rows if one.context_len <= row.context_len and one.batch_size <= row.batch_size]


def pruned(cfg: DictConfig, row: Row) -> str | None:
    """Why this cell need not run, None if it must."""
    if not (smaller := _smaller(cfg, row)) or smaller[0].config_hash == row.config_hash:
        return None
    return f"out of memory already at context_len={smaller[0].context_len}, batch_size={smaller[0].batch_size}"


def _reusable(cfg: DictConfig, row: Row, cwd: Path, since: float) -> Row | None:
    """The stored row that stands for this cell, None if it has to run. A row of this very sweep stands whatever rerun says."""
    stored = store.read(row.config_hash, cwd)
    if stored is None or store.why_stale(stored, row):
        return None
    if stored.status == "ok" and cfg.compare and row.method != "full" and cfg.task.get("num_scored") and stored.kl_nats is None:
        return None  # measured with compare=false
    fresh = datetime.fromisoformat(stored.started_at).timestamp() >= since
    return stored if fresh or state_of(stored, row, cfg.rerun)[0] != "run" else None


def _started(sweep_dir: Path) -> float:
    """When the sweep began: Hydra writes multirun.yaml first."""
    marker = sweep_dir / "multirun.yaml"
    return marker.stat().st_mtime if marker.exists() else float("inf")


@contextlib.contextmanager
def _hold(path: Path, waiting: str):
    """A lock that goes with its process, also by kill -9."""
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"note: {waiting}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _device_lock(cfg: DictConfig) -> Path:
    """One file per user and device of this machine."""
    device = torch.device(models.pick_device(cfg.model.device))
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    name = "cpu" if device.type == "cpu" else f"gpu-{visible[index] if index < len(visible) else index}"
    return Path(tempfile.gettempdir()) / f"kvgauge-{os.getuid()}-{name}"


def child_command(overrides: list[str], out_dir: Path) -> list[str]:
    """What runs one cell in a process of its own."""
    folder = str(out_dir).replace("\\", "\\\\").replace("'", "\\'")
    own = [f"hydra.run.dir='{folder}'", "hydra.mode=RUN"]
    # on a signal faulthandler prints where every thread stands
    return [sys.executable, "-X", "faulthandler", "-m", "harness.child", *overrides, *own]


def _spawn(cfg: DictConfig, row: Row, overrides: list[str], out_dir: Path, sweep_dir: Path, cwd: Path) -> Row:
    """Run the cell in a process and return its row; one is made up for a process that ends without."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in ("row.json", "traceback.txt"):
        (out_dir / name).unlink(missing_ok=True)
    started, kills, timed_out = time.monotonic(), _oom_kills(), False
    env = os.environ | {"KVGAUGE_PARENT": str(os.getpid())}
    # cells of one sweep are one group in W&B, as far as the user has not named one
    env.setdefault("WANDB_RUN_GROUP", "_".join(sweep_dir.parts[-2:])[:128])
    with open(out_dir / "log.txt", "wb") as log:
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        child = subprocess.Popen(child_command(overrides, out_dir), cwd=cwd, env=env, **options)
        try:
            child.wait(cfg.cell_timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            _signal(child, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        finally:
            # also what the cell has started, and also when this process is interrupted
            _signal(child, signal.SIGKILL)
            child.wait()
    if (out_dir / "row.json").exists():
        return Row.read(out_dir / "row.json")
    tail = (out_dir / "log.txt").read_text(errors="replace").splitlines()[-TRACEBACK_LINES:]
    if not (out_dir / "traceback.txt").exists():
        write_atomic(out_dir / "traceback.txt", "\n".join(tail) + "\n")
    if timed_out:
        _ended(row, "timeout", f"still running after {cfg.cell_timeout_s:g} s (cell_timeout_s); traceback.txt says where")
    elif child.returncode == -signal.SIGKILL and _oom_kills() > kills:
        _ended(row, "oom_prefill", "killed by the kernel because memory ran out, in which phase is not known")
    elif child.returncode < 0:
        _ended(row, "failed", f"killed by {signal.Signals(-child.returncode).name}")
    else:
        last = next((line for line in reversed(tail) if line.strip()), "no output")
        _ended(row, "failed", f"exit code {child.returncode} without a row: {last}")
    row.duration_s = time.monotonic() - started
    store.keep(row, cwd)
    return _write(row, out_dir)


def _signal(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _oom_kills() -> int:
    """How often the kernel has killed for memory in this control group; 0 where that is not known."""
    try:
        words = Path("/sys/fs/cgroup/memory.events").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0


def violations(row: Row, thresholds: DictConfig) -> list[str]:
    """One line for each threshold that a finished row does not reach; a value that is not known reaches none."""
    if row.status != "ok":
        return []
    error = None
    if row.kv_predicted_bytes and row.kv_resident_bytes is not None:
        error = abs(row.kv_resident_bytes / row.kv_predicted_bytes - 1)
    values = {
        "min_accuracy": row.accuracy,
        "max_kept_ratio": row.kv_kept_ratio,
        "max_prediction_error": error,
        "max_bound_ratio": row.bound_ratio,
    }
    lines = []
    for scope in ("all", row.method):
        for name, limit in (thresholds.get(scope) or {}).items():
            value = values[name]
            if limit is None or value is not None and (value >= limit if name.startswith("min") else value <= limit):
                continue
            shown = "unknown" if value is None else f"{value:.4g}"
            lines.append(f"threshold: {row.method} {row.config_hash}: {name}={limit:g}, measured {shown}")
    return lines


def finish(plan: Plan) -> int:
    """Print one line of JSON, the row or the sweep's counts by status, and return the exit code.

    0: fine (in a sweep a cell that the plan calls impossible is an answer too); 1: a cell failed, turned out invalid only when
    it ran, or misses a threshold; 2: the single cell is impossible.
    """
    rows, sweep_dirs = list(_rows.values()), list(_sweep_dirs)
    for memory in (_rows, _sweep_dirs, _out_of_memory):
        memory.clear()
    if sweep_dirs:
        rows = _rows_of_sweep(plan, sweep_dirs[0])
    for row in rows:
        if row.error:
            print(f"{row.status}: {row.error}", file=sys.stderr)
    thresholds = plan.cells[0].cfg.thresholds
    broken = [line for row in rows for line in violations(row, thresholds)]
    for line in broken:
        print(line, file=sys.stderr)
    if not rows:
        return 0
    if sweep_dirs:
        print_table(rows)
        reused = sum(bool(row.started_at) and _before(row, sweep_dirs[0]) for row in rows)
        counts = Counter(row.status for row in rows) | ({"reused": reused} if reused else {})
        print(json.dumps({**counts, "sweep_dir": str(sweep_dirs[0])}))
        impossible = {cell.row.config_hash for cell in plan.cells if cell.state == "impossible"}
        fine = [row.status == "ok" or row.status == "invalid" and row.config_hash in impossible for row in rows]
        return int(bool(broken) or not all(fine))
    print(rows[0].to_json())
    return {"ok": int(bool(broken)), "invalid": 2}.get(rows[0].status, 1)


def _before(row: Row, sweep_dir: Path) -> bool:
    return datetime.fromisoformat(row.started_at).timestamp() < _started(sweep_dir)


def _rows_of_sweep(plan: Plan, sweep_dir: Path) -> list[Row]:
    """Rows of the sweep's cells in the order of the plan; a cell whose worker vanished without a row is a failure."""
    newest = {row.config_hash: row for row in load_rows(sweep_dir)}
    if plan.request.num_trials:
        return list(newest.values())
    rows = []
    for cell in plan.cells:
        lost = _ended(cell.row, "failed", f"no row came back from the worker: see the logs in {sweep_dir}")
        lost.started_at = datetime.now(UTC).isoformat()
        rows.append(newest.get(cell.row.config_hash, lost))
    return rows
