"""The result card: one cell beside `full`, in 80 columns, with or without colour; and one line per cell after a sweep.

Slower is shown as slower, a value that is not known as a dash. Card of a row.json:
python -m harness.report.card outputs/<date>/<time>/row.json
"""

import contextlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from math import hypot
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.report.text import DASH, LESS, LOSS, RATE, TIME, change, ms, number, percent, plain, size, style_of
from harness.results import Row

WIDTH = 80
FLAG_TEXTS = {
    "noop": "the budget covers the whole prompt: nothing was dropped, this is full",
    "untrained": "this method needs trained weights and ran without them",
    "baseline_broken": "full itself fails this task: accuracy says nothing about the method",
    "short_decode": "fewer than 128 tokens were decoded per run: decode times are no measurement",
    "simulated": "parts of this method are simulated: its memory and speed are not real",
    "noisy": "the slowest steps took over 3 times the median: something else used the machine",
    "few_prefills": "the time to first token comes from fewer than 5 prefills",
    "foreign_calibration": "the method was calibrated on other weights than those that ran",
    "partly_noop": "some prompts are too short for the budget and were kept whole: num_noop of num_samples",
    "double_bos": "prompts begin with two BOS, as lm-eval builds them for this tokenizer",
    "truncated": "prompts longer than the model allows lost their front",
    "shared_device": "something else used the device: times are too long, memory may have run out for that reason",
    "pruned": "not run: a smaller cell of the same method ran out of memory already",
    "not_interleaved": "full and the method were timed one after the other, not in turns",
}
QUESTION_TEXTS = {"visible": "compression has seen it", "hidden": "compression has not seen it"}
MEMORY_TEXTS = {
    "freed": "the bytes left memory",
    "reads_less": "everything stays in memory, less of it is read",
    "fixed_state": "a state of fixed size",
    "none": "nothing is saved",
}


def print_card(row: Row, full: Row | None = None, full_note: str | None = None, file: TextIO | None = None) -> None:
    """Print the card; see `card`."""
    print_fitted(lambda width: card(row, full, full_note, width), file)


def print_table(rows: list[Row], file: TextIO | None = None) -> None:
    """Print one line per cell; see `table`."""
    print_fitted(lambda width: table(rows, width), file)


def card(row: Row, full: Row | None = None, full_note: str | None = None, width: int = WIDTH) -> Group:
    """Rich renderable of one row.

    Args:
        full: the same cell with the full cache; None when the cell is full itself or no comparison was asked for.
        full_note: where full's row comes from when it was not measured now.
        width: columns of the terminal, at most 80.
    """
    least = 16 if width >= WIDTH else 12
    parts = [_header(row, full)]
    numbers = Table(box=SIMPLE_HEAD, width=width, padding=(0, 1), pad_edge=False)
    numbers.add_column()
    numbers.add_column(Text(row.method), justify="right", min_width=least, overflow="fold")
    if full:
        numbers.add_column(Text("full"), justify="right", min_width=least, overflow="fold")
        numbers.add_column(Text("against full"), justify="right", min_width=least - 2)
    for label, value, shown, words in _lines(row, full):
        cells = [Text(label), Text(shown(row), style="bold")]
        if full:
            timed_apart = full_note and words in (TIME, RATE)
            verdict = Text("not in turns") if timed_apart else _change(value(row), value(full), words)
            cells += [Text(shown(full)), verdict]
        numbers.add_row(*cells)
    accuracy = [Text("accuracy"), Text(_accuracy(row), style="bold")]
    samples = [Text("  samples"), Text(plain(row.num_samples), style="bold")]
    if full:
        accuracy += [Text(_accuracy(full)), _accuracy_change(row, full)]
        samples += [Text(plain(full.num_samples)), Text()]
    numbers.add_row(*accuracy)
    if full and row.verdict and None not in (row.accuracy_diff_low, row.accuracy_diff_high):
        numbers.add_row("  95 % interval", "", "", f"{row.accuracy_diff_low:+.2f} to {row.accuracy_diff_high:+.2f}")
    numbers.add_row(*samples)
    parts.append(numbers)
    if full_note:
        parts.append(
            Text(
                f"{full_note}: its times are from then and not compared: another load of the machine changes them",
                overflow="fold",
            )
        )
    parts.append(_footer(row, width))
    return Group(*parts)


COLUMNS = (
    ("KV held", lambda row: size(row.kv_resident_bytes)),
    ("TTFT", lambda row: ms(row.ttft_ms)),
    ("TPOT", lambda row: ms(row.tpot_ms_p50)),
    ("tokens/s", lambda row: number(row.decode_tokens_per_s)),
    ("accuracy", lambda row: number(row.accuracy)),
)


