"""Plotly figures as plain dicts (data and layout), drawn by page.js; colours name CSS variables, so that they follow the theme.

One colour and symbol per method in every chart; full is always a black (in the dark white) star. Texts are escaped here: Plotly
reads them as HTML.
"""

import html
import math
from collections import Counter

from harness.report.advice import ALL_TASKS, Candidate, View
from harness.report.rows import HEAT_KEYS, Entry, matrices
from harness.report.text import ms, number, percent, size, tokens

NUM_COLOURS = 7  # --m0 ... --m6 in page.css, safe for colour-blind eyes; symbols tell the eighth from the first
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "pentagon",
    "hexagon",
    "x",
    "triangle-left",
    "triangle-right",
)
GLYPHS = ("●", "■", "◆", "▲", "▼", "✚", "⬟", "⬢", "✖", "◀", "▶")
NUM_KINDS = 6
INK, SOFT = "var(--ink)", "var(--soft)"


class Style:
    """Colour and symbol of each method, the same on the whole page."""

    def __init__(self, methods: list[str]):
        self.methods = sorted(set(methods) - {"full"})

    def colour(self, method: str) -> str:
        return INK if method == "full" else f"var(--m{self.methods.index(method) % NUM_COLOURS})"

    def symbol(self, method: str) -> str:
        return "star" if method == "full" else SYMBOLS[self.methods.index(method) % len(SYMBOLS)]

    def glyph(self, method: str) -> str:
        return "★" if method == "full" else GLYPHS[self.methods.index(method) % len(GLYPHS)]


def text(value) -> str:
    """Plotly renders a little HTML in its texts: none may come from a row."""
    return html.escape(str(value), quote=False)


def figure(data: list[dict], x: dict, y: dict, **layout) -> dict:
    axis = {
        "gridcolor": "var(--grid)",
        "zeroline": False,
        "linecolor": "var(--grid)",
        "automargin": True,
        "title": {"standoff": 8},
    }
    for own in (x, y):
        own["title"] = axis["title"] | {"text": own["title"]} if "title" in own else axis["title"]
    base = {
        "xaxis": axis | x,
        "yaxis": axis | y,
        "margin": {"l": 56, "r": 24, "t": 12, "b": 48},
        "showlegend": False,
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 12},
        "hoverlabel": {"bgcolor": "var(--paper)", "font": {"color": INK}, "align": "left"},
    }
    return {"data": data, "layout": base | layout}


