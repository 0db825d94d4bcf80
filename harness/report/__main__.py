"""python -m harness.report outputs/rows --out report.html

One HTML file that answers from these rows: what to use, what it costs and saves, and every row with its command. Opens offline.
"""

import argparse
import sys
from pathlib import Path

from harness.report.rows import load
from harness.results import write_atomic


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.report", description="One self-contained HTML page from rows.")
    parser.add_argument(
        "paths", nargs="+", type=Path, help="folders with row.json or *.jsonl files, also calibrations, or such files"
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        from harness.report.page import page
    except ModuleNotFoundError as err:
        if err.name and err.name.partition(".")[0] == "plotly":
            print("error: the report needs plotly: pip install -c constraints.txt -e '.[report]'", file=sys.stderr)
            return 2
        raise
    try:
        loaded = load(args.paths)
        write_atomic(args.out, page(loaded))
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{args.out}: {len(loaded.entries)} rows, {args.out.stat().st_size / 1e6:.1f} MB, opens offline")
    return 0


if __name__ == "__main__":
    sys.exit(main())