def table(rows: list[Row], width: int = WIDTH) -> RenderableType:
    """Rich renderable with one line per row, named by its method and by whatever differs between the rows.

    On a narrow terminal the values stand below the name.
    """
    names = []
    for row, known in zip(rows, _differing(rows), strict=True):
        cell = Text(" ".join([row.method, *known]), overflow="fold")
        for word in ([] if row.status == "ok" else [row.status]) + row.flags:
            cell.append(f"\n! {word}", style=_status_style(row))
        names.append(cell)
    if width < 72:
        values = [Text("  " + ", ".join(f"{name} {shown(row)}" for name, shown in COLUMNS)) for row in rows]
        return Group(*(part for pair in zip(names, values, strict=True) for part in pair))
    lines = Table(box=SIMPLE_HEAD, width=width, padding=(0, 1), pad_edge=False)
    lines.add_column("cell", overflow="fold")
    for name, _ in COLUMNS:
        lines.add_column(name, justify="right", no_wrap=True)
    for cell, row in zip(names, rows, strict=True):
        lines.add_row(cell, *(Text(shown(row)) for _, shown in COLUMNS))
    return lines


CELL = ("model", "task", "question", "kv_dtype", "context_len", "batch_size", "sparsity", "kv_budget", "seed")


def _differing(rows: list[Row]) -> list[list[str]]:
    """`name=value` of each row's settings that differ between the rows, and of its knobs between those of its method."""
    # a cell that failed early still has the dtype it was asked for, not the one it would have got
    values = {name: {getattr(row, name) for row in rows} - ({"auto"} if name == "kv_dtype" else set()) for name in CELL}
    varying = [name for name in CELL if len(values[name]) > 1]
    found = []
    for row in rows:
        alike = [one.knobs for one in rows if one.method == row.method]
        knobs = [key for key in row.knobs if key not in CELL and any(one.get(key) != row.knobs[key] for one in alike)]
        known = [f"{name}={plain(getattr(row, name))}" for name in varying if getattr(row, name) is not None]
        found.append(known + [f"{key}={plain(row.knobs[key])}" for key in knobs])
    return found


def _header(row: Row, full: Row | None) -> Text:
    budget = f"kv_budget {row.kv_budget:g}" if row.kv_budget is not None else f"sparsity {plain(row.sparsity)}"
    shape = f"context {row.context_len}, batch {row.batch_size}, {row.num_new_tokens} new tokens, seed {row.seed}"
    text = Text(overflow="fold")
    text.append(f"{row.method} on {row.model}, task {row.task}\n", style="bold")
    text.append(f"{budget}, kv_dtype {row.kv_dtype}, {shape}\n")
    if row.question:
        text.append(f"question {row.question}: {QUESTION_TEXTS.get(row.question, '')}\n")
    text.append(f"memory {row.memory_class}: {MEMORY_TEXTS.get(row.memory_class, '')}\n")
    text.append(f"kernels {plain(row.kernel_impl)}, decode {plain(row.decode_impl)}\n")
    if row.tp_size > 1:
        text.append(f"bytes are those of one of {row.tp_size} ranks\n")
    text.append("status ")
    text.append(row.status, style=_status_style(row))
    if row.error:
        text.append(f": {row.error}")
    for flag in row.flags:
        text.append(f"\n! {flag}: {FLAG_TEXTS.get(flag, 'see docs')}", style="yellow")
    if full and full.status != "ok":
        text.append(f"\n! full has no result, {full.status}: {full.error or ''}", style="yellow")
    return text


def _lines(row: Row, full: Row | None) -> list[tuple]:
    """Label, number to compare, text to show (both from a row), and the words for (below, above) full or None."""

    def line(label, name, shown, words=None):
        return label, lambda one: getattr(one, name), lambda one: shown(getattr(one, name)), words

    def of_ledger(kind):
        return lambda one: one.kv_ledger.get(kind)

    rows = [row, full] if full else [row]
    kinds = dict.fromkeys(kind for one in rows for kind in one.kv_ledger)
    lines = [
        line("KV cache held", "kv_resident_bytes", size, LESS),
        *((f"  {kind}", of_ledger(kind), lambda one, kind=kind: size(one.kv_ledger.get(kind)), None) for kind in kinds),
        ("  predicted", lambda one: None, _predicted, None),
        line("  share of dense cache", "kv_kept_ratio", percent),
        line("  read per decode step", "kv_read_bytes_per_step", size, LESS),
        line("  with room to grow", "kv_allocated_bytes", size, LESS),
        line("peak memory, prefill", "peak_prefill_bytes", size, LESS),
        line("peak memory, decode", "peak_decode_bytes", size, LESS),
        line("time to first token", "ttft_ms", ms, TIME),
        line("  of it compression", "compress_ms", ms),
        line("time per token, median", "tpot_ms_p50", ms, TIME),
        line("time per token, p95", "tpot_ms_p95", ms, TIME),
        line("decode tokens/s", "decode_tokens_per_s", number, RATE),
        line("prefill tokens/s", "prefill_tokens_per_s", number, RATE),
        line("time / bandwidth bound", "bound_ratio", lambda value: DASH if value is None else f"{value:.1f}x"),
        ("  GB/s of copy speed", lambda one: None, _bandwidth, None),
    ]
    quality = (
        ("perplexity", "perplexity", LOSS),
        ("same top token as full", "top1_agreement", None),
        ("KL to full, nats", "kl_nats", None),
        ("draft acceptance", "acceptance_rate", None),
    )
    for label, name, words in quality:
        if any(getattr(one, name) is not None for one in rows):
            lines.append(line(label, name, percent if name in ("top1_agreement", "acceptance_rate") else number, words))
    return lines