def scale(values: list[float], title: str, from_zero: bool = False, pad: float = 0.08) -> dict:
    """Axis with its range spelled out, logarithmic where the values span more than a factor of 20."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 20:
        span = math.log10(high / low) * pad
        ends = [math.log10(low) - span, math.log10(high) + span]
        return {"title": f"{title}, log scale", "type": "log", "range": ends, "dtick": 1 if high / low > 200 else "D2"}
    # a narrow cloud is not blown up: what is shown spans a fifth of its largest value at least
    span = max(high - low, 0.2 * high) * pad
    middle, half = (low + high) / 2, max(high - low, 0.2 * high) / 2
    return {"title": title, "range": [0 if from_zero else max(0, middle - half - span), middle + half + span if high else 1]}


def place_in(axis: dict, value: float) -> float:
    """Where on the axis a value lies, 0 to 1."""
    low, high = axis["range"]
    return ((math.log10(value) if axis.get("type") == "log" else value) - low) / (high - low)


# a chart is about 330 px wide and 270 px high inside its axes; a letter 6.2 px wide, a line 14 px high
LETTER, LINE = 6.2 / 330, 14 / 270
PLACES = {"top center": (-0.5, 0.9), "bottom center": (-0.5, -0.9), "middle right": (0, 0), "middle left": (-1, 0)}


def place_labels(points: list[tuple[float, float, str]], others: list[tuple[float, float]] = ()) -> list[str | None]:
    """Where the label of each point (x and y in 0 to 1, text) goes without covering another; None where there is no room.

    Earlier points choose first; the symbols of all points, and of `others` that have no label, are kept free.
    """
    symbols = [(x, y) for x, y, _ in points] + list(others)
    taken = [(x - 0.012, x + 0.012, y - 0.018, y + 0.018) for x, y in symbols]
    chosen = []
    for x, y, label in points:
        width = len(label) * LETTER
        for name, (across, up) in PLACES.items():
            left = x + across * width + (0.025 if across == 0 else -0.025 if across == -1 else 0)
            middle = y + up * LINE
            box = (left, left + width, middle - LINE / 2, middle + LINE / 2)
            inside = -0.05 <= box[0] and box[1] <= 1.06 and -0.02 <= box[2] and box[3] <= 1.04
            if inside and not any(
                box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3] for other in taken
            ):
                taken.append(box)
                chosen.append(name)
                break
        else:
            chosen.append(None)
    return chosen


def front(points: list[tuple[float, float]], more_is_better: bool) -> list[int]:
    """Indices of the points (x, accuracy) that no other one beats, ordered by x: at least as good in both, better in one."""

    def beats(one, other):
        gain = (one[0] - other[0]) * (1 if more_is_better else -1)
        return gain >= 0 and one[1] >= other[1] and (gain > 0 or one[1] > other[1])

    kept = [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]
    return sorted(kept, key=lambda i: points[i][0])


PARETO = {
    "kept": ("KV bytes held, % of the full cache", lambda one: _scaled(one.value("kv_kept_ratio"), 100), False),
    "rate": ("decode tokens per second", lambda one: one.value("decode_tokens_per_s"), True),
    "ttft": ("time to first token, ms", lambda one: one.value("ttft_ms"), False),
}


def pareto(view: View, name: str, style: Style) -> dict | None:
    """Accuracy against one cost; the front is a line, what may not be advised is hollow and not part of it."""
    title, value, more_is_better = PARETO[name]
    shown = [(one, value(one)) for one in view.candidates]
    shown = [(one, x) for one, x in shown if x is not None and one.accuracy is not None]
    if not shown:
        return None
    valid = [(one, x) for one, x in shown if not one.barred]
    best = [valid[i] for i in front([(x, one.accuracy) for one, x in valid], more_is_better)]
    what = "accuracy, mean of all tasks" if view.task == ALL_TASKS else f"accuracy, {view.task}"
    x_axis = scale([x for _, x in shown], title, from_zero=name == "kept")
    accuracies = [one.accuracy for one, _ in shown]
    pad = max(0.08, 0.12 * (max(accuracies) - min(accuracies)))
    y_axis = {"title": text(what), "range": [min(accuracies) - pad, max(accuracies) + pad]}
    # full and the front are named first, the rest where there is room
    order = sorted(shown, key=lambda pair: (not pair[0].is_full, not any(pair[0] is one for one, _ in best), pair[1]))
    spots = place_labels([(place_in(x_axis, x), place_in(y_axis, one.accuracy), one.label) for one, x in order])
    spot_of = {id(one): spot for (one, _), spot in zip(order, spots, strict=True)}
    data = []
    if len(best) > 1:
        line = {"x": [x for _, x in best], "y": [one.accuracy for one, _ in best], "mode": "lines", "hoverinfo": "skip"}
        data.append(
            line | {"type": "scatter", "line": {"color": SOFT, "width": 1.5, "shape": "vh" if more_is_better else "hv"}}
        )
    for method in dict.fromkeys(one.method for one, _ in shown):
        members = [(one, x) for one, x in shown if one.method == method]
        ones = [one for one, _ in members]
        data.append(_points([x for _, x in members], [one.accuracy for one in ones], ones, spot_of, style))
        data[-1]["error_y"] = {
            "array": [2 * (one.stderr or 0) for one in ones],
            "thickness": 1,
            "width": 2,
            "color": style.colour(method),
        }
    return figure(data, x_axis, y_axis)


def _points(xs: list, ys: list, ones: list[Candidate], spot_of: dict[int, str | None], style: Style) -> dict:
    """Trace of one method's candidates: hollow where they may not be advised, labels where there is room."""
    method = ones[0].method
    colour = style.colour(method)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": text(method),
        "x": xs,
        "y": ys,
        "marker": {
            "color": colour,
            "symbol": [style.symbol(method) + ("-open" if one.barred else "") for one in ones],
            "size": 15 if method == "full" else 10,
            "line": {"width": 1.5, "color": colour},
        },
        "text": [text(one.label) if spot_of.get(id(one)) else "" for one in ones],
        "textposition": [spot_of.get(id(one)) or "top center" for one in ones],
        "textfont": {"color": colour, "size": 11},
        "hovertext": [_hover(one) for one in ones],
        "hoverinfo": "text",
        "cliponaxis": False,
    }


