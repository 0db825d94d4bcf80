"""Charts: valid Plotly figures, a front that is right by brute force, one look per method, labels that do not overlap."""

import itertools
import json
import random

import pytest

from harness.report import charts
from harness.report.advice import views
from harness.report.rows import Entry
from tests.report.conftest import HOSTILE, METHODS, make_row, stress_rows

graph_objects = pytest.importorskip("plotly.graph_objects")


@pytest.fixture(scope="module")
def stress():
    entries = [Entry(row) for row in stress_rows()]
    return entries, views(entries), charts.Style([entry.row.method for entry in entries])


def drawn(view, style):
    yield from (charts.pareto(view, name, style) for name in charts.PARETO)
    yield charts.ledger(view)
    yield charts.latency_by_sparsity(view, style)
    yield charts.latency_by_context([view], "tpot_ms_p50", style)


def validated(figure):
    """Plotly's own check of every property; colours are CSS variables until the page draws them."""
    text = json.dumps(figure, allow_nan=False)
    for word in {word for word in text.split('"') if word.startswith("var(--")}:
        text = text.replace(word, "#123456")
    return graph_objects.Figure(json.loads(text))


def test_every_chart_is_a_valid_plotly_figure(stress):
    entries, found, style = stress
    full_views = [view for view in found if view.full]
    num_drawn = 0
    for view in full_views[:3] + found[-2:]:
        for figure in filter(None, drawn(view, style)):
            validated(figure)
            num_drawn += 1
    validated(charts.predicted(entries, style))
    same = [view for view in full_views if (view.task, view.question) == ("niah", "visible")]
    for metric in ("tpot_ms_p50", "ttft_ms"):
        validated(charts.latency_by_context(same, metric, style))
    assert num_drawn >= 15


@pytest.mark.parametrize("more_is_better", [True, False], ids=["rate", "cost"])
def test_front_by_brute_force(more_is_better):
    rng = random.Random(0)
    for _ in range(50):
        points = [(rng.randrange(6), rng.randrange(6)) for _ in range(12)]
        sign = 1 if more_is_better else -1
        expected = {
            i
            for i, (x, y) in enumerate(points)
            if not any((sign * a >= sign * x and b >= y) and (a, b) != (x, y) for a, b in points)
        }
        assert set(charts.front(points, more_is_better)) == expected


def test_barred_rows_are_hollow_and_not_on_the_front():
    noop = make_row("window", 0.5, accuracy=1.0, flags=["noop"])
    view = views([Entry(row) for row in (make_row(accuracy=0.95), noop, make_row("sparda", 0.8, accuracy=0.9))])[0]
    line, *methods = charts.pareto(view, "kept", charts.Style(["window", "sparda", "full"]))["data"]
    assert (line["mode"], line["x"], line["y"]) == ("lines", [pytest.approx(20), 100], [0.9, 0.95])
    symbols = {trace["name"]: trace["marker"]["symbol"] for trace in methods}
    assert symbols["window"][0].endswith("-open") and not symbols["sparda"][0].endswith("-open")
    assert symbols["full"] == ["star"]


def test_times_that_are_no_measurement_are_hollow():
    noisy = make_row("window", 0.5, flags=["noisy"])
    view = views([Entry(row) for row in (make_row(), noisy, make_row("window", 0.8))])[0]
    data = charts.latency_by_sparsity(view, charts.Style(["window"]))["data"]
    symbols = {trace["name"]: trace["marker"]["symbol"] for trace in data if "name" in trace}
    assert symbols == {"full": ["star"], "window": ["circle-open", "circle"]}


def test_one_colour_and_symbol_per_method():
    style = charts.Style([*METHODS, "full"])
    looks = [(style.colour(method), style.symbol(method)) for method in METHODS]
    assert len(set(looks)) == len(METHODS)
    assert len({style.colour(method) for method in METHODS}) == charts.NUM_COLOURS
    assert style.colour("full") == charts.INK


def test_labels_do_not_cover_each_other():
    rng = random.Random(1)
    points = [(rng.random(), rng.random(), "method 0.8") for _ in range(60)]
    spots = charts.place_labels(points)
    boxes = []
    for (x, y, label), spot in zip(points, spots, strict=True):
        if spot:
            across, up = charts.PLACES[spot]
            left = x + across * len(label) * charts.LETTER
            boxes.append((left, left + len(label) * charts.LETTER, y + (up - 0.5) * charts.LINE, y + (up + 0.5) * charts.LINE))
    overlaps = [
        pair
        for pair in itertools.combinations(boxes, 2)
        if pair[0][0] < pair[1][1] - 0.05
        and pair[1][0] < pair[0][1] - 0.05
        and pair[0][2] < pair[1][3]
        and pair[1][2] < pair[0][3]
    ]
    assert overlaps == []
    assert 5 < len(boxes) < 60


@pytest.mark.parametrize("values, kind", [([1, 30], "log"), ([1, 15], None), ([0, 30], None)], ids=["wide", "narrow", "zero"])
def test_log_scale_where_the_range_demands_it(values, kind):
    axis = charts.scale(values, "time, ms")
    assert axis.get("type") == kind
    assert ("log scale" in axis["title"]) == (kind == "log")
    assert 0 <= charts.place_in(axis, values[0]) if values[0] else True
    assert charts.place_in(axis, values[1]) <= 1


def test_ledger_adds_up_to_what_is_held():
    row = make_row("sparda", 0.8)
    figure = charts.ledger(views([Entry(make_row()), Entry(row)])[0])
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    place = bars[0]["y"].index("sparda 0.8")
    held = sum(trace["x"][place] for trace in bars if trace["name"] != "headroom") * 2**30
    assert held == pytest.approx(row.kv_resident_bytes)
    tick = next(trace for trace in figure["data"] if trace["type"] == "scatter")
    assert tick["x"][place] * 2**30 == pytest.approx(row.kv_predicted_bytes)


def test_texts_from_rows_are_no_markup():
    rows = [make_row(method=HOSTILE), make_row(flags=["<b>noop</b>"])]
    entries = [Entry(row) for row in rows]
    style = charts.Style([row.method for row in rows])
    for figure in filter(None, [*drawn(views(entries)[0], style), charts.predicted(entries, style)]):
        text = json.dumps(figure)
        assert "<script" not in text and "<img" not in text and "<b>noop" not in text


def test_heat_map_of_layers_and_of_lengths():
    layers = [[1.0, 0.5], [0.5, 1.0]]
    lengths = [[0.1, 0.2, 0.3], [0.4, None, 0.6]]
    found = charts.heat_maps("cal", {"iou": layers, "recall": lengths, "lengths": [512, 1024, 4096]})
    assert [title for title, _ in found] == ["iou (cal)", "recall (cal)"]
    assert found[1][1]["data"][0]["x"] == ["512", "1k", "4k"]
    for _, figure in found:
        validated(figure)
