"""Rows of any folder and any version: list, show, export."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run
from harness.report.listing import load_rows, main
from harness.results import Row, write_atomic

ROOT = Path(run.__file__).parent


def row(**values) -> Row:
    known = {"status": "ok", "model": "m", "method": "full", "task": "niah", "config_hash": "0123456789ab", "started_at": "1"}
    return Row(**known | values)


@pytest.fixture
def folder(tmp_path):
    """A cell's folder, its copy in the store, a .jsonl of rows, and files that are no rows."""
    first, second = row(accuracy=0.5, kv_resident_bytes=3 << 20, flags=["noisy"], knobs={"a": 1}), row(started_at="2")
    write_atomic(tmp_path / "sweep/0_full/row.json", first.to_json())
    write_atomic(tmp_path / "rows/0123456789ab.json", first.to_json())
    write_atomic(tmp_path / "old.jsonl", second.to_json() + "\n" + row(started_at="3", method="window").to_json() + "\n")
    write_atomic(tmp_path / "sweep/0_full/samples.jsonl", '{"id": 1}\n')
    write_atomic(tmp_path / "package.json", "{}")
    return tmp_path


def test_a_row_that_stands_twice_counts_once(folder):
    assert [(one.started_at, one.method) for one in load_rows(folder)] == [("1", "full"), ("2", "full"), ("3", "window")]


def test_rows_of_other_versions_load(tmp_path, capsys):
    values = json.loads(row().to_json())
    del values["duration_s"], values["knobs"]
    write_atomic(tmp_path / "row.json", json.dumps(values | {"of_tomorrow": 1}))
    loaded = Row.read(tmp_path / "row.json")
    assert (loaded.method, loaded.duration_s, loaded.knobs) == ("full", None, {})
    assert capsys.readouterr().err == f"note: {tmp_path}/row.json is of another version, left out: of_tomorrow\n"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"status": "ok"}', "\x00", json.dumps(row().to_dict() | {"method": None})],
    ids=["empty", "list", "object", "part", "binary", "null"],
)
def test_what_is_no_row_is_named(tmp_path, capsys, text):
    write_atomic(tmp_path / "row.json", text)
    with pytest.raises(ValueError, match="row.json is not a row"):
        Row.read(tmp_path / "row.json")
    assert load_rows(tmp_path) == []
    assert "row.json is not a row" in capsys.readouterr().err


WRONG = [{"accuracy": "high"}, {"batch_size": 1.5}, {"seed": True}, {"kv_ledger": {"kv": "many"}}, {"flags": [1]}]


@pytest.mark.parametrize("values", WRONG, ids=[next(iter(values)) for values in WRONG])
def test_a_value_of_a_wrong_type_costs_its_row_only(tmp_path, capsys, values):
    wrong = json.dumps(row(started_at="2").to_dict() | values)
    write_atomic(tmp_path / "rows.jsonl", "\n".join([row().to_json(), wrong, "cut off", row(started_at="3").to_json()]))
    write_atomic(tmp_path / "row.json", wrong)
    assert [one.started_at for one in load_rows(tmp_path)] == ["1", "3"]
    notes = capsys.readouterr().err.splitlines()
    named = f"{next(iter(values))}={str(next(iter(values.values())))!r} is no value of a row"
    assert len(notes) == 3 and sum(named in note for note in notes) == 2
    assert f"{tmp_path}/rows.jsonl:3 is not a row" in notes[2]
    assert main(["export", str(tmp_path), "--to", "parquet", "--out", str(tmp_path / "rows.parquet")]) == 0


def test_null_is_the_default_and_nan_is_null(tmp_path):
    text = json.dumps(row().to_dict() | {"flags": None, "versions": None, "kv_ledger": {"kv": None}, "accuracy": float("nan")})
    write_atomic(tmp_path / "row.json", text)
    read = Row.read(tmp_path / "row.json")
    assert (read.flags, read.versions, read.kv_ledger, read.accuracy) == ([], {}, {}, None)


def test_written_file_is_like_any_other(tmp_path):
    """Readable by whom the umask says, also where the text is no UTF-8 and where the path is a link or a device."""
    old = os.umask(0o022)
    try:
        write_atomic(tmp_path / "new", "caf\udce9")
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "new").read_text() == "caf\\udce9"
    (tmp_path / "link").symlink_to("new")
    write_atomic(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "new").read_text() == "second"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new", "pipe"]


def test_the_measured_rows_in_docs_load():
    assert len(load_rows(ROOT / "docs/results")) >= 6


def test_ls(folder, capsys):
    assert main(["ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].split()[:3] == ["0123456789ab", "ok", "full"]
    assert "3.0 MiB" in lines[1] and lines[1].split()[-2:] == ["0.5", "noisy"]


def test_show(folder, capsys):
    assert main(["show", "0123", str(folder)]) == 0
    assert capsys.readouterr().out.count(" on m, task niah") == 3
    assert main(["show", str(folder / "sweep/0_full/row.json")]) == 0
    assert main(["show", "9", str(folder)]) == 2
    assert capsys.readouterr().err == "error: no row has a config hash that starts with 9\n"


def test_export_csv(folder, capsys):
    assert main(["export", str(folder), "--to", "csv"]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(lines[0]) == [item.name for item in dataclasses.fields(Row)]
    assert (lines[0]["accuracy"], json.loads(lines[0]["flags"]), json.loads(lines[0]["knobs"])) == ("0.5", ["noisy"], {"a": 1})
    assert lines[1]["accuracy"] == ""


def test_export_parquet(folder):
    pandas = pytest.importorskip("pandas", reason="parquet needs pyarrow")
    assert main(["export", str(folder), "--to", "parquet", "--out", str(folder / "out.parquet")]) == 0
    table = pandas.read_parquet(folder / "out.parquet")
    assert list(table.columns) == [item.name for item in dataclasses.fields(Row)]
    assert table["accuracy"].tolist()[0] == 0.5 and table["accuracy"].isna().sum() == 2
    # a column of nothing but nulls keeps its type
    assert table["ttft_ms"].dtype == float


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["export", "--to", "parquett"], "error: --to parquett is unknown: did you mean parquet?; valid: csv, parquet"),
        (["ls", "nowhere"], "error: nowhere does not exist: give a folder with rows, as in outputs"),
    ],
)
def test_mistakes_are_one_line(words, error, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.strip() == error


def test_command(folder):
    command = [sys.executable, "-m", "harness.results", "ls", str(folder)]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 4
