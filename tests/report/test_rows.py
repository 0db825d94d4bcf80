"""Reading rows: every layout that the project writes, nothing that is no row, one name per method and knobs."""

import dataclasses
import json

import pytest

from harness.report.rows import config_labels, full_command, is_full, load, matrices, overrides_of, row_of
from harness.results import Row
from tests.report.conftest import make_row, write_rows


def test_all_layouts_are_read(tmp_path):
    rows = [make_row("window", sparsity) for sparsity in (0.5, 0.6, 0.7)]
    samples = [{"id": "a", "score": 1}]
    write_rows(tmp_path / "store", [rows[0]], {rows[0].config_hash: samples})
    cell = tmp_path / "sweep" / "0_method=window"
    cell.mkdir(parents=True)
    (cell / "row.json").write_text(rows[1].to_json())
    (cell / "samples.jsonl").write_text(json.dumps(samples[0]) + "\n")
    (tmp_path / "rows.jsonl").write_text(rows[2].to_json() + "\n\n")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "row.json").write_text(make_row().to_json())
    loaded = load([tmp_path])
    assert {entry.row.sparsity: entry.samples for entry in loaded.entries} == {0.5: samples, 0.6: samples, 0.7: []}
    assert loaded.notes == []


def test_the_newest_of_a_cell_measured_twice_counts(tmp_path):
    old, new = make_row(ttft_ms=1.0), make_row(ttft_ms=2.0, started_at="2026-12-02T00:00:00+00:00")
    elsewhere = make_row(ttft_ms=3.0, device_name="another GPU")
    (tmp_path / "rows.jsonl").write_text("\n".join(row.to_json() for row in (new, old, elsewhere)))
    loaded = load([tmp_path])
    assert sorted(entry.row.ttft_ms for entry in loaded.entries) == [2.0, 3.0]
    assert loaded.notes == ["1 older rows of cells that were measured again are left out"]


def test_what_is_no_row_is_named(tmp_path):
    write_rows(tmp_path, [make_row()])
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "wrong.json").write_text(json.dumps(make_row("window", 0.5).to_dict() | {"accuracy": "high"}))
    loaded = load([tmp_path])
    assert len(loaded.entries) == 1
    assert [note.split()[0].rstrip(":") for note in loaded.notes] == ["broken.json", "list.json", "other.json", "wrong.json"]
    assert "accuracy='high' is no value of a row" in loaded.notes[-1]


def test_a_row_of_another_version_is_read():
    values = make_row().to_dict() | {"of_tomorrow": 1}
    del values["knobs"]
    assert row_of(values) == dataclasses.replace(make_row(), knobs={})


def test_a_value_that_is_no_number_is_unknown(tmp_path):
    text = make_row(ttft_ms=123.5).to_json().replace("123.5", "NaN")
    (tmp_path / "row.json").write_text(text)
    assert load([tmp_path]).entries[0].row.ttft_ms is None


@pytest.mark.parametrize("name, words", [("nowhere", "does not exist"), ("", "no rows in")], ids=["missing", "empty"])
def test_nothing_to_read_is_one_line(tmp_path, name, words):
    with pytest.raises(ValueError, match=words) as err:
        load([tmp_path / name])
    assert "\n" not in str(err.value)


@pytest.mark.parametrize(
    "reproduce, fields, expected",
    [
        ("python run.py method=sparda sparsity=0.8 shape.context_len=4096", {}, "method=sparda sparsity=0.8"),
        ("python run.py", {}, "method=sparda sparsity=0.8"),
        (
            "python run.py kv_dtype=int8 'method.predict_layers=[1,2]'",
            {},
            "method=sparda kv_dtype=int8 'method.predict_layers=[1,2]' sparsity=0.8",
        ),
        ("python run.py method=sparda kv_budget=0.2", {"kv_budget": 0.2}, "method=sparda kv_budget=0.2"),
        (
            "python run.py method=sparda experiment=x",
            {"knobs": {"sparsity": 0.8, "predict_layers": [14, 15], "fuse": "max"}},
            "method=sparda 'method.predict_layers=[14,15]' method.fuse=max sparsity=0.8",
        ),
    ],
    ids=["given", "defaults", "knobs", "budget", "preset"],
)
def test_override_line(reproduce, fields, expected):
    assert overrides_of(make_row("sparda", 0.8, reproduce=reproduce, **fields)) == expected


def test_full_command_keeps_the_cell():
    row = make_row(
        "sparda", 0.8, reproduce="python run.py method=sparda kv_dtype=int8 sparsity=0.8 method.pool=3 task=speed seed=1"
    )
    assert full_command(row) == "python run.py method=full task=speed seed=1"


def test_labels_name_only_what_differs():
    rows = [
        make_row(),
        make_row("sparda", 0.8, knobs={"pool": 15, "fuse": "max"}),
        make_row("sparda", 0.8, knobs={"pool": 7, "fuse": "max"}),
        make_row("window", 0.5),
        make_row("int8", kv_dtype="int8"),
        make_row("window", 0.5, kv_dtype="int8", decode_impl="eager"),
        make_row("tova", None, kv_budget=0.25),
    ]
    assert config_labels(rows) == [
        "full",
        "sparda 0.8 pool=15",
        "sparda 0.8 pool=7",
        "window 0.5 graph",
        "int8",
        "window 0.5 int8 eager",
        "tova budget 0.25",
    ]


def test_rows_from_before_knobs_were_recorded():
    old = make_row("sparda", 0.8)
    given = make_row("sparda", 0.8, reproduce="python run.py method=sparda 'method.predict_layers=[1,2,3]'")
    new = make_row("sparda", 0.8, knobs={"predict_layers": [14, 15], "pool": 15})
    assert config_labels([old, given]) == ["sparda 0.8", "sparda 0.8 predict_layers=[1,2,3]"]
    assert config_labels([old, new]) == ["sparda 0.8", "sparda 0.8"]


@pytest.mark.parametrize(
    "method, kv_dtype, expected", [("full", "bf16", True), ("full", "int8", False), ("window", "bf16", False)]
)
def test_the_reference_is_dense_in_the_models_dtype(method, kv_dtype, expected):
    assert is_full(Row(method=method, kv_dtype=kv_dtype)) == expected


def test_matrices_of_a_calibration_wherever_they_are():
    square = [[1, 0.5], [None, 1]]
    found = matrices(
        {
            "iou": square,
            "by_length": {"4096": {"recall": square}},
            "iou_ragged": [[1], [1, 2]],
            "recall_text": [["a"]],
            "layers": square,
        }
    )
    assert found == {"iou": square, "by_length 4096 recall": square}
