"""Rows by config hash, below the folder that run.py is started in: no cell is measured twice by the same code.

A row stands for a new one when the code that measures, the versions and the device are the same; else it is stale.
"""

import sys
from pathlib import Path

from harness.results import Row, write_atomic

STORE = Path("outputs/rows")


def row_path(config_hash: str, root: Path = Path()) -> Path:
    return root / STORE / f"{config_hash}.json"


def read(config_hash: str, root: Path = Path()) -> Row | None:
    """The stored row of a cell, stale or not; None when there is none. A damaged file is named and counts as none."""
    path = row_path(config_hash, root)
    if not path.exists():
        return None
    try:
        return Row.read(path)
    except ValueError as err:
        print(f"note: {err}; measuring again", file=sys.stderr)
        return None


def why_stale(row: Row, like: Row) -> str | None:
    """What has changed since `row` was measured, None if nothing; `like` says what a row of now would hold."""
    if row.code_hash != like.code_hash:
        return f"code {row.code_hash or 'unknown'} is now {like.code_hash}"
    if row.device_name != like.device_name:
        return f"measured on {row.device_name or 'an unknown device'}"
    for name in sorted(row.versions.keys() | like.versions.keys()):
        if row.versions.get(name) != like.versions.get(name):
            return f"{name} {row.versions.get(name)} is now {like.versions.get(name)}"
    return None


def find(like: Row, root: Path = Path()) -> Row | None:
    """The stored result of the same cell, measured by the same code on the same device and versions; None if there is none."""
    row = read(like.config_hash, root)
    return row if row and row.status == "ok" and not why_stale(row, like) else None


def keep(row: Row, root: Path = Path()) -> None:
    """Store a row; a failure never replaces a result of the same code, and a mistake in the arguments is not stored."""
    if row.status == "invalid" or row.status != "ok" and find(row, root):
        return
    try:
        write_atomic(row_path(row.config_hash, root), row.to_json())
    except OSError as err:
        # the cell's own folder has the row; the store is only a convenience
        print(f"warning: {row_path(row.config_hash, root)} cannot be written ({err}): it will run again", file=sys.stderr)
