"""The page without a browser: valid structure, all rows, nothing from outside, nothing from a row that could act."""

import html.parser
import json
import re

import pytest

pytest.importorskip("plotly")

from harness.report.__main__ import main  # noqa: E402
from harness.report.page import page, script_json  # noqa: E402
from harness.report.rows import load  # noqa: E402
from harness.results import FLAGS, STATUSES  # noqa: E402
from tests.report.conftest import HOSTILE, make_row, stress_rows, write_rows  # noqa: E402

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Parsed(html.parser.HTMLParser):
    """Elements with their attributes and text; unclosed or crossed elements are collected."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.wrong, self.elements, self.rows = [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2] += data

    def all(self, tag):
        return [(attributes, text.strip()) for name, attributes, text in self.elements if name == tag]


@pytest.fixture(scope="module")
def stress_page(stress_folder):
    text = page(load([stress_folder]))
    return text, Parsed(text)


def test_structure_is_valid(stress_page):
    _, parsed = stress_page
    assert parsed.wrong == []
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["aria-labelledby"] for _, attributes, _ in parsed.elements if "aria-labelledby" in attributes}
    assert labels <= set(ids)
    assert [text for _, text in parsed.all("h1")] == ["KVGauge report"]
    # one script holds data, one Plotly, one the page's own code: embedded once
    assert len(parsed.all("script")) == 3


def test_nothing_is_fetched(stress_page):
    text, parsed = stress_page
    addresses = [
        value
        for _, attributes, _ in parsed.elements
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "poster", "srcset") and value
    ]
    assert addresses == ["#rows"]
    style = "".join(text for _, text in parsed.all("style"))
    assert "url(" not in style and "@import" not in style
    policy = next(attributes["content"] for attributes, _ in parsed.all("meta") if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy and "http" not in policy


def test_every_row_is_there_with_its_command(stress_page):
    _, parsed = stress_page
    rows = stress_rows()
    assert len([1 for attributes, _ in parsed.all("tr") if "data-status" in attributes]) == len(rows)
    commands = [attributes["data-copy"] for attributes, _ in parsed.all("button") if "data-copy" in attributes]
    assert sorted(commands) == sorted(row.reproduce for row in rows)
    words = {text for attributes, text in parsed.all("span") if attributes.get("class") in ("flag", "status ok", "status bad")}
    assert words == {flag for row in rows for flag in row.flags} | {row.status for row in rows}
    assert words & set(FLAGS) and set(STATUSES) <= words


def test_a_hostile_name_stays_text(stress_page):
    text, parsed = stress_page
    assert parsed.all("img") == []
    assert HOSTILE not in text
    assert any(HOSTILE in attributes.get("data-model", "") for attributes, _ in parsed.all("tr"))
    assert [attributes for _, attributes, _ in parsed.elements if any(name.startswith("on") for name in attributes)] == []


def test_embedded_data_is_json_and_safe(stress_page):
    text, parsed = stress_page
    raw = next(text for attributes, text in parsed.all("script") if attributes.get("id") == "data")
    data = json.loads(raw)
    assert not set("<>&") & set(raw)
    options = re.search(r'<select id="view">(.*?)</select>', text, re.S).group(1)
    assert len(data["views"]) == options.count("<option") > 10
    for view in data["views"]:
        assert set(view["charts"]) <= {attributes["id"].removeprefix("chart-") for attributes, _ in parsed.all("figure")}
        for by_limit in view["advice"].values():
            for found in by_limit.values():
                assert found[0][0] == 0 and [loss for loss, _ in found] == sorted(loss for loss, _ in found)


@pytest.mark.parametrize("value", ["</script>", "<!--", "\u2028", "&lt;", 'a"b'], ids=repr)
def test_script_json_comes_back(value):
    text = script_json({value: value})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {value: value}


def test_advice_is_readable_without_script(stress_page):
    text, _ = stress_page
    shown = re.search(r'<div id="advice".*?</div>', text, re.S).group(0)
    assert re.search(r'class="verdict (use|keep|unknown)"', shown) and "<li>" in shown


def test_placeholders_in_a_row_are_not_filled(tmp_path):
    row = make_row(model="{{data}}", reproduce="python run.py '{{plotly}}'")
    text = page(load([write_rows(tmp_path, [row])]))
    assert "{{data}}" in text and text.count("{{plotly}}") == 2


def test_calibration_is_a_heat_map(stress_page):
    text, parsed = stress_page
    headings = [text for _, text in parsed.all("h3")]
    assert "Which layer can choose: iou (calibration)" in headings
    assert "Which layer can choose: recall 4096 (calibration)" in headings


def test_one_failed_row_makes_a_page(tmp_path):
    row = make_row(status="failed", error="no", kv_ledger={})
    for name, value in vars(row).items():
        if isinstance(value, float | int) and name not in ("context_len", "batch_size", "num_new_tokens", "seed", "tp_size"):
            setattr(row, name, None)
    assert Parsed(page(load([write_rows(tmp_path, [row])]))).wrong == []


def test_command_line(tmp_path, capsys):
    folder = write_rows(tmp_path / "rows", [make_row(), make_row("window", 0.5)])
    (folder / "broken.json").write_text("{")
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'page.html'}: 2 rows" in out and err.startswith("note: broken.json cannot be read")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_committed_example_is_a_page_of_real_rows():
    loaded = load(["docs/results/example"])
    assert loaded.notes == [] and len(loaded.entries) > 10
    assert all(entry.row.versions and entry.row.code_hash for entry in loaded.entries)
    assert {entry.row.method for entry in loaded.entries} >= {"full", "window", "sparda", "int8"}
    assert Parsed(page(loaded)).wrong == []
