"""Two rows, folders or methods side by side: what differs, whether it is more than noise, from where on it pays, and why.

python -m harness.compare sparda full                                   methods, looked up in outputs/rows
python -m harness.compare "sparda 0.8" int8 --rows docs/results/example
python -m harness.compare outputs/a/row.json outputs/b/row.json         any two rows
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.report.advice import Gap, accuracy_gap
from harness.report.card import print_fitted
from harness.report.rows import Entry, cell_key, config_labels, in_turns, load, on_busy_cpu, settings_of
from harness.report.text import (
    DASH,
    LESS,
    LOSS,
    RATE,
    TIME,
    change,
    ms,
    number,
    percent,
    plain,
    size,
    style_of,
    tokens,
)
from harness.results import Row
from harness.store import STORE

CELL = ("model", "task", "question", "context_len", "batch_size", "num_new_tokens", "tp_size", "seed")
MAX_BLOCKS = 3  # more pairs than this are one line each
APART = 0.05  # rows of different runs: times nearer than this are the same


@dataclass(frozen=True)
class BreakEven:
    """Where a method's saved reading outweighs its extra work against another row; None: not known.

    context_len at the row's batch, batch_size at its context: 0 from the start on, infinity never.
    num_tokens: decoded tokens after which a longer time to first token is repaid.
    """

    context_len: float | None = None
    batch_size: float | None = None
    num_tokens: float | None = None


def break_even(row: Row, other: Row) -> BreakEven:
    """From the byte model: step time = bytes read / copy speed + overhead.

    Bytes of the weights are the same for both. KV bytes grow in proportion to context x batch, as they do at a fixed sparsity.
    The overhead is what each measured step took beyond its bound; it is taken as the same at every context and batch.
    """
    known = (row.tpot_ms_p50, other.tpot_ms_p50, row.bound_ms_per_step, other.bound_ms_per_step, row.ceiling_gb_per_s)
    context = batch = None
    sizes = (row.ceiling_gb_per_s, *(size for one in (row, other) for size in (one.context_len, one.batch_size)))
    if None not in (*known, row.kv_read_bytes_per_step, other.kv_read_bytes_per_step) and all(sizes):
        extra_ms = (row.tpot_ms_p50 - row.bound_ms_per_step) - (other.tpot_ms_p50 - other.bound_ms_per_step)
        per_token = [one.kv_read_bytes_per_step / (one.context_len * one.batch_size) for one in (row, other)]
        saved_ms = (per_token[1] - per_token[0]) / (row.ceiling_gb_per_s * 1e6)
        if extra_ms <= 0:
            context = batch = 0.0 if saved_ms >= 0 else float("inf")
        else:
            context = batch = float("inf")
            if saved_ms > 0:
                context, batch = extra_ms / (saved_ms * row.batch_size), extra_ms / (saved_ms * row.context_len)
    num_tokens = None
    if None not in (row.ttft_ms, other.ttft_ms, row.tpot_ms_p50, other.tpot_ms_p50):
        later, gain = row.ttft_ms - other.ttft_ms, other.tpot_ms_p50 - row.tpot_ms_p50
        num_tokens = 0.0 if later <= 0 and gain >= 0 else later / gain if gain > 0 else float("inf")
    return BreakEven(context, batch, num_tokens)


def find(name: str, store: Path) -> list[Entry]:
    """Rows of a file, a folder, or of the method with this name (or this label, as in `sparda 0.8`) in the store."""
    if Path(name).exists():
        return load([name]).entries
    if not store.exists():
        raise ValueError(f"{name} is no file or folder, and {store} has no rows: run `python run.py method={name}` first")
    entries = load([store]).entries
    labels = config_labels([entry.row for entry in entries])
    found = [entry for entry, label in zip(entries, labels, strict=True) if name in (entry.row.method, label)]
    if found:
        return found
    names = sorted({entry.row.method for entry in entries} | set(labels))
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f": did you mean {near[0]!r}? " if near else "; "
    raise ValueError(f"no rows of {name!r} in {store}{guess}There are: {', '.join(names)}")


def pairs(ones: list[Entry], others: list[Entry]) -> list[tuple[Entry, Entry]]:
    """Rows of the same cell; of several the one with the same method and knobs, else the same budget, else the only one.

    Two single rows are always a pair. ValueError with one line when nothing pairs.
    """
    if len(ones) == len(others) == 1:
        return [(ones[0], others[0])]
    found = []
    for one in ones:
        there = [other for other in others if cell_key(other.row) == cell_key(one.row) and other is not one]
        same = [other for other in there if _knobs(other.row) == _knobs(one.row)]
        budget = [other for other in there if _budget(other.row) == _budget(one.row)]
        for group in (same, budget, there):
            if len(group) == 1:
                found.append((one, group[0]))
                break
    if not found:
        left, right = ones[0].row, others[0].row
        apart = (
            "; ".join(_apart(left, right, (*CELL, "device_name"))) or "several rows of one cell on both sides, name one of them"
        )
        raise ValueError(f"no two rows of the same cell: the first of each side have {apart}")
    return sorted(
        found,
        key=lambda pair: (
            tuple(map(str, cell_key(pair[0].row)[:2])) + (pair[0].row.context_len, pair[0].row.question != "visible")
        ),
    )


def _knobs(row: Row) -> tuple:
    return (row.method, *_budget(row), tuple(sorted(settings_of(row).items())))


def _budget(row: Row) -> tuple:
    return (row.sparsity, row.kv_budget, row.kv_dtype)


def _apart(one: Row, other: Row, names: Iterable[str]) -> list[str]:
    return [
        f"{name} {plain(getattr(one, name))} and {plain(getattr(other, name))}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]


def obstacles(one: Row, other: Row) -> list[str]:
    """Why times of these two rows say little; empty when they may be compared."""
    found = _apart(one, other, ("device_name", "tp_size", "prefill_chunk", "decode_impl", "step_impl", "num_new_tokens"))
    names = sorted(one.versions.keys() | other.versions.keys())
    found += [
        f"{name} {one.versions.get(name, DASH)} and {other.versions.get(name, DASH)}"
        for name in names
        if one.versions.get(name) != other.versions.get(name)
    ]
    found += _apart(one, other, ("code_hash",))
    if on_busy_cpu(one, other):
        found.append("timed on a CPU in different runs, another load decides")
    for flag in ("short_decode", "noisy"):
        found += [f"{row.method} is {flag}" for row in (one, other) if flag in row.flags]
    return found


def accuracy_words(gap: Gap | None) -> str:
    """`-3.1 points, worse`: noise where the interval holds 0."""
    if gap is None:
        return DASH
    if gap.points == gap.low == gap.high == 0:
        return "same"
    return f"{gap.points:+.1f} points, {'noise' if gap.low <= 0 <= gap.high else 'better' if gap.points > 0 else 'worse'}"


def block(one: Entry, other: Entry, names: tuple[str, str], siblings: list[Row], width: int) -> RenderableType:
    """Everything about one pair."""
    left, right = one.row, other.row
    lines = [Text(f"{names[0]} against {names[1]}", style="bold"), Text(_cell(left))]
    if different := _apart(left, right, CELL):
        lines.append(Text(f"! not the same cell: {'; '.join(different)}", style="yellow"))
    for row, name in zip((left, right), names, strict=True):
        if row.status != "ok":
            lines.append(Text(f"! {name}: {row.status}{f', {row.error}' if row.error else ''}", style="yellow"))
        if row.flags:
            lines.append(Text(f"! {name}: {', '.join(row.flags)}", style="yellow"))
    why_not = obstacles(left, right)
    numbers = Table(box=SIMPLE_HEAD, width=width, padding=(0, 1), pad_edge=False)
    numbers.add_column()
    for name in names:
        numbers.add_column(Text(name), justify="right", overflow="fold")
    numbers.add_column(Text("first against second"), justify="right", overflow="fold")
    for label, metric, shown, words in METRICS:
        values = [getattr(row, metric) for row in (left, right)]
        if values == [None, None]:
            continue
        verdict = change(*values, words) if words else ""
        if words in (TIME, RATE) and None not in values and verdict != DASH:
            near = abs(values[0] / values[1] - 1) < APART and not in_turns(left, right)
            verdict = "not comparable" if why_not else "same" if near else verdict
        numbers.add_row(Text(label), *(Text(shown(value)) for value in values), Text(verdict, style=style_of(verdict)))
    gap = accuracy_gap(one, other)
    words = accuracy_words(gap)
    if left.accuracy is not None or right.accuracy is not None:
        numbers.add_row(Text("accuracy"), Text(_accuracy(left)), Text(_accuracy(right)), Text(words, style=style_of(words)))
        numbers.add_row(Text("  samples"), Text(plain(left.num_samples)), Text(plain(right.num_samples)), Text())
    lines.append(numbers)
    if gap:
        how = "the same samples, paired" if gap.paired else "as if the samples were not the same"
        lines.append(
            Text(
                f"accuracy gap: {gap.points:+.1f} points, 95 % interval {gap.low:+.1f} to {gap.high:+.1f}, "
                f"{gap.num_samples} samples, {how}"
            )
        )
    if why_not:
        lines.append(Text(f"times are not comparable: {'; '.join(why_not)}", style="yellow"))
    else:
        how = "in turns" if in_turns(left, right) else f"in different runs: differences under {APART:.0%} are called same"
        lines.append(Text(f"times were taken {how}"))
        lines += [Text(), Text("from where on the first pays", style="bold"), *map(Text, _pays(left, right, names))]
    lines += [Text(), Text("why", style="bold")]
    for row, name in zip((left, right), names, strict=True):
        lines += map(Text, why(row, name, siblings))
    return Group(*lines)


METRICS = (
    ("KV cache held", "kv_resident_bytes", size, LESS),
    ("  share of dense cache", "kv_kept_ratio", percent, None),
    ("  read per decode step", "kv_read_bytes_per_step", size, LESS),
    ("  memory", "memory_class", plain, None),
    ("peak memory, prefill", "peak_prefill_bytes", size, LESS),
    ("peak memory, decode", "peak_decode_bytes", size, LESS),
    ("time to first token", "ttft_ms", ms, TIME),
    ("time per token, median", "tpot_ms_p50", ms, TIME),
    ("time per token, p95", "tpot_ms_p95", ms, TIME),
    ("decode tokens/s", "decode_tokens_per_s", number, RATE),
    ("perplexity", "perplexity", number, LOSS),
    ("KL to full, nats", "kl_nats", number, None),
)


def _pays(row: Row, other: Row, names: tuple[str, str]) -> list[str]:
    """Break-even points as sentences."""
    found, lines = break_even(row, other), []

    def said(value: float, unit: str) -> str:
        return "never" if value == float("inf") else "from the start" if value == 0 else f"from {unit}"

    if found.context_len is not None:
        at = said(found.context_len, f"{number(found.context_len)} tokens on")
        lines.append(f"  decode, by context at batch {row.batch_size}: {at}")
        at = said(found.batch_size, f"batch {number(found.batch_size)} on")
        lines.append(f"  decode, by batch at {tokens(row.context_len)} tokens: {at}")
    if found.num_tokens is not None:
        at = said(found.num_tokens, f"{number(found.num_tokens)} decoded tokens on")
        lines.append(f"  whole answer, first token included: {at}")
    if found.context_len is not None:
        lines.append(
            "  assumed: step = (weights + KV bytes) / copy speed + overhead; KV bytes grow with context x batch as at this"
        )
        lines.append("  sparsity; each row's overhead (measured minus bound) is the same at every size")
    return lines or ["  not known: a time, a bound or a byte count is missing"]


def why(row: Row, name: str, siblings: list[Row]) -> list[str]:
    """Where a decode step's time goes: bytes, how fast they came, and what is left for launches and small work."""
    if not all((row.tpot_ms_p50, row.bound_ms_per_step, row.ceiling_gb_per_s)):
        return [f"  {name}: no decode step was measured"]
    total = row.bound_ms_per_step * row.ceiling_gb_per_s * 1e6
    kv = row.kv_read_bytes_per_step or 0
    beyond = row.tpot_ms_p50 - row.bound_ms_per_step
    lines = [
        f"  {name}: {size(total)} a step, {percent(kv / total)} of them KV; {number(row.achieved_gb_per_s)} of "
        f"{number(row.ceiling_gb_per_s)} GB/s; bound {ms(row.bound_ms_per_step)}, measured {ms(row.tpot_ms_p50)}",
    ]
    if beyond > 0:
        lines.append(
            f"    {ms(beyond)} ({percent(beyond / row.tpot_ms_p50)}) beyond the bound: launches, small work, slow kernels"
        )
    else:
        lines.append("    at the bandwidth bound: only fewer bytes make it faster")
    twin = {"graph": "eager", "eager": "graph"}.get(row.decode_impl or "")
    for other in siblings:
        alike = cell_key(other) == cell_key(row) and _budget(other) == _budget(row) and other.method == row.method
        if alike and twin and other.decode_impl == twin and other.tpot_ms_p50 is not None:
            by_impl = {row.decode_impl: row.tpot_ms_p50, twin: other.tpot_ms_p50}
            gain = by_impl["eager"] - by_impl["graph"]
            lines.append(f"    eager {ms(by_impl['eager'])}, graph {ms(by_impl['graph'])}: launches cost {ms(gain)} a step")
            break
    return lines