def _hover(one: Candidate) -> str:
    row = one.row
    error = "" if one.stderr is None else f" ± {one.stderr:.3f}"
    num_samples = sum(entry.row.num_samples or 0 for entry in one.entries)
    lines = [
        f"<b>{text(one.label)}</b>",
        f"accuracy {number(one.accuracy)}{error}, {num_samples} samples",
        f"KV held {size(one.value('kv_resident_bytes'))}, {percent(one.value('kv_kept_ratio'))} ({text(row.memory_class)})",
        f"per token {ms(one.value('tpot_ms_p50'))}, {number(one.value('decode_tokens_per_s'))} tokens/s",
        f"first token {ms(one.value('ttft_ms'))}",
    ]
    if len(one.gaps) > 1 and (worst := one.worst):
        task = next(task for task, gap in one.gaps.items() if gap is worst)
        lines.append(f"worst task {text(task)}: {worst.points:+.1f} points")
    lines += [f"! {text(flag)}" for flag in one.flags]
    return "<br>".join(lines)


def ledger(view: View) -> dict | None:
    """Bytes held after prefill by kind, one bar per candidate, full first; the tick is what the method predicted."""
    shown = [one for one in view.candidates if one.row.kv_ledger]
    if not shown:
        return None
    shown.sort(key=lambda one: (one.is_full, one.value("kv_resident_bytes") or 0))
    kinds = dict.fromkeys(kind for one in shown for kind in one.row.kv_ledger)
    order = sorted(kinds, key=lambda kind: (kind == "headroom", -sum(one.row.kv_ledger.get(kind, 0) for one in shown)))
    unit, name = _unit(max(sum(one.row.kv_ledger.values()) for one in shown))
    labels = [text(one.label) for one in shown]
    data = []
    for number_, kind in enumerate(order):
        fill = {"color": "var(--headroom)" if kind == "headroom" else f"var(--k{min(number_, NUM_KINDS - 1)})"}
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": text(kind),
                "y": labels,
                "x": [one.row.kv_ledger.get(kind, 0) / unit for one in shown],
                "marker": fill | ({"pattern": {"shape": "/", "fgcolor": SOFT, "size": 5}} if kind == "headroom" else {}),
                "hovertext": [f"{text(one.label)}<br>{text(kind)} {size(one.row.kv_ledger.get(kind, 0))}" for one in shown],
                "hoverinfo": "text",
            }
        )
    known = [one for one in shown if one.row.kv_predicted_bytes]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "predicted, without headroom",
            "y": [text(one.label) for one in known],
            "x": [one.row.kv_predicted_bytes / unit for one in known],
            "marker": {"symbol": "line-ns", "size": 16, "line": {"width": 2, "color": INK}},
            "hovertext": [f"{text(one.label)}<br>predicted {size(one.row.kv_predicted_bytes)}" for one in known],
            "hoverinfo": "text",
        }
    )
    y = {"type": "category", "dtick": 1, "tickfont": {"size": 11}, "range": [-0.7, len(shown) - 0.3]}
    legend = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"}
    layout = {"barmode": "stack", "showlegend": True, "legend": legend, "height": 190 + 18 * len(shown), "bargap": 0.25}
    return figure(data, {"title": f"bytes held, {name}", "rangemode": "tozero"}, y, **layout)


