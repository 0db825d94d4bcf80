"""Rows from files and folders, their names, and what is needed to set one beside another.

load(paths) reads row.json files, stores such as outputs/rows, *.jsonl files of rows and calibration maps; whatever is none of
these is left out and named in `notes`.
"""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from harness.results import Row

# overrides that choose the method; all others of a command choose the cell that it is measured in
METHOD_WORDS = ("method=", "method.", "sparsity=", "kv_budget=", "kv_dtype=")
# of a task, what says how many samples and not which
SAMPLE_WORDS = ("task.num_samples=", "task.num_scored=")
BUDGET_KNOBS = ("sparsity", "kv_budget", "kv_dtype")
DENSE_DTYPES = ("bf16", "fp16", "fp32")
HEAT_KEYS = ("iou", "recall")


@dataclass
class Entry:
    """A row, its samples where their file lies beside it, and the file that it came from. row.task names its options too."""

    row: Row
    samples: list[dict] = field(default_factory=list)
    source: str = ""


@dataclass
class Loaded:
    entries: list[Entry] = field(default_factory=list)
    calibrations: list[tuple[str, dict]] = field(default_factory=list)  # name, what the file holds
    notes: list[str] = field(default_factory=list)


def load(paths: Iterable[str | Path]) -> Loaded:
    """All rows and calibrations in these files and folders, a cell that was measured twice on one device by its newest row.

    Raises ValueError with one line when a path does not exist or no row is found.
    """
    loaded, paths = Loaded(), [Path(path) for path in paths]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist: give a folder of rows such as outputs/rows, or a row.json")
        for file in _files(path):
            _read(file, loaded)
    if not loaded.entries:
        why = f" ({loaded.notes[0]})" if loaded.notes else ""
        raise ValueError(f"no rows in {', '.join(map(str, paths))}{why}: run `python run.py` first, rows go to outputs/rows")
    newest: dict[tuple, Entry] = {}
    for entry in sorted(loaded.entries, key=lambda entry: entry.row.started_at):
        row = entry.row
        # a row without a hash was written by hand: it stands for itself
        newest[(row.config_hash, row.device_name) if row.config_hash else ("", id(row))] = entry
    if older := len(loaded.entries) - len(newest):
        loaded.notes.append(f"{older} older rows of cells that were measured again are left out")
    loaded.entries = sorted(newest.values(), key=lambda entry: entry.row.started_at)
    return loaded


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [file for pattern in ("*.json", "*.jsonl") for file in path.rglob(pattern)]
    inside = [file for file in files if not {"wandb", ".git"} & set(file.relative_to(path).parts)]
    return sorted(file for file in inside if not file.name.endswith("samples.jsonl") and not file.name.startswith("."))


def _read(file: Path, loaded: Loaded) -> None:
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as err:
        loaded.notes.append(f"{file.name} cannot be read: {' '.join(str(err).split())}")
        return
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            # NaN and infinity are no JSON: unknown
            objects += [json.loads(line, parse_constant=lambda _: None)] if line.strip() else []
        except ValueError as err:  # a file that was cut off still has its other lines
            where = f" line {number}" if len(lines) > 1 else ""
            loaded.notes.append(f"{file.name}{where} cannot be read: {err}")
    for found in objects:
        if not isinstance(found, dict):
            loaded.notes.append(f"{file.name} holds no rows")
            return
        if {"status", "method", "model"} <= found.keys():
            try:
                row = Row.known(found)
            except ValueError as err:
                loaded.notes.append(f"{file.name}: {err}")
                continue
            entry = Entry(row, _samples(file, row), str(file))
            row.task = task_of(row)
            loaded.entries.append(entry)
        elif matrices(found):
            loaded.calibrations.append((file.stem, found))
        else:
            loaded.notes.append(f"{file.name} holds no row")
            return


def _samples(file: Path, row: Row) -> list[dict]:
    """Lines of the samples file that belongs to a row: samples.jsonl in a cell's folder, <name>.samples.jsonl elsewhere."""
    names = ["samples.jsonl"] if file.name == "row.json" else [f"{file.stem}.samples.jsonl", f"{row.config_hash}.samples.jsonl"]
    for name in names:
        path = file.with_name(name)
        if path.is_file():
            try:
                lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            except (OSError, ValueError):
                return []
            return [line for line in lines if isinstance(line, dict)]
    return []


def matrices(calibration: dict, prefix: str = "") -> dict[str, list[list[float | None]]]:
    """Every matrix that is named like iou or recall, wherever it is nested, by name: the seam to harness.calibrate."""
    found = {}
    for key, value in calibration.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= matrices(value, f"{name} ")
        elif any(word in name.lower() for word in HEAT_KEYS) and _is_matrix(value):
            found[name] = value
    return found


def _is_matrix(value) -> bool:
    def is_number(cell):
        return cell is None or isinstance(cell, int | float) and not isinstance(cell, bool)

    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(line, list) and line and all(map(is_number, line)) for line in value)
        and len({len(line) for line in value}) == 1
    )


