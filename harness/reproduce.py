"""Run a row's command again and say what drifted: differing versions and code first, then every metric.

python -m harness.reproduce outputs/rows/0123456789ab.json
Exit code 0: nothing drifted beyond noise; 1: something did, or the cell failed; 2: this is no row that can be run.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from harness.report.card import print_fitted
from harness.report.rows import load
from harness.report.text import DASH, ms, number, plain, size
from harness.results import Row

ROOT = Path(__file__).resolve().parent.parent
TIME_NOISE = 0.10  # of two runs on one idle machine; a row whose own steps spread more widens it
EXACT = ("kv_full_bytes", "kv_resident_bytes", "kv_predicted_bytes", "kv_allocated_bytes", "kv_read_bytes_per_step")
PEAKS = ("peak_prefill_bytes", "peak_decode_bytes")
TIMES = ("ttft_ms", "compress_ms", "tpot_ms_p50", "tpot_ms_p95", "prefill_tokens_per_s", "decode_tokens_per_s")
QUALITY = ("accuracy", "perplexity", "top1_agreement", "kl_nats")


@dataclass(frozen=True)
class Drift:
    """One metric of both runs. verdict: same, within noise, drift, not comparable or gone (one of them lacks it)."""

    metric: str
    old: float | None
    new: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.old and self.new is not None else None


def differences(old: Row, new: Row) -> list[str]:
    """What is not the same about the two runs: device, versions, code, configuration, status."""
    found = []
    for name in sorted(old.versions.keys() | new.versions.keys()):
        pair = old.versions.get(name, DASH), new.versions.get(name, DASH)
        if pair[0] != pair[1]:
            found.append(f"{name}: {pair[0]} then, {pair[1]} now")
    for name in ("device_name", "git_commit", "code_hash", "config_hash", "decode_impl", "step_impl", "kernel_impl", "status"):
        pair = getattr(old, name), getattr(new, name)
        if pair[0] != pair[1]:
            found.append(f"{name}: {plain(pair[0])} then, {plain(pair[1])} now")
    changed = {key for key in old.knobs.keys() & new.knobs.keys() if old.knobs[key] != new.knobs[key]}
    found += [f"method.{key}: {plain(old.knobs[key])} then, {plain(new.knobs[key])} now" for key in sorted(changed)]
    if set(old.flags) != set(new.flags):
        found.append(f"flags: {' '.join(old.flags) or 'none'} then, {' '.join(new.flags) or 'none'} now")
    return found


def drifts(old: Row, new: Row) -> list[Drift]:
    """Every metric that either run knows, with a verdict.

    Bytes of the cache must be equal. Peaks may differ by 1 %, on a CPU by 10 %. Times are noise within 10 %, or within the
    spread p95 / p50 of the steps where that is wider; on another device or when flagged they are not comparable. Quality is
    noise within two standard errors where they are known, else within 1 %.
    """
    found = []
    for metric in (*EXACT, *PEAKS, *TIMES, *QUALITY):
        pair = getattr(old, metric), getattr(new, metric)
        if pair != (None, None):
            found.append(Drift(metric, *pair, _verdict(metric, old, new)))
    return found


def _verdict(metric: str, old: Row, new: Row) -> str:
    before, after = getattr(old, metric), getattr(new, metric)
    if before is None or after is None:
        return "gone"
    if before == after:
        return "same"
    if metric in EXACT:
        return "drift"
    off = abs(after / before - 1) if before else float("inf")
    if metric in PEAKS:
        # a CPU's peak is the process's resident size, which includes whatever was loaded before
        limit = 0.01 if "cuda" in new.versions else 0.1
        return "not comparable" if old.device_name != new.device_name else "within noise" if off <= limit else "drift"
    if metric in TIMES:
        flagged = {"noisy", "short_decode"} & {*old.flags, *new.flags}
        if old.device_name != new.device_name or flagged:
            return "not comparable"
        spreads = [row.tpot_ms_p95 / row.tpot_ms_p50 - 1 for row in (old, new) if row.tpot_ms_p50 and row.tpot_ms_p95]
        return "within noise" if off <= max(TIME_NOISE, *spreads, 0) else "drift"
    errors = (old.accuracy_stderr, new.accuracy_stderr)
    if metric == "accuracy" and None not in errors and any(errors):
        return "within noise" if abs(after - before) <= 2 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5 else "drift"
    return "within noise" if off <= 0.01 else "drift"


def overrides(row: Row) -> list[str]:
    """Overrides of the row's own command; ValueError where it has none."""
    try:
        words = shlex.split(row.reproduce)
    except ValueError:
        words = []
    if words[:2] != ["python", "run.py"]:
        raise ValueError(f"its command is {row.reproduce!r}, not python run.py …: this row cannot be run again")
    return words[2:]


def run_again(row: Row, folder: Path) -> Row:
    """Run the command in a process of its own; progress goes to stderr. ValueError when it gives no row."""
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        *overrides(row),
        "logger=none",
        f"hydra.run.dir={folder}",
        "hydra.mode=RUN",
    ]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    try:
        return Row(**json.loads((folder / "row.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise ValueError("the command gave no row, its message is above") from None


def table(found: list[Drift], width: int) -> RenderableType:
    lines = Table(box=SIMPLE_HEAD, width=width, padding=(0, 1), pad_edge=False)
    lines.add_column("metric", overflow="fold")
    for name in ("then", "now", "ratio", "verdict"):
        lines.add_column(name, justify="right", overflow="fold")
    styles = {"same": "green", "within noise": "green", "drift": "red", "gone": "red"}
    for one in found:
        shown = size if one.metric.endswith("_bytes") or one.metric in EXACT else ms if "_ms" in one.metric else number
        ratio = DASH if one.ratio is None else f"{one.ratio:.3f}"
        values = (one.metric, shown(one.old), shown(one.new), ratio)
        lines.add_row(*map(Text, values), Text(one.verdict, style=styles.get(one.verdict, "yellow")))
    return lines


def print_known_differences(old: Row) -> None:
    """Versions and code that differ, before the run and its minutes."""
    # imported late: torch takes seconds
    from harness.cell import code_hash, git_commit, versions

    here = {name: version for name, version in versions().items() if old.versions.get(name) != version}
    for name, version in here.items():
        print(f"differs before the run: {name} {old.versions.get(name, DASH)} then, {version} now")
    if old.code_hash and old.code_hash != code_hash():
        commit = f": `git checkout {old.git_commit.rstrip('+')}` has it" if old.git_commit else ""
        print(f"differs before the run: measuring code {old.code_hash} then, {code_hash()} now (commit {git_commit()}){commit}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.reproduce", description="Run a row's command again, report drift.")
    parser.add_argument("row", type=Path, help="a row.json, or a file of outputs/rows")
    args = parser.parse_args(argv)
    try:
        entries = load([args.row]).entries
        if len(entries) > 1:
            raise ValueError(f"{args.row} holds {len(entries)} rows: give the file of one")
        old = entries[0].row
        print(shlex.join(["python", "run.py", *overrides(old)]))
        print_known_differences(old)
        with tempfile.TemporaryDirectory() as folder:
            new = run_again(old, Path(folder) / "run")
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    for line in differences(old, new):
        print(f"differs: {line}")
    if new.status != "ok":
        print(f"{new.status}: {new.error}")
        return int(new.status != old.status)
    found = drifts(old, new)
    print_fitted(lambda width: table(found, width))
    worse = [one.metric for one in found if one.verdict in ("drift", "gone")]
    print(f"drift: {', '.join(worse)}" if worse else "no drift beyond noise")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
