"""Reading rows: every layout that the project writes, nothing that is no row, one name per method and knobs."""

import dataclasses
import json
import types
import typing

import pytest

from harness import compare, reproduce
from harness.report.advice import ALL_TASKS, views
from harness.report.card import print_card, print_fitted, print_table
from harness.report.rows import Entry, Loaded, config_labels, full_command, is_full, load, matrices, overrides_of
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


def test_a_file_that_was_cut_off_has_its_other_lines(tmp_path):
    (tmp_path / "rows.jsonl").write_text(make_row().to_json() + "\n" + make_row("window", 0.5).to_json()[:-50])
    (tmp_path / "latin.json").write_bytes(b'{"status": "caf\xe9"}')
    loaded = load([tmp_path])
    assert [entry.row.method for entry in loaded.entries] == ["full"]
    assert [note.partition(":")[0] for note in loaded.notes] == [
        "latin.json cannot be read",
        "rows.jsonl line 2 cannot be read",
    ]


def test_a_row_of_another_version_is_read():
    values = make_row().to_dict() | {"of_tomorrow": 1}
    del values["knobs"]
    assert Row.known(values) == dataclasses.replace(make_row(), knobs={})


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


def _odd_values():
    """One row for each field that may be unknown or 0, with that value in it."""
    for name, hint in typing.get_type_hints(Row).items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        values = [None] * (types.NoneType in kinds) + [0] * bool({int, float} & {*kinds}) + [""] * (str in kinds)
        for value in values:
            if name not in ("status", "config_hash"):
                yield name, value


def test_no_unknown_or_zero_breaks_card_or_comparison(capsys):
    other = make_row("window", 0.5, decode_impl="eager")
    for name, value in _odd_values():
        odd = dataclasses.replace(make_row(), **{name: value})
        print_card(odd, other)
        print_card(other, odd)
        print_table([odd, other])
        for one, two in ((odd, other), (other, odd)):
            print_fitted(lambda width, pair=(one, two): compare.block(*map(Entry, pair), ("a", "b"), list(pair), width))
            reproduce.differences(one, two)
            print_fitted(lambda width, pair=(one, two): reproduce.table(reproduce.drifts(*pair), width))
    assert "Traceback" not in capsys.readouterr().out


def test_no_unknown_or_zero_breaks_the_page():
    """Each odd row has a view of its own, once beside a sane full and once as full beside sane methods."""
    pytest.importorskip("plotly")
    from harness.report.page import page

    rows = []
    for place, (name, value) in enumerate(_odd_values()):
        for odd, others in ((), [("window", 0.5), ("window", 0.8)]), (("window", 0.5), [(), ("window", 0.8)]):
            model = f"{place} {bool(odd)}"
            rows.append(dataclasses.replace(make_row(*odd, model=model), **{name: value}))
            rows += [make_row(*words, model=model) for words in others]
            rows.append(make_row("window", 0.8, model=model, context_len=65536))
    assert "<table" in page(Loaded([Entry(row) for row in rows]))


def test_a_task_with_other_options_is_another_task(tmp_path):
    """The option stands only in the command."""
    words = [
        "task=niah task.num_samples=50",
        "task=niah task.num_samples=50 task.haystack=facts",
        "task=lm_eval task.name=gsm8k",
    ]
    names = ["niah", "niah", "lm_eval:gsm8k"]
    rows = [
        make_row(reproduce=f"python run.py {word}", task=name, seed=place)
        for place, (word, name) in enumerate(zip(words, names, strict=True))
    ]
    loaded = load([write_rows(tmp_path, rows)])
    assert sorted(entry.row.task for entry in loaded.entries) == ["lm_eval:gsm8k", "niah", "niah haystack=facts"]
    assert len({view.task for view in views(loaded.entries)} - {ALL_TASKS}) == 3
    with pytest.raises(ValueError, match="task niah and niah haystack=facts"):
        compare.pairs(
            *([entry for entry in loaded.entries if entry.row.task == name] * 2 for name in ("niah", "niah haystack=facts"))
        )