def _change(value: float | None, reference: float | None, words: tuple[str, str] | None) -> Text:
    """`1.25x slower`: the factor against full, always above 1, and what it means."""
    shown = change(value, reference, words) if words else ""
    return Text(shown, style=style_of(shown))


def _accuracy(row: Row) -> str:
    if row.accuracy is None:
        return DASH
    error = "" if row.accuracy_stderr is None else f" ± {row.accuracy_stderr:.3f}"
    return f"{row.accuracy:.3f}{error}"


def _accuracy_change(row: Row, full: Row) -> Text:
    """The difference and the verdict of the paired samples; without them `noise` within two standard errors."""
    if row.accuracy is None or full.accuracy is None:
        return Text(DASH)
    gap = row.accuracy - full.accuracy
    if "baseline_broken" in row.flags:
        return Text("full fails", style="yellow")
    if row.verdict and row.accuracy_diff is not None:
        style = {"better": "green", "worse": "red"}.get(row.verdict, "")
        return Text(row.verdict if row.accuracy_diff == 0 else f"{row.accuracy_diff:+.3f} {row.verdict}", style=style)
    if gap == 0:
        return Text("same")
    noise = hypot(row.accuracy_stderr or 0, full.accuracy_stderr or 0)
    if abs(gap) <= 2 * noise:
        return Text(f"{gap:+.3f}, noise")
    return Text(f"{gap:+.3f} {'better' if gap > 0 else 'worse'}", style="green" if gap > 0 else "red")


def _predicted(row: Row) -> str:
    """Predicted bytes and how far the measured ones are from them."""
    if not row.kv_predicted_bytes or row.kv_resident_bytes is None:
        return size(row.kv_predicted_bytes)
    off = (row.kv_resident_bytes / row.kv_predicted_bytes - 1) * 100
    return f"{size(row.kv_predicted_bytes)} {'exact' if off == 0 else f'{off:+.1f} %'}"


def _bandwidth(row: Row) -> str:
    return f"{number(row.achieved_gb_per_s)} of {number(row.ceiling_gb_per_s)}"


def _footer(row: Row, width: int) -> Text:
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    where = [row.device_name, versions, f"commit {row.git_commit}" if row.git_commit else "", row.started_at]
    text = Text(", ".join(part for part in where if part) + "\n", style="dim", overflow="fold")
    text.append(_command(row.reproduce, width), style="not dim")
    return text


def _command(command: str, width: int) -> str:
    """A shell command on lines that fit, continued with backslashes so that it can be pasted."""
    try:
        words = shlex.split(command)
    except ValueError:  # a row from elsewhere
        return command
    lines = [""]
    for word in words:
        word = shlex.quote(word)
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _status_style(row: Row) -> str:
    return "bold red" if row.status != "ok" else "yellow" if row.flags else "green"


def print_fitted(draw: Callable[[int], RenderableType], file: TextIO | None = None) -> None:
    """Print draw(width) in the terminal's width, 80 columns at most and when piped; no blanks at the ends of lines."""
    file = file or sys.stdout
    # drawn into memory first: a terminal that cannot show a character, or a reader that has gone, must not cost the row
    encoding = getattr(file, "encoding", None) or "utf-8"
    drawn = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="")
    width = min(shutil.get_terminal_size().columns, WIDTH) if file.isatty() else WIDTH
    console = Console(file=drawn, force_terminal=file.isatty() or None, width=width, highlight=False, markup=False)
    console.print(draw(width), crop=False)
    drawn.flush()
    text = re.sub(r"[ ]+((?:\x1b\[[0-9;]*m)*)$", r"\1", drawn.buffer.getvalue().decode(encoding), flags=re.MULTILINE)
    with contextlib.suppress(BrokenPipeError):
        file.write(text)
        file.flush()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print_card(Row.read(Path(name)))