def latency_by_sparsity(view: View, style: Style) -> dict | None:
    """Time per token against the share of bytes gone, with each row's bandwidth bound below it."""
    shown = [one for one in view.candidates if one.value("tpot_ms_p50") is not None and one.value("kv_kept_ratio") is not None]
    points = [(_scaled(1 - one.value("kv_kept_ratio"), 100), one) for one in shown]
    title = "KV bytes gone, % of the full cache"
    return _latency(points, view.full, "tpot_ms_p50", {"title": title, "range": [-4, 104]}, style, lambda one: one.method)


def latency_by_context(views: list[View], metric: str, style: Style) -> dict | None:
    """A time against the context, one line per method and knobs; views differ only in their context."""
    known = [view for view in views if view.context_len > 0]
    points = [(view.context_len, one) for view in known for one in view.candidates if one.value(metric)]
    # a method that was measured at one length makes no line
    per_label = Counter(one.label for _, one in points)
    points = [(length, one) for length, one in points if per_label[one.label] > 1]
    lengths = sorted({length for length, _ in points})
    if not lengths:
        return None
    ticks = {"tickvals": lengths, "ticktext": [tokens(length) for length in lengths]}
    x = {
        "title": "context, tokens, log scale",
        "type": "log",
        "range": [math.log10(lengths[0]) - 0.1, math.log10(lengths[-1]) + 0.35 * math.log10(lengths[-1] / lengths[0])],
    }
    return _latency(points, None, metric, x | ticks, style, lambda one: one.label)


def _latency(
    points: list[tuple[float, Candidate]], full: Candidate | None, metric: str, x: dict, style: Style, line_of
) -> dict | None:
    """Solid lines and symbols are measured (median, whisker to p95), dots of the same colour the bandwidth bound."""
    points = [(x_value, one) for x_value, one in points if one.value(metric)]
    if not points:
        return None
    bound = "bound_ms_per_step" if metric == "tpot_ms_p50" else None
    values = [one.value(name) for _, one in points for name in (metric, bound) if name and one.value(name)]
    label = {"tpot_ms_p50": "time per token, ms", "ttft_ms": "time to first token, ms"}[metric]
    y = scale(values, label)
    lines: dict[str, list[tuple[float, Candidate]]] = {}
    for x_value, one in sorted(points, key=lambda point: point[0]):
        lines.setdefault(line_of(one), []).append((x_value, one))
    # the last point of a line carries its name, the longest lines first
    order = sorted(lines, key=lambda name: (not lines[name][-1][1].is_full, -len(lines[name])))
    ends = [(place_in(x, lines[name][-1][0]), place_in(y, lines[name][-1][1].value(metric)), name) for name in order]
    inner = [(place_in(x, x_value), place_in(y, one.value(metric))) for line in lines.values() for x_value, one in line[:-1]]
    spots = dict(zip(order, place_labels(ends, inner), strict=True))
    data = []
    for name, members in lines.items():
        colour = style.colour(members[0][1].method)
        xs, ones = [x_value for x_value, _ in members], [one for _, one in members]
        if bound:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": xs,
                    "y": [one.value(bound) for one in ones],
                    "line": {"color": colour, "width": 1.5, "dash": "dot"},
                    "marker": {"color": colour, "symbol": "line-ew", "size": 12, "line": {"width": 2, "color": colour}},
                    "hovertext": [f"{text(one.label)}<br>bandwidth bound {ms(one.value(bound))}" for one in ones],
                    "hoverinfo": "text",
                }
            )
        trace = _points(xs, [one.value(metric) for one in ones], ones, {}, style)
        # hollow too where the time itself is no sound measurement
        shaky = [bool(one.barred or {"noisy", "short_decode"} & {*one.flags}) for one in ones]
        trace["marker"]["symbol"] = [style.symbol(ones[0].method) + "-open" * hollow for hollow in shaky]
        trace |= {"mode": "lines+markers+text", "line": {"color": colour, "width": 2}}
        if spots[name]:
            trace["text"][-1], trace["textposition"] = text(name), spots[name]
        else:
            trace["textposition"] = "top center"
        if bound:
            whisker = [max(0, (one.value("tpot_ms_p95") or one.value(metric)) - one.value(metric)) for one in ones]
            trace["error_y"] = {"array": whisker, "symmetric": False, "thickness": 1, "width": 2, "color": colour}
        data.append(trace)
    layout = {}
    if full is not None and full.value(metric) is not None:
        level = full.value(metric)
        line = {"color": INK, "width": 1, "dash": "dash"}
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level, "line": line}]
    return figure(data, x, y, **layout)