def overview(found: list[tuple[Entry, Entry]], labels: dict[int, str], width: int) -> RenderableType:
    """One line per pair below its cell: factors of the first against the second."""
    parts: list[RenderableType] = []
    cells: dict[str, list[tuple[Entry, Entry]]] = {}
    for pair in found:
        cells.setdefault(_cell(pair[0].row), []).append(pair)
    for cell, members in cells.items():
        lines = Table(box=SIMPLE_HEAD, width=width, padding=(0, 1), pad_edge=False)
        lines.add_column("first against second", overflow="fold", ratio=1)
        for name in ("KV held", "TTFT", "TPOT", "accuracy"):
            lines.add_column(name, justify="right")
        for one, other in members:
            timed = not obstacles(one.row, other.row)
            shown = [change(one.row.kv_resident_bytes, other.row.kv_resident_bytes, LESS)]
            shown += [
                change(getattr(one.row, name), getattr(other.row, name), TIME) if timed else DASH
                for name in ("ttft_ms", "tpot_ms_p50")
            ]
            shown.append(accuracy_words(accuracy_gap(one, other)).replace(" points", ""))
            name = f"{labels[id(one)]} against {labels[id(other)]}"
            lines.add_row(Text(name), *(Text(text, style=style_of(text)) for text in shown))
        parts += [Text(cell, style="bold"), lines]
    return Group(*parts)


