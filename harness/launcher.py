"""How Hydra starts the cells of a sweep: one after the other on this machine, or spread over a Ray cluster.

hydra/launcher=process (the default with -m) | ray | slurm. Each cell is a process of its own, see harness/sweep.py:
about 6 s of imports before the model loads. Hydra takes plugins only from the package hydra_plugins: the two classes are there.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.config import ConfigError, blank_row, cell_of, config_hash
from harness.plan import label_cells
from harness.report.listing import show_seconds
from harness.results import Row, write_atomic
from harness.sweep import objective, run_isolated


@dataclass
class Job:
    """One cell of a sweep: its overrides, its configuration and where its row goes."""

    overrides: list[str]
    cfg: DictConfig
    out_dir: Path
    sweep_dir: Path

    @property
    def key(self) -> str:
        return config_hash(cell_of(self.cfg))


def prepare(context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> list[Job]:
    """Compose every cell; nothing is written."""
    setup_globals()
    jobs = []
    for number, overrides in enumerate(job_overrides, first):
        cfg = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
        sweep_dir = Path(cfg.hydra.sweep.dir).absolute()
        out_dir = sweep_dir / cfg.hydra.sweep.subdir
        tasks = list(cfg.hydra.overrides.task)
        with open_dict(cfg):
            del cfg["hydra"]
        jobs.append(Job(tasks, cfg, out_dir, sweep_dir))
    return jobs


def launch(jobs: list[Job], run: Callable[[list[Job]], Iterator[tuple[Job, Row | None]]]) -> list[JobReturn]:
    """Run every different cell once, small ones first, with a display; the returns stand in the order of `jobs`.

    Args:
        run: yields each job with its row when it has ended, and with None when it begins where that is known.
    """
    different: dict[str, Job] = {}
    for job in jobs:
        different.setdefault(job.key, job)
    # small ones first: running out of memory prunes larger cells of the same method
    ordered = sorted(different.values(), key=lambda job: (job.cfg.shape.context_len, job.cfg.shape.batch_size))
    rows = {}
    labels = dict(zip(different, label_cells([job.overrides for job in different.values()]), strict=True))
    with Display(len(ordered)) as display:
        for job, row in run(ordered):
            if row is None:
                display.began(labels[job.key])
            else:
                rows[job.key] = row
                display.done(labels[job.key] or row.method, row)
    returns = []
    for job in jobs:
        done = JobReturn(overrides=job.overrides, cfg=job.cfg, status=JobStatus.COMPLETED)
        done.return_value = objective(job.cfg, rows[job.key])
        returns.append(done)
    return returns


def one_after_the_other(jobs: list[Job]) -> Iterator[tuple[Job, Row | None]]:
    for job in jobs:
        yield job, None
        yield job, run_isolated(job.cfg, job.overrides, job.out_dir, job.sweep_dir, Path.cwd())


def on_ray(jobs: list[Job], address: str | None, num_gpus: float, num_cpus: float) -> Iterator[tuple[Job, Row]]:
    """Every cell is a Ray task that asks for its GPUs; folder and store are on a file system that all nodes share."""
    try:
        import ray
    except ImportError:
        raise ConfigError("hydra/launcher=ray needs the package ray: pip install -c constraints.txt -e '.[ray]'") from None
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(address=address, runtime_env={"env_vars": variables}, log_to_driver=False, ignore_reinit_error=True)
    try:
        remote = ray.remote(num_gpus=num_gpus, num_cpus=num_cpus, max_retries=0)(run_isolated)
        waiting = {remote.remote(job.cfg, job.overrides, job.out_dir, job.sweep_dir, Path.cwd()): job for job in jobs}
        while waiting:
            (ref,), _ = ray.wait(list(waiting))
            job = waiting.pop(ref)
            try:
                yield job, ray.get(ref)
            # a node that is lost or refuses costs its cell, not the sweep
            except ray.exceptions.RayError as err:
                row = blank_row(job.cfg, "")
                row.error = f"ray: {' '.join(str(err).split())[-300:]}"
                write_atomic(job.out_dir / "row.json", row.to_json())
                yield job, row
    finally:
        ray.shutdown()


class Display:
    """Bar on a terminal's stderr, one line per finished cell anywhere."""

    def __init__(self, total: int):
        self.total, self.finished, self.started, self.left = total, 0, time.monotonic(), ""
        self.console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def __enter__(self) -> "Display":
        self.bar.start()
        self.task = self.bar.add_task("cells", total=self.total)
        return self

    def __exit__(self, *exc) -> None:
        self.bar.stop()

    def began(self, label: str) -> None:
        self.bar.update(self.task, description=f"{label}{self.left}")

    def done(self, label: str, row: Row) -> None:
        self.finished += 1
        seconds = (self.total - self.finished) * (time.monotonic() - self.started) / self.finished
        self.left = f", {show_seconds(seconds)} left"
        self.bar.update(self.task, advance=1, description=f"cells{self.left}")
        size = "" if row.kv_kept_ratio is None else f", KV {100 * row.kv_kept_ratio:.1f} %"
        accuracy = "" if row.accuracy is None else f", accuracy {row.accuracy:.3f}"
        why = f": {row.error}" if row.error else f"{size}{accuracy}"
        self.console.print(f"[{self.finished}/{self.total}] {row.status} {label}{why}")
