"""Weights & Biases: one run per cell, written from the finished row. The only module that knows W&B.

row.json stays the truth: whatever happens here, the row is valid and the cell goes on. Offline unless an API key is
there; upload later with `wandb sync outputs/<date>/<time>/wandb/offline-run-*`.
"""

import json
import os
import re
import sys
from pathlib import Path

from omegaconf import DictConfig

from harness.config import LoggerConf, cell_of
from harness.results import Row

SAMPLE_METRICS = ("score", "output_len", "nll_nats")  # numbers of a line of samples.jsonl that are worth a curve


def log_run(cfg: DictConfig, row: Row, samples: list[dict], out_dir: Path, conf: LoggerConf) -> None:
    """Log one cell: config = the resolved cell, summary = all columns of the row, table = one line per sample.

    Never raises, never prompts, prints nothing on stdout; a failure is one line on stderr.
    """
    if conf.name != "wandb":
        return
    try:
        _log(cell_of(cfg), row, samples, out_dir, conf)
    # a row must not be lost to its logger, whatever that raises
    except Exception as err:
        _warn(f"this cell is not in W&B, only in row.json: {err}")


def run_id(row: Row) -> str:
    """Config hash and start time, in characters that W&B allows: unique also offline and in a sweep."""
    return f"{row.config_hash}-{re.sub('[^0-9A-Za-z]', '', row.started_at)}"[:64]


def _log(cell: dict, row: Row, samples: list[dict], out_dir: Path, conf: LoggerConf) -> None:
    # imported late: half a second that logger=none need not pay
    import wandb

    # the time-outs keep a server that is down from holding up the sweep; what was not sent stays in out_dir
    wandb.setup(wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=30, finish_timeout=60))
    options = {
        "id": run_id(row),
        "name": f"{row.method} {row.task} {row.context_len}",
        "project": conf.project,
        # None: W&B takes WANDB_RUN_GROUP, which a sweep sets for its cells
        "group": conf.group,
        "job_type": row.task,
        # W&B takes tags of 1 to 64 characters
        "tags": [tag[:64] for tag in dict.fromkeys([row.method, row.model, row.status, *row.flags]) if tag],
        "config": cell,
        "dir": str(out_dir),
    }
    try:
        run = wandb.init(mode=_mode(wandb), **options)
    except wandb.Error as err:
        _warn(f"W&B does not accept this run, logging offline: {err}")
        run = wandb.init(mode="offline", **options)
    if not run.disabled and not Path(run.dir).resolve().is_relative_to(out_dir.resolve()):
        _warn(f"{out_dir} cannot be written, W&B uses {run.dir}")
    try:
        run.summary.update(row.to_dict())
        _log_ledger(run, wandb, row)
        if samples:
            _log_samples(run, samples)
            columns = list(dict.fromkeys(key for sample in samples for key in sample))
            lines = [[_plain(sample.get(key)) for key in columns] for sample in samples]
            run.log({"samples": wandb.Table(columns=columns, data=lines, allow_mixed_types=True)})
    finally:
        run.finish(exit_code=0 if row.status == "ok" else 1)


def _log_ledger(run, wandb, row: Row) -> None:
    """The memory ledger as a native bar chart of this run; across runs the dashboard draws kv_ledger.* of the summary."""
    if row.kv_ledger:
        table = wandb.Table(columns=["kind", "bytes"], data=[[kind, size] for kind, size in row.kv_ledger.items()])
        run.log({"kv_ledger_chart": wandb.plot.bar(table, "kind", "bytes", title="KV bytes held, by kind")})


def _log_samples(run, samples: list[dict]) -> None:
    """One step per sample: its numbers, and the mean score so far, which shows how many samples the accuracy needs."""
    run.define_metric("sample/index", hidden=True)
    for name in SAMPLE_METRICS:
        run.define_metric(f"sample/{name}", step_metric="sample/index", summary="mean")
    run.define_metric("sample/mean_score", step_metric="sample/index")
    total = 0.0
    for index, sample in enumerate(samples):
        step = {f"sample/{name}": sample[name] for name in SAMPLE_METRICS if isinstance(sample.get(name), int | float)}
        if "sample/score" in step:
            total += step["sample/score"]
            step["sample/mean_score"] = total / (index + 1)
        if step:
            run.log({"sample/index": index, **step})


def _mode(wandb) -> str:
    """WANDB_MODE or the user's W&B settings, but online only where a key is stored: W&B would ask for one."""
    mode = wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False):
        if os.environ.get("WANDB_MODE") == "online":
            _warn("WANDB_MODE=online but there is no API key, logging offline: run `wandb login` first")
        return "offline"
    return mode


def _plain(value):
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, default=str)


def _warn(message: str) -> None:
    print("warning: " + " ".join(message.split())[:300], file=sys.stderr)
