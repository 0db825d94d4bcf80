"""The page: one HTML file with its script, style, charts and rows inside; it asks the network for nothing.

What comes from a row is escaped: html.escape in the markup, `<` as \\u003c in the embedded JSON, charts.text in charts.
"""

import html
import json
from pathlib import Path

from plotly.offline import get_plotlyjs

from harness.report import charts
from harness.report.advice import GOALS, LIMITS, Advice, View, advise, steps, views
from harness.report.card import FLAG_TEXTS, MEMORY_TEXTS, QUESTION_TEXTS
from harness.report.rows import Entry, Loaded, config_labels, devices, is_full
from harness.report.text import ms, number, percent, plain, size, tokens

HERE = Path(__file__).resolve().parent
DEFAULT_LOSS = 1.0
STATUS_TEXTS = {
    "ok": "measured",
    "invalid": "the settings cannot run",
    "oom_prefill": "out of memory while reading the prompt",
    "oom_decode": "out of memory while decoding",
    "nan": "the logits turned into NaN or infinity",
    "timeout": "took longer than allowed",
    "failed": "an error; its traceback lies beside the row",
}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# name of the chart, heading, what it shows
VIEW_CHARTS = (
    (
        "kept",
        "Accuracy against KV bytes held",
        "Upper left is better. The line is the Pareto front; hollow symbols may not be advised.",
    ),
    ("rate", "Accuracy against tokens per second", "Upper right is better."),
    ("ttft", "Accuracy against time to first token", "Upper left is better."),
    (
        "sparsity",
        "Time per token against bytes gone",
        "Measured median, whisker to p95; dotted: the bandwidth bound, a step's bytes over copy speed. Dashed: full. "
        "Hollow: noisy, short_decode or barred.",
    ),
    ("context", "Time per token against context", "Measured median, whisker to p95; dotted: the bandwidth bound."),
    ("ttft_context", "Time to first token against context", "All lengths measured at this batch."),
    (
        "ledger",
        "Memory ledger",
        "KV bytes held after prefill, by kind; the tick is what the method predicted. Headroom is room for tokens to come.",
    ),
)


def page(loaded: Loaded) -> str:
    """The whole HTML document."""
    entries = loaded.entries
    rows = [entry.row for entry in entries]
    style = charts.Style([row.method for row in rows])
    found = views(entries)
    shared = _shared_charts(loaded, style)
    data = {
        "views": [_view(view, found, style) for view in found],
        "charts": {name: figure for name, _, _, figure in shared},
    }
    models = list(dict.fromkeys(row.model for row in rows))
    devices = list(dict.fromkeys(row.device_name for row in rows if row.device_name))
    ok = sum(row.status == "ok" for row in rows)
    dates = sorted(row.started_at[:10] for row in rows if row.started_at)
    summary = [
        f"{len(rows)} rows, {ok} ok",
        f"{len({row.method for row in rows})} methods",
        "models: " + ", ".join(models),
        "devices: " + (", ".join(devices) or "unknown"),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
    ]
    parts = {
        "policy": POLICY,
        "title": f"KVGauge: {', '.join(models)[:120]}",
        "summary": " · ".join(filter(None, summary)),
        "loss": f"{DEFAULT_LOSS:g}",
        "chosen": f"{found[0].title}; {DEFAULT_LOSS:g} points; {GOALS['bytes'].text}",
    }
    limits = ["as good as possible", *(f"at most {limit:.0%} of full" for limit in LIMITS[1:])]
    markup = {
        "views": _options(range(len(found)), [view.title for view in found]),
        "goals": _options(GOALS, [goal.text for goal in GOALS.values()]),
        "limits": _options(map(_limit_key, LIMITS), limits),
        "advice": _advice(advise(found[0], DEFAULT_LOSS)),
        "legend": "".join(
            f'<li><span style="color:{style.colour(method)}" aria-hidden="true">{style.glyph(method)}</span> '
            f"{html.escape(method)}</li>"
            for method in ["full", *style.methods]
        ),
        "charts": "".join(_figure(*chart) for chart in VIEW_CHARTS),
        "shared": "".join(_figure(name, heading, caption) for name, heading, caption, _ in shared),
        "filters": _filters(rows),
        "table": _table(entries),
        "glossary": _glossary(rows),
        "notes": "".join(f"<li>{html.escape(note)}</li>" for note in loaded.notes),
        "data": script_json(data),
        "css": (HERE / "page.css").read_text(),
        "plotly": get_plotlyjs(),
        "js": (HERE / "page.js").read_text(),
    }
    template = (HERE / "page.html").read_text()
    # one pass over the template: what a row contributes is never searched for placeholders again
    return "".join(_filled(piece, parts, markup) for piece in template.split("{{"))


