"""A sweep as a user starts it, with real processes for its cells, but ones that start in no time: they do not import torch."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

import run
from harness import sweep
from harness.results import Row

# what stands in for harness.child: notes that it ran, then ends as its fate says
CHILD = textwrap.dedent(
    """
    import faulthandler, json, os, pathlib, signal, sys, time
    from datetime import UTC, datetime
    faulthandler.enable()
    folder, fate = pathlib.Path(sys.argv[1]), sys.argv[2]
    row = json.loads((folder / "template.json").read_text())
    row["started_at"] = datetime.now(UTC).isoformat()
    with open("ran.txt", "a") as file:
        file.write(f"{row['method']} {row['sparsity']} {row['context_len']}\\n")
    if fate in ("segfault", "killed"):
        os.kill(os.getpid(), signal.SIGSEGV if fate == "segfault" else signal.SIGKILL)
    if fate == "exit":
        sys.exit("the driver is too old")
    if fate == "hang":
        time.sleep(600)
    if fate == "slow":
        time.sleep(1)
    row["status"] = fate if fate in ("nan", "oom_prefill", "oom_decode", "invalid") else "ok"
    row |= {"kv_resident_bytes": 200, "kv_predicted_bytes": 200, "kv_kept_ratio": 0.2, "accuracy": 0.75, "duration_s": 2.0}
    for target in (folder / "row.json", pathlib.Path("outputs/rows") / (row["config_hash"] + ".json")):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_text(json.dumps(row))
        os.replace(part, target)
    """
)
SMALL = ["model=dummy", "shape=smoke", "task=speed", "task.num_samples=1", "logger=none"]


class Sweeps:
    """Runs `run.py -m ...` in this process, or forked; `fates` are given per method or per `method context_len`."""

    def __init__(self, folder: Path):
        self.folder, self.fates = folder, {}

    def child_command(self, overrides, out_dir):
        row = json.loads((out_dir / "template.json").read_text())
        fate = self.fates.get(f"{row['method']} {row['context_len']}", self.fates.get(row["method"], "ok"))
        return [sys.executable, "-S", "-c", CHILD, str(out_dir), fate]

    def cli(self, *arguments) -> int:
        words = ["-m", *arguments, *SMALL]
        sys.argv = ["run.py", *words]
        return run.cli(words)

    def fork(self, *arguments) -> multiprocessing.Process:
        """The sweep as a process with an identity of its own, as a shell would start it."""

        def target():
            os.setsid()
            # a test run in the background ignores it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(self.folder / f"sweep-{os.getpid()}.log", os.O_CREAT | os.O_WRONLY)
            sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
            code = self.cli(*arguments)
            sys.stdout.flush()
            os._exit(code)

        process = multiprocessing.get_context("fork").Process(target=target)
        process.start()
        return process

    def ran(self) -> list[str]:
        """The cells that have really run, in order."""
        file = self.folder / "ran.txt"
        return file.read_text().splitlines() if file.exists() else []

    def rows(self, sweep_dir) -> list[tuple[Path, Row]]:
        """Files and rows of a sweep."""
        return [(file, Row.read(file)) for file in (self.folder / sweep_dir).glob("*/row.json")]


@pytest.fixture
def sweeps(tmp_path, monkeypatch) -> Sweeps:
    monkeypatch.chdir(tmp_path)
    # locks of the device: other tests on this machine have their own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    made, spawn = Sweeps(tmp_path), sweep._spawn

    def spawn_with_template(cfg, row, overrides, out_dir, *rest):
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "template.json").write_text(row.to_json())
        return spawn(cfg, row, overrides, out_dir, *rest)

    monkeypatch.setattr(sweep, "_spawn", spawn_with_template)
    monkeypatch.setattr(sweep, "child_command", made.child_command)
    return made
