"""Other launchers: Slurm through submitit (its local executor here), a Ray cluster on this machine, a search with Optuna."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import run
from harness import config, store
from harness.results import Row

ROOT = Path(run.__file__).parent
EXPERIMENTS = sorted(path.stem for path in config.CONF.glob("experiment/*.yaml"))
TINY = ["model=dummy", "model.config.num_hidden_layers=2", "shape=smoke", "task=speed", "task.num_samples=1"]
TINY += ["logger=none", "compare=false"]


@pytest.fixture
def quiet_hydra():
    config.register()
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_plan(name, tmp_path, monkeypatch, capfd):
    if name == "search":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra `search`")
    monkeypatch.chdir(tmp_path)
    words = [f"experiment={name}", "plan=only"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    assert run.cli(words) == 0
    counts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert counts["cells"] >= 1 and "impossible" not in counts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", ["slurm", "submitit_slurm"])
def test_slurm_launcher_gives_sbatch_what_it_knows(quiet_hydra, tmp_path, launcher):
    submitit = pytest.importorskip("submitit", reason="needs the extra `slurm`")
    cfg = compose("config", [f"hydra/launcher={launcher}", "hydra.mode=MULTIRUN"], return_hydra_config=True)
    params = OmegaConf.to_container(cfg.hydra.launcher, resolve=False)
    own = ("_target_", "submitit_folder", "max_num_timeout")
    params = {key: value for key, value in params.items() if key not in own}
    shared = ("name", "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "stderr_to_stdout")
    executor = submitit.AutoExecutor(folder=str(tmp_path), cluster="debug")
    executor.update_parameters(**{key if key in shared else f"slurm_{key}": value for key, value in params.items()})
    if launcher == "slurm":
        assert params["gpus_per_node"] == params["tasks_per_node"] == params["nodes"] == 1
        # Slurm must not end a cell before cell_timeout_s can give it a row
        assert params["timeout_min"] * 60 > cfg.cell_timeout_s


def cells(tmp_path, *words, **variables) -> tuple[int, dict, list[Row]]:
    """Run a sweep as its own process; exit code, last line of stdout, rows of its folder in the order of their start."""
    command = [sys.executable, str(ROOT / "run.py"), "-m", *TINY, *words]
    env = os.environ | {"TMPDIR": str(tmp_path)} | variables
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert "ok" in summary, done.stdout + done.stderr
    rows = [Row.read(path) for path in (tmp_path / summary["sweep_dir"]).glob("*/row.json")]
    assert len(list((tmp_path / store.STORE).glob("*.json"))) == len(rows)
    return done.returncode, summary, sorted(rows, key=lambda row: row.started_at)


@pytest.mark.slow
def test_submitit_runs_cells_one_at_a_time_on_one_device(tmp_path):
    """submitit's local executor starts all jobs at once: the lock of the device lets one cell measure at a time."""
    pytest.importorskip("submitit", reason="needs the extra `slurm`")
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10"]
    code, summary, rows = cells(tmp_path, "method=full,window", *launcher)
    assert (code, summary["ok"], [row.status for row in rows]) == (0, 2, ["ok", "ok"])
    logs = [path.read_text() for path in tmp_path.rglob("*_log.err")]
    assert sum("another sweep uses the device: waiting for my turn" in log for log in logs) == 1
    first, second = (datetime.fromisoformat(row.started_at) for row in rows)
    # the second process, imports and all, began when the first had ended
    assert (second - first).total_seconds() > 1


@pytest.mark.slow
def test_ray_runs_cells_that_ask_for_gpus_on_a_cluster(tmp_path):
    """A cluster with one GPU (in name: no cell of this test uses it) lets one cell run at a time."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    port, folder = "46379", tempfile.mkdtemp(prefix="ray")
    command = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--num-gpus=1", "--include-dashboard=false"]
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    script = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
    with open(tmp_path / "ray.log", "w") as log:
        head = subprocess.Popen([*script, *command, f"--temp-dir={folder}"], env=env, stdout=log, stderr=log)
        try:
            for _ in range(120):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                    break
                time.sleep(1)
            launcher = ["hydra/launcher=ray", f"hydra.launcher.address='127.0.0.1:{port}'"]
            code, summary, rows = cells(tmp_path, "method=full,window", *launcher, RAY_AUTH_MODE="disabled")
        finally:
            head.terminate()
            head.wait(30)
            shutil.rmtree(folder, ignore_errors=True)
    assert (code, summary["ok"], {row.method for row in rows}) == (0, 2, {"full", "window"})


def test_optuna_maximises_accuracy_within_the_bytes(sweeps, capfd):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra `search`")
    # the stand-in says 0.75 accuracy in 20 % of the bytes, whatever the settings
    words = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    assert sweeps.cli(*words, "method=window,streaming_llm", "kv_budget=0.25") == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    best = OmegaConf.load(Path(summary["sweep_dir"]) / "optimization_results.yaml")
    assert best.best_value == 0.75
    # trials that repeat a cell take its row
    assert len(sweeps.ran()) == len(set(sweeps.ran())) <= 2
