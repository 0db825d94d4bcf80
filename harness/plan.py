"""What a command would run, before any weights are loaded: `python run.py -m ... plan=only` prints it and stops.

Every cell has a state: run, done (its row is in the store), failed (a failure of the same code is), stale (a row of other code,
versions or device is: runs again), impossible (with the reason), too_big (its cache alone does not fit the device).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import models, store
from harness.cell import check, identify
from harness.config import Request, blank_row, choice_of
from harness.report.listing import load_rows, show_bytes, show_seconds
from harness.results import Row

# states that need the device
RUNNING = ("run", "stale")


@dataclass
class PlannedCell:
    """One cell, its row as far as it is known (config_hash, sizes), and what will happen to it."""

    row: Row
    label: str
    cfg: DictConfig
    state: str = "run"
    why: str = ""
    predicted_bytes: int | None = None
    estimate_s: float | None = None


@dataclass
class Plan:
    cells: list[PlannedCell]
    request: Request
    # labels of cells that were asked for twice, each with the one that it equals
    dropped: list[tuple[str, str]]

    @property
    def only(self) -> bool:
        return self.cells[0].cfg.plan == "only"

    def start(self, main: Callable[[], None]) -> int:
        """Run it through Hydra's main; the exit code."""
        # imported late: harness.sweep imports this module
        from harness import sweep

        return sweep.start(self, main)

    def counts(self) -> dict:
        """Number of cells by state, and the estimated seconds of those that run; None when a cell has nothing to go by."""
        counts = Counter(cell.state for cell in self.cells)
        times = [cell.estimate_s for cell in self.cells if cell.state in RUNNING]
        total = None if None in times else round(sum(times))
        return {"cells": len(self.cells), **counts, "duplicates": len(self.dropped), "estimated_s": total}


def make_plan(request: Request) -> Plan:
    """Look at every cell's model config, method plan and stored row."""
    asked = [overrides for _, overrides in request.cells.values()]
    asked += [overrides for pair in request.duplicates for overrides in pair]
    labels = label_cells(asked)
    stored = load_rows(store.STORE) if request.multirun and store.STORE.is_dir() else []
    earlier = [row for row in stored if row.status == "ok" and row.duration_s]
    cells = []
    for (cfg, _), label in zip(request.cells.values(), labels, strict=False):
        cell = PlannedCell(blank_row(cfg, ""), label or f"method={choice_of(cfg.method)}", cfg)
        cells.append(cell)
        try:
            cell.predicted_bytes = check(cfg).resident_bytes
            identify(cell.row, cfg)
        except ValueError as err:
            cell.state, cell.why = "impossible", " ".join(str(err).split())
            continue
        cell.state, cell.why = "run", ""
        if reason := too_big(cfg, cell.predicted_bytes):
            cell.state, cell.why = "too_big", reason
        elif row := store.read(cell.row.config_hash):
            cell.state, cell.why = state_of(row, cell.row, cfg.rerun)
        cell.estimate_s = estimate(cell.row, earlier)
    pairs = iter(labels[len(cells) :])
    return Plan(cells, request, list(zip(pairs, pairs, strict=True)))


def state_of(stored: Row, like: Row, rerun: str) -> tuple[str, str]:
    """State of a cell with a stored row, and why. like: what a row of now would hold."""
    if reason := store.why_stale(stored, like):
        return "stale", reason
    if rerun == "all" or rerun == "failed" and stored.status != "ok":
        return "run", f"again: was {stored.status}"
    if stored.status != "ok":
        return "failed", f"{stored.status}: {stored.error}; rerun=failed runs it again"
    return "done", f"measured {stored.started_at[:16]}"


def too_big(cfg: DictConfig, predicted_bytes: int) -> str | None:
    """Why the cache alone cannot fit the GPU, None if it may; a CPU would swap, so nothing is too big for it."""
    device = torch.device(models.pick_device(cfg.model.device))
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    if predicted_bytes <= total:
        return None
    return f"its cache of {show_bytes(predicted_bytes)} does not fit {show_bytes(total)}"


def estimate(row: Row, earlier: list[Row]) -> float | None:
    """Seconds from the most similar earlier row, scaled by the tokens in the batch; None when model or device are new."""
    like = [one for one in earlier if (one.model, one.device_name, one.task) == (row.model, row.device_name, row.task)]
    if not like:
        return None

    def distance(one: Row) -> tuple:
        sizes = abs(one.context_len * one.batch_size - row.context_len * row.batch_size), abs(one.seed - row.seed)
        return one.method != row.method, *sizes

    nearest = min(like, key=distance)
    return nearest.duration_s * (row.context_len * row.batch_size) / (nearest.context_len * nearest.batch_size)


def print_plan(plan: Plan) -> None:
    """The plan as a table on stdout, with the counts as JSON in the last line."""
    lines = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    lines.add_column("cell", overflow="fold")
    for name in ("KV predicted", "time"):
        lines.add_column(name, justify="right", no_wrap=True)
    lines.add_column("state", overflow="fold")
    for cell in plan.cells:
        size = "" if cell.predicted_bytes is None else show_bytes(cell.predicted_bytes)
        time = show_seconds(cell.estimate_s) if cell.state in RUNNING else ""
        lines.add_row(Text(cell.label), size, time, Text(f"{cell.state}{f': {cell.why}' if cell.why else ''}"))
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    console.print(lines)
    for label, same in plan.dropped:
        print(f"dropped: {label} is the same cell as {same}")
    if plan.request.num_trials:
        print(f"a search: {plan.request.num_trials} cells, chosen as it goes; the one above is an example")
    if plan.request.remote:
        print("states and times are those of this machine; the workers look again")
    print(json.dumps(plan.counts()), flush=True)


def label_cells(cells: list[list[str]]) -> list[str]:
    """Each cell by those of its overrides that differ between the cells."""
    seen: dict[str, set[str]] = {}
    for overrides in cells:
        for word in overrides:
            key, _, value = word.partition("=")
            seen.setdefault(key, set()).add(value)
    return [" ".join(word for word in overrides if len(seen[word.partition("=")[0]]) > 1) for overrides in cells]
