"""Runs the cells that Hydra hands over, one after the other; a cell that fails becomes a row and the next one runs.

Used by run.py: `run_job(cfg)` for each cell, then `finish()` prints the last line of stdout and gives the exit code.
"""

import json
import shlex
import sys
import traceback
from collections import Counter
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.cell import check, run_cell
from harness.config import blank_row, cell_of, config_hash
from harness.report.card import print_table
from harness.results import Row, write_atomic

# rows of this process by config hash, and the folder of the sweep if it is one
_rows: dict[str, Row] = {}
_sweep_dirs: list[str] = []


def run_job(cfg: DictConfig) -> None:
    """Run one cell and keep its row; a cell that has run in this sweep already is skipped (the pre-flight says so)."""
    hydra = HydraConfig.get()
    if hydra.mode is RunMode.MULTIRUN:
        _sweep_dirs.append(hydra.sweep.dir)
    key = config_hash(cell_of(cfg))
    if key not in _rows:
        size = cfg.model.tp_size
        launcher = ["python"] if size == 1 else ["torchrun", "--standalone", "--nproc-per-node", str(size)]
        reproduce = shlex.join([*launcher, "run.py", *hydra.overrides.task])
        _rows[key] = _run(cfg, Path(hydra.runtime.output_dir), reproduce)


def _run(cfg: DictConfig, out_dir: Path, reproduce: str) -> Row:
    """The cell's row, written to out_dir/row.json whatever happens; a crash leaves its traceback beside it."""
    row = blank_row(cfg, reproduce)
    try:
        check(cfg)
    except ValueError as err:
        row.status, row.error = "invalid", " ".join(str(err).split())
        write_atomic(out_dir / "row.json", row.to_json())
        return row
    try:
        return run_cell(cfg, out_dir, reproduce)
    # whatever a cell raises, the sweep goes on; a ValueError is the user's mistake
    except Exception as err:
        row.status, row.error = ("invalid", str(err)) if isinstance(err, ValueError) else ("failed", repr(err))
        row.error = " ".join(row.error.split())
        write_atomic(out_dir / "traceback.txt", traceback.format_exc())
        write_atomic(out_dir / "row.json", row.to_json())
        return row


def finish() -> int:
    """Print one line of JSON, the row or the sweep's counts by status, and return the exit code.

    0: fine (in a sweep an impossible cell is an answer too); 1: a cell failed; 2: the single cell is impossible.
    """
    rows, sweep_dirs = list(_rows.values()), list(_sweep_dirs)
    _rows.clear()
    _sweep_dirs.clear()
    for row in rows:
        if row.error:
            print(f"{row.status}: {row.error}", file=sys.stderr)
    if not rows:
        return 0
    if sweep_dirs:
        print_table(rows)
        print(json.dumps({**Counter(row.status for row in rows), "sweep_dir": sweep_dirs[0]}))
        return int(any(row.status not in ("ok", "invalid") for row in rows))
    print(rows[0].to_json())
    return {"ok": 0, "invalid": 2}.get(rows[0].status, 1)