def overrides_of(row: Row) -> str:
    """The words that choose this row's method, to be put after `python run.py`: from the command that gave the row."""
    words = _words(row)
    own = [word for word in words if word.startswith(METHOD_WORDS)]
    keys = {word.partition("=")[0] for word in own}
    if any(word.startswith("experiment=") for word in words):
        # the preset may have set knobs that the command does not show
        own += [
            f"method.{key}={_value(row.knobs[key])}"
            for key in row.knobs
            if key not in BUDGET_KNOBS and f"method.{key}" not in keys
        ]
    if "method" not in keys:
        own.insert(0, f"method={row.method}")
    for name in ("sparsity", "kv_budget"):
        value = getattr(row, name)
        if value is not None and not keys & {"sparsity", "kv_budget", "method.sparsity", "method.kv_budget"}:
            own.append(f"{name}={value:g}")
    return shlex.join(own)


def task_of(row: Row) -> str:
    """The task with the options that its command sets, `niah haystack=facts`: rows with others answer other questions."""
    given = (word.lstrip("+") for word in _words(row))
    words = sorted(word for word in given if word.startswith("task.") and not word.startswith(SAMPLE_WORDS))
    # the name of one task among many stands in row.task already
    options = [word.removeprefix("task.") for word in words if not word.startswith("task.name=")]
    return " ".join([row.task, *(option for option in options if option not in row.task.split())])


def full_command(row: Row) -> str:
    """The command that measures full in this row's cell."""
    return shlex.join(["python", "run.py", "method=full", *(word for word in _words(row) if not word.startswith(METHOD_WORDS))])


def _value(value) -> str:
    return json.dumps(value).replace(" ", "") if isinstance(value, list | dict | bool) or value is None else str(value)


def settings_of(row: Row) -> dict[str, str]:
    """What tells two rows of one method in one cell apart, beside budget and dtype: knobs and how it was run."""
    found = _given(row) | {name: _value(value) for name, value in row.knobs.items()}
    if row.decode_impl:
        found["decode_impl"] = row.decode_impl
    if row.kernel_impl:
        found["impl"] = row.kernel_impl.split(",")[0]
    return {name: value for name, value in found.items() if name not in BUDGET_KNOBS}


def _given(row: Row) -> dict[str, str]:
    """Knobs that the row's command sets."""
    words = [word.removeprefix("method.").partition("=") for word in _words(row) if word.startswith("method.")]
    return {name: value for name, _, value in words}


def _words(row: Row) -> list[str]:
    """Overrides of the row's command; none where it cannot be read."""
    try:
        return shlex.split(row.reproduce)[2:]
    except ValueError:
        return []


def is_full(row: Row) -> bool:
    """The reference: the dense cache in the model's own dtype."""
    return row.method == "full" and (row.kv_dtype in (*DENSE_DTYPES, "auto", ""))


def config_labels(rows: list[Row]) -> list[str]:
    """A name for each row's method and knobs: only what differs between rows of that method on that device is named."""
    settings, labels = [settings_of(row) for row in rows], []
    peers: dict[tuple, list[dict]] = {}
    for row, own in zip(rows, settings, strict=True):
        peers.setdefault((row.method, row.device_name), []).append(own)
    for row, own in zip(rows, settings, strict=True):
        parts, others = [row.method], peers[row.method, row.device_name]
        if row.kv_budget is not None:
            parts.append(f"budget {row.kv_budget:g}")
        elif row.sparsity is not None:
            parts.append(f"{row.sparsity:g}")
        if row.kv_dtype not in (*DENSE_DTYPES, "auto", "", row.method):
            parts.append(row.kv_dtype)
        given = _given(row)
        for name, value in own.items():
            values = {other.get(name) for other in others}
            # rows from before knobs were recorded say nothing of a knob: it counts only where the command names it
            if len(values - {None}) > 1 or (None in values and name in given):
                parts.append(value if name in ("decode_impl", "impl") else f"{name}={value}")
        labels.append(" ".join(parts))
    return labels


def cell_key(row: Row) -> tuple:
    """What must be equal before two rows are compared: everything but the method."""
    return (row.model, row.task, row.question, row.context_len, row.batch_size, row.seed, devices(row))


def devices(row: Row) -> str:
    """The device with the number of ranks: bytes and times of one of two ranks stand beside those of another only."""
    return row.device_name if row.tp_size <= 1 else f"{row.tp_size} x {row.device_name}"


def in_turns(one: Row, other: Row) -> bool:
    """Whether two rows come from one run that timed them in turns: both start with it, and neither says otherwise."""
    if "not_interleaved" in (*one.flags, *other.flags) or not (one.started_at and other.started_at):
        return False
    try:
        apart = datetime.fromisoformat(one.started_at) - datetime.fromisoformat(other.started_at)
    except (ValueError, TypeError):
        return False
    return abs(apart) < timedelta(seconds=5)


def on_busy_cpu(one: Row, other: Row) -> bool:
    """Whether another load may have set the difference between two times: on a CPU, unless they were timed in turns."""
    return not ("cuda" in one.versions and "cuda" in other.versions) and not in_turns(one, other)