def predicted(entries: list[Entry], style: Style) -> dict | None:
    """Measured against predicted KV bytes of all rows; the diagonal is a perfect prediction."""
    shown = [entry.row for entry in entries if entry.row.kv_predicted_bytes and entry.row.kv_resident_bytes]
    if not shown:
        return None
    unit, name = _unit(max(row.kv_resident_bytes for row in shown))
    ends = [
        min(row.kv_predicted_bytes for row in shown) / unit * 0.8,
        max(row.kv_predicted_bytes for row in shown) / unit * 1.25,
    ]
    data = [
        {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "line": {"color": SOFT, "width": 1}, "hoverinfo": "skip"}
    ]
    for method in dict.fromkeys(row.method for row in shown):
        members = [row for row in shown if row.method == method]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [row.kv_predicted_bytes / unit for row in members],
                "y": [row.kv_resident_bytes / unit for row in members],
                "marker": {"color": style.colour(method), "symbol": style.symbol(method), "size": 9},
                "name": text(method),
                "hovertext": [
                    f"<b>{text(row.method)}</b> {text(row.model)}, {tokens(row.context_len)}, batch {row.batch_size}"
                    f"<br>predicted {size(row.kv_predicted_bytes)}<br>measured {size(row.kv_resident_bytes)}, "
                    f"{_deviation(row):+.2f} %"
                    for row in members
                ],
                "hoverinfo": "text",
            }
        )
    log = {"type": "log"} if ends[1] / ends[0] > 20 else {}
    suffix = ", log scale" if log else ""
    return figure(data, {"title": f"predicted, {name}{suffix}"} | log, {"title": f"measured, {name}{suffix}"} | log)


def largest_deviation(entries: list[Entry]) -> float | None:
    """Of measured from predicted KV bytes, in percent."""
    found = [abs(_deviation(one.row)) for one in entries if one.row.kv_predicted_bytes and one.row.kv_resident_bytes]
    return max(found, default=None)


def _deviation(row) -> float:
    return (row.kv_resident_bytes / row.kv_predicted_bytes - 1) * 100


def heat_maps(name: str, calibration: dict) -> list[tuple[str, dict]]:
    """Every matrix of a calibration file: layers downwards, whatever its file names across."""
    found = []
    for title, matrix in matrices(calibration).items():
        num_columns = len(matrix[0])
        across = next(
            (calibration[key] for key in ("lengths", "context_lens") if len(calibration.get(key) or ()) == num_columns), None
        )
        x = {
            "title": "context, tokens" if across else "layer" if len(matrix) == num_columns else "column",
            "constrain": "domain",
        }
        trace = {
            "type": "heatmap",
            "z": matrix,
            "x": [tokens(value) if isinstance(value, int) else text(value) for value in across]
            if across
            else list(range(num_columns)),
            "y": list(range(len(matrix))),
            "colorscale": "Cividis",
            "colorbar": {
                "title": {"text": next(word for word in HEAT_KEYS if word in title.lower())},
                "thickness": 12,
                "outlinewidth": 0,
            },
            "hovertemplate": "layer %{y}, %{x}<br>%{z:.3f}<extra></extra>",
        }
        if across:
            x["type"] = "category"
        found.append((f"{title} ({name})", figure([trace], x, {"title": "layer", "autorange": "reversed"}, height=440)))
    return found


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def _unit(value: float) -> tuple[int, str]:
    return next(((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if value >= unit), (1, "B"))