def _filled(piece: str, parts: dict[str, str], markup: dict[str, str]) -> str:
    """`name}}rest` with the name replaced: text from parts escaped, markup as it is."""
    name, closed, rest = piece.partition("}}")
    if not closed:
        return piece
    return (markup[name] if name in markup else html.escape(parts[name])) + rest


def script_json(data) -> str:
    """JSON that cannot end its script element, whatever the strings hold."""
    line = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return line.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _limit_key(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:g}"


def _view(view: View, all_views: list[View], style: charts.Style) -> dict:
    """Charts of one view, and its advice for every goal, limit and wanted loss."""
    same = ("model", "device", "batch_size", "task", "question")
    lengths = [other for other in all_views if all(getattr(other, name) == getattr(view, name) for name in same)]
    drawn = {name: charts.pareto(view, name, style) for name in charts.PARETO}
    drawn |= {
        "ledger": charts.ledger(view),
        "sparsity": charts.latency_by_sparsity(view, style),
        "context": charts.latency_by_context(lengths, "tpot_ms_p50", style),
        "ttft_context": charts.latency_by_context(lengths, "ttft_ms", style),
    }
    texts: dict[Advice, int] = {}
    advice = {
        goal: {
            _limit_key(limit): [[loss, texts.setdefault(one, len(texts))] for loss, one in steps(view, goal, limit)]
            for limit in LIMITS
        }
        for goal in GOALS
    }
    # sentences recur in many texts: each is stored once
    lines: dict[str, int] = {}
    numbered = [
        vars(one)
        | {name: [lines.setdefault(line, len(lines)) for line in getattr(one, name)] for name in ("reasons", "refused")}
        for one in texts
    ]
    return {"charts": drawn, "advice": advice, "texts": numbered, "lines": list(lines)}


def _shared_charts(loaded: Loaded, style: charts.Style) -> list[tuple[str, str, str, dict]]:
    found = []
    if figure := charts.predicted(loaded.entries, style):
        off = charts.largest_deviation(loaded.entries)
        caption = f"All rows of this page; on the line is a perfect prediction. Largest deviation: {off:.2f} %."
        found.append(("predicted", "Measured against predicted KV bytes", caption, figure))
    for name, calibration in loaded.calibrations:
        for title, figure in charts.heat_maps(name, calibration):
            caption = "How well a layer's choice of tokens serves the others: bright is good."
            found.append((f"heat{len(found)}", f"Which layer can choose: {title}", caption, figure))
    return found


def _figure(name: str, heading: str, caption: str) -> str:
    heading, caption = html.escape(heading), html.escape(caption)
    return (
        f'<figure id="chart-{name}"><h3>{heading}</h3>'
        f'<div class="plot" role="img" aria-label="{heading}. {caption} The numbers are in the table of all rows."></div>'
        f'<p class="none" hidden>Not measured in this view.</p><figcaption>{caption}</figcaption></figure>'
    )


def _options(values, texts: list[str]) -> str:
    pairs = zip(values, texts, strict=True)
    return "".join(f'<option value="{html.escape(str(value))}">{html.escape(text)}</option>' for value, text in pairs)


def _advice(advice: Advice) -> str:
    """The default advice as markup: readable without the script; page.js builds the same from the embedded texts."""
    command = f"<pre><code>{html.escape(advice.command)}</code></pre>" if advice.command else ""
    reasons = "".join(f"<li>{html.escape(line)}</li>" for line in advice.reasons)
    refused = "".join(f"<li>{html.escape(line)}</li>" for line in advice.refused)
    return f'<p class="verdict {advice.verdict}">{html.escape(advice.headline)}</p>{command}<ul>{reasons}</ul>' + (
        f"<details><summary>Not taken: {len(advice.refused)}</summary><ul>{refused}</ul></details>" if refused else ""
    )


COLUMNS = (
    # heading, text, value to sort by
    ("model", lambda row: row.model, lambda row: row.model),
    ("task", lambda row: f"{row.task} {row.question}".strip(), lambda row: f"{row.task} {row.question}"),
    ("context", lambda row: tokens(row.context_len), lambda row: row.context_len),
    ("batch", lambda row: str(row.batch_size), lambda row: row.batch_size),
    ("KV held", lambda row: size(row.kv_resident_bytes), lambda row: row.kv_resident_bytes),
    ("of full", lambda row: percent(row.kv_kept_ratio), lambda row: row.kv_kept_ratio),
    ("memory", lambda row: row.memory_class, lambda row: row.memory_class),
    ("read per step", lambda row: size(row.kv_read_bytes_per_step), lambda row: row.kv_read_bytes_per_step),
    ("peak decode", lambda row: size(row.peak_decode_bytes), lambda row: row.peak_decode_bytes),
    ("TTFT", lambda row: ms(row.ttft_ms), lambda row: row.ttft_ms),
    ("TPOT p50", lambda row: ms(row.tpot_ms_p50), lambda row: row.tpot_ms_p50),
    ("tokens/s", lambda row: number(row.decode_tokens_per_s), lambda row: row.decode_tokens_per_s),
    ("x bound", lambda row: plain(None) if row.bound_ratio is None else f"{row.bound_ratio:.1f}", lambda row: row.bound_ratio),
    ("accuracy", lambda row: _accuracy(row), lambda row: row.accuracy),
    ("samples", lambda row: plain(row.num_samples), lambda row: row.num_samples),
    ("perplexity", lambda row: number(row.perplexity), lambda row: row.perplexity),
    ("KL, nats", lambda row: number(row.kl_nats), lambda row: row.kl_nats),
    ("device", lambda row: row.device_name, lambda row: row.device_name),
)
TEXT_COLUMNS = ("model", "task", "memory", "device")
FILTERS = ("method", "model", "task", "question", "context_len", "batch_size", "memory_class", "status", "flag", "device_name")