def _cell(row: Row) -> str:
    question = f" question {row.question}," if row.question else ""
    device = row.device_name or "unknown device"
    return f"{row.model}, {row.task},{question} context {row.context_len}, batch {row.batch_size}, {device}"


def _accuracy(row: Row) -> str:
    return (
        DASH
        if row.accuracy is None
        else f"{row.accuracy:.3f}{'' if row.accuracy_stderr is None else f' ± {row.accuracy_stderr:.3f}'}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.compare", description="Two rows, folders or methods side by side.")
    parser.add_argument("first", help="row.json, folder of rows, *.jsonl, or a method such as sparda or 'sparda 0.8'")
    parser.add_argument("second", help="the same; usually full")
    parser.add_argument("--rows", type=Path, default=STORE, help="where methods are looked up; default: %(default)s")
    parser.add_argument(
        "--all", action="store_true", help=f"details of every pair, not one line each when there are over {MAX_BLOCKS}"
    )
    args = parser.parse_args(argv)
    try:
        ones, others = find(args.first, args.rows), find(args.second, args.rows)
        found = pairs(ones, others)
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    everything = list({id(entry): entry for entry in [*ones, *others]}.values())
    labels = dict(zip(map(id, everything), config_labels([entry.row for entry in everything]), strict=True))
    siblings = [entry.row for entry in everything]
    if args.rows.exists():
        siblings += [entry.row for entry in load([args.rows]).entries]
    if len(found) > MAX_BLOCKS and not args.all:
        print_fitted(lambda width: overview(found, labels, width))
        print(f"{len(found)} pairs; accuracy in points of 100; --all shows each pair with its reasons")
        return 0
    for one, other in found:
        names = labels[id(one)], labels[id(other)]
        if names[0] == names[1]:
            names = (f"{names[0]} (1)", f"{names[1]} (2)")
        print_fitted(lambda width, one=one, other=other, names=names: block(one, other, names, siblings, width))
    return 0


if __name__ == "__main__":
    sys.exit(main())
