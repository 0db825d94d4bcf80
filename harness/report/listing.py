"""Rows of any folder: list, show, export.

    python -m harness.results ls outputs                      one line per row
    python -m harness.results show 4f0a                       the card of every row whose config hash starts so, or of a file
    python -m harness.results export --to csv > rows.csv      csv or parquet; --out FILE instead of stdout

A folder is read with all below it: row.json, <config hash>.json of the store, and .jsonl files of rows. A row that stands in
two places counts once. What is no row is left alone; files of other versions load, fields that are unknown here are named.
"""

import argparse
import csv
import dataclasses
import json
import re
import sys
import typing
from pathlib import Path

from harness.nearest import did_you_mean
from harness.report.card import print_card
from harness.report.rows import task_of
from harness.report.text import size as show_bytes
from harness.results import Row

COLUMNS = ("config_hash", "status", "method", "model", "task", "context_len", "batch_size", "sparsity")
FORMATS = ("csv", "parquet")


def load_rows(*places: str | Path) -> list[Row]:
    """Rows of folders and files, oldest first. Raises ValueError for a place that does not exist or a file without rows."""
    found: dict[tuple, Row] = {}
    for place in map(Path, places):
        if place.is_dir():
            files = sorted(path for path in place.rglob("*.json*") if path.is_file() and _may_hold_rows(path))
        elif not place.exists():
            raise ValueError(f"{place} does not exist: give a folder with rows, as in outputs")
        else:
            files = [place]
        for path in files:
            for row in _rows_of(path, strict=path == place):
                found.setdefault((row.config_hash, row.started_at, row.method, row.status), row)
    return sorted(found.values(), key=lambda row: row.started_at)


def _may_hold_rows(path: Path) -> bool:
    if path.suffix == ".jsonl":
        return not path.name.endswith("samples.jsonl")
    return path.name == "row.json" or re.fullmatch(r"[0-9a-f]{12}\.json", path.name) is not None


def _rows_of(path: Path, strict: bool) -> list[Row]:
    """Rows of one file. What is no row is named and left out; a file of nothing else raises ValueError when strict."""
    rows, faults = [], []
    try:
        if path.suffix != ".jsonl":
            return [Row.read(path)]
        lines = path.read_text("utf-8").splitlines()
    except (ValueError, OSError) as err:
        lines, faults = [], [str(err)]
    for number, line in enumerate(lines, 1):
        try:
            rows += [Row.from_dict(json.loads(line), f"{path}:{number}")] if line.strip() else []
        except json.JSONDecodeError as err:
            faults.append(f"{path}:{number} is not a row: {err}")
        except ValueError as err:
            faults.append(str(err))
    if strict and faults and not rows:
        raise ValueError(faults[0])
    for fault in faults:
        print(f"note: {fault}", file=sys.stderr)
    return rows


def show_seconds(value: float | None) -> str:
    if value is None:
        return "?"
    if value < 60:
        return f"~{value:.0f} s"
    return f"~{value / 60:.0f} min" if value < 7200 else f"~{value / 3600:.1f} h"


def print_list(rows: list[Row]) -> None:
    """One line per row, columns aligned, nothing cut: for a terminal and for grep."""
    titles = [*COLUMNS, "KV held", "TTFT ms", "TPOT ms", "accuracy", "flags"]
    lines = [titles]
    for row in rows:
        numbers = [row.ttft_ms, row.tpot_ms_p50, row.accuracy]
        shown = ["–" if value is None else f"{value:.4g}" for value in numbers]
        plain = ["–" if (value := getattr(row, name)) in (None, "") else str(value) for name in COLUMNS]
        lines.append([*plain, show_bytes(row.kv_resident_bytes), *shown, ",".join(row.flags) or "–"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


def flat(row: Row) -> dict:
    """The row with lists and dicts as JSON text: the same columns for every row."""
    values = row.to_dict()
    return {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in values.items()}


def to_csv(rows: list[Row], file) -> None:
    writer = csv.DictWriter(file, [item.name for item in dataclasses.fields(Row)])
    writer.writeheader()
    writer.writerows(map(flat, rows))


def to_parquet(rows: list[Row], path: Path) -> None:
    """Column types come from Row, so that a column of nothing but nulls keeps its type."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError("parquet needs the package pyarrow: pip install pyarrow, or use --to csv") from None
    types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    fields = []
    for name, hint in typing.get_type_hints(Row).items():
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind in types]
        is_text = typing.get_origin(hint) in (dict, list) or not kinds
        fields.append(pyarrow.field(name, pyarrow.string() if is_text else types[kinds[0]]))
    table = pyarrow.Table.from_pylist(list(map(flat, rows)), pyarrow.schema(fields))
    parquet.write_table(table, path)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.results", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ls", help="one line per row").add_argument("place", nargs="*", default=["outputs"])
    shown = commands.add_parser("show", help="cards of the rows of a file or with a config hash")
    shown.add_argument("row", help="a row.json, or the first digits of a config hash")
    shown.add_argument("place", nargs="*", default=["outputs"])
    export = commands.add_parser("export", help="all columns of all rows")
    export.add_argument("place", nargs="*", default=["outputs"])
    export.add_argument("--to", default="csv", metavar="|".join(FORMATS))
    export.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        return {"ls": _ls, "show": _show, "export": _export}[args.command](args)
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


def _ls(args) -> int:
    print_list(load_rows(*args.place))
    return 0


def _show(args) -> int:
    if Path(args.row).exists():
        rows, others = load_rows(args.row), []
    else:
        others = load_rows(*args.place)
        rows = [row for row in others if row.config_hash.startswith(args.row)]
    if not rows:
        hashes = [row.config_hash for row in others]
        raise ValueError(f"no row has a config hash that starts with {args.row}{did_you_mean(args.row, hashes)}")
    same = ("model", "task", "question", "context_len", "batch_size", "num_new_tokens", "seed", "code_hash", "device_name")
    for row in rows:
        full = [
            one
            for one in others
            if one.method == "full" and all(getattr(one, n) == getattr(row, n) for n in same) and task_of(one) == task_of(row)
        ]
        note = f"full: {full[-1].config_hash}, {full[-1].started_at}" if full and row.method != "full" else None
        print_card(row, full[-1] if note else None, note)
    return 0


def _export(args) -> int:
    if args.to not in FORMATS:
        raise ValueError(f"--to {args.to} is unknown{did_you_mean(args.to, FORMATS)}; valid: {', '.join(FORMATS)}")
    rows = load_rows(*args.place)
    if args.to == "parquet":
        out = args.out or Path("rows.parquet")
        to_parquet(rows, out)
    elif args.out:
        with open(args.out, "w", newline="") as file:
            to_csv(rows, file)
        out = args.out
    else:
        to_csv(rows, sys.stdout)
        return 0
    print(f"{len(rows)} rows in {out}", file=sys.stderr)
    return 0