def _accuracy(row) -> str:
    error = "" if row.accuracy_stderr is None else f" ± {row.accuracy_stderr:.3f}"
    return plain(None) if row.accuracy is None else f"{row.accuracy:.3f}{error}"


def _filters(rows: list) -> str:
    """One select per column that holds more than one value."""
    made = []
    for name in FILTERS:
        values = (
            {flag for row in rows for flag in row.flags} | {"none"} if name == "flag" else {getattr(row, name) for row in rows}
        )
        values -= {""}
        if len(values) < 2:
            continue
        options = "".join(
            f"<option>{html.escape(str(value))}</option>" for value in sorted(values, key=lambda v: (str(type(v)), v))
        )
        made.append(
            f'<label>{name.replace("_", " ")} <select data-filter="{name}"><option value="">all</option>'
            f"{options}</select></label>"
        )
    return "".join(made)


def _table(entries: list[Entry]) -> str:
    rows = [entry.row for entry in entries]
    used = [column for column in COLUMNS if any(column[2](row) not in (None, "") for row in rows)]
    names = ["method", "status and flags", *(name for name, _, _ in used), "reproduce"]
    head = "".join(
        f'<th scope="col"{" class=text" if name in (*TEXT_COLUMNS, "method", "status and flags") else ""}>'
        f'<button type="button" data-sort="{place}">{html.escape(name)}</button></th>'
        if name != "reproduce"
        else '<th scope="col" class="text">reproduce</th>'
        for place, name in enumerate(names)
    )
    labelled = zip(rows, config_labels(rows), strict=True)
    order = sorted(labelled, key=lambda pair: (_cell(pair[0]), not is_full(pair[0]), pair[1]))
    lines = [_line(row, label, used) for row, label in order]
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"


def _cell(row) -> tuple:
    return (row.model, devices(row), row.context_len, row.batch_size, row.task, row.question)


def _line(row, label: str, used: list) -> str:
    def cell(text: str, value=None, is_text: bool = False) -> str:
        sort_by = "" if value is None else html.escape(str(value))
        return f'<td data-v="{sort_by}"{" class=text" if is_text else ""}>{html.escape(text)}</td>'

    facts = {name: getattr(row, name) for name in FILTERS if name != "flag"} | {"flag": " ".join(row.flags) or "none"}
    attributes = "".join(f' data-{name.replace("_", "-")}="{html.escape(str(value))}"' for name, value in facts.items())
    words = "".join(
        f'<span class="flag" title="{html.escape(FLAG_TEXTS.get(flag, "see docs"))}">{html.escape(flag)}</span> '
        for flag in row.flags
    )
    error = f'<span class="error">{html.escape(row.error)}</span>' if row.error else ""
    status, kind = html.escape(row.status), "ok" if row.status == "ok" else "bad"
    state = f'<td class="text state" data-v="{status}"><span class="status {kind}">{status}</span> {words}{error}</td>'
    command = html.escape(row.reproduce)
    copy = (
        f'<td class="text"><button type="button" class="copy" data-copy="{command}" '
        f'aria-label="copy the command of {html.escape(label)}">copy</button>'
        f"<details><summary>command</summary><code>{command}</code></details></td>"
    )
    head = f'<th scope="row" class="text" data-v="{html.escape(label)}">{html.escape(label)}</th>'
    cells = "".join(cell(shown(row), value(row), name in TEXT_COLUMNS) for name, shown, value in used)
    return f"<tr{attributes}>{head}{state}{cells}{copy}</tr>"


def _glossary(rows: list) -> str:
    """What the words of these rows mean; only those that occur."""
    words = {row.status: STATUS_TEXTS.get(row.status, "see docs") for row in rows}
    words |= {flag: FLAG_TEXTS.get(flag, "see docs") for row in rows for flag in row.flags}
    words |= {row.memory_class: MEMORY_TEXTS.get(row.memory_class, "") for row in rows}
    words |= {f"question {row.question}": QUESTION_TEXTS.get(row.question, "") for row in rows if row.question}
    return "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in words.items())
