"""W&B: the offline run file holds the same as row.json, and no fault of W&B reaches the row or stdout."""

import json
import struct

import pytest
import wandb
from hydra import compose, initialize_config_dir
from wandb.proto.wandb_internal_pb2 import Record

from harness import config, tracking
from harness.config import CONF, LoggerConf, blank_row, cell_of

SAMPLES = [
    {"id": "a", "score": 1, "output": "42\n", "meta": {"depth": 0.5}},
    {"id": "b", "score": 0.5, "output": None, "keys": [1, 2]},
]
CONF_WANDB = LoggerConf("wandb", "a-project", "a-group")


def read_offline(path) -> list[Record]:
    """Records of a .wandb file: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    data, position, part, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        # 1 is a whole record, 4 the last part of one
        if kind in (1, 4):
            records.append(Record.FromString(part))
            part = b""
    return records


def nested(items) -> dict:
    """Key-value items of a record as a nested dict."""
    tree = {}
    for item in items:
        *parents, leaf = item.nested_key or [item.key]
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = json.loads(item.value_json)
    return tree


@pytest.fixture
def cell():
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield compose("config", ["model=dummy", "method=window", "shape.context_len=300"])


@pytest.fixture
def row(cell):
    row = blank_row(cell, "python run.py method=window")
    row.status, row.flags, row.kv_ledger = "ok", ["noop", "short_decode"], {"kv": 2**40, "positions": 3}
    row.versions, row.ttft_ms, row.tpot_ms_p50 = {"torch": "2.13.0+cpu"}, 12.5, float("nan")
    return row


@pytest.fixture(autouse=True)
def fresh_wandb(monkeypatch, tmp_path):
    """No key, no settings and no session from elsewhere."""
    wandb.teardown()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()


def written(folder) -> dict:
    """What the one offline run in a folder holds."""
    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = {"run": None, "summary": [], "config": [], "exit": None, "history": [], "metric": {}}
    for record in read_offline(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run
            found["config"] += record.run.config.update
        elif kind in ("summary", "config"):
            found[kind] += getattr(record, kind).update
        elif kind == "history":
            found["history"].append(nested(record.history.item))
        elif kind == "metric":
            found["metric"][record.metric.name] = record.metric
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def test_offline_run_equals_the_row(cell, row, tmp_path, capfd):
    tracking.log_run(cell, row, SAMPLES, tmp_path, CONF_WANDB)
    found = written(tmp_path)
    summary, logged = nested(found["summary"]), json.loads(row.to_json())
    assert {name: summary[name] for name in logged} == logged
    tree = nested(found["config"])
    assert {name: tree[name] for name in cell_of(cell)} == cell_of(cell)
    assert tree["method"]["name"] == "window"
    run = found["run"]
    assert run.run_id == tracking.run_id(row)
    assert run.run_id.startswith(f"{row.config_hash}-20")
    assert (run.project, run.run_group, run.job_type) == ("a-project", "a-group", "niah")
    assert list(run.tags) == ["window", "dummy", "ok", "noop", "short_decode"]
    assert found["exit"] == 0
    assert capfd.readouterr() == ("", "")


def test_cells_of_a_sweep_are_one_group(cell, row, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_GROUP", "sweep_1")
    tracking.log_run(cell, row, SAMPLES, tmp_path, LoggerConf("wandb", "a-project"))
    assert written(tmp_path)["run"].run_group == "sweep_1"


def test_samples_are_a_table(cell, row, tmp_path):
    tracking.log_run(cell, row, SAMPLES, tmp_path, CONF_WANDB)
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["id", "score", "output", "meta", "keys"]
    assert table["data"] == [["a", 1, "42\n", '{"depth": 0.5}', None], ["b", 0.5, None, None, "[1, 2]"]]


def test_samples_are_curves_with_their_means(cell, row, tmp_path):
    tracking.log_run(cell, row, SAMPLES, tmp_path, CONF_WANDB)
    found = written(tmp_path)
    steps = [step for step in found["history"] if "sample/index" in step]
    assert [(step["sample/index"], step["sample/score"], step["sample/mean_score"]) for step in steps] == [
        (0, 1, 1),
        (1, 0.5, 0.75),
    ]
    summary = nested(found["summary"])
    assert summary["sample/score"] == {"mean": 0.75}
    assert summary["sample/mean_score"] == 0.75
    assert found["metric"]["sample/index"].options.hidden
    assert found["metric"]["sample/score"].step_metric == "sample/index"


def test_ledger_is_a_native_bar_chart(cell, row, tmp_path):
    tracking.log_run(cell, row, [], tmp_path, CONF_WANDB)
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/kv_ledger_chart_table_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["kind", "bytes"]
    assert table["data"] == [["kv", 2**40], ["positions", 3]]
    config = written(tmp_path)["config"]
    assert "wandb/bar/v0" in json.dumps(nested(config))


def test_failed_cell_closes_its_run(cell, row, tmp_path, monkeypatch, capfd):
    def broken(*args, **kwargs):
        raise TypeError("no table\ntoday")

    monkeypatch.setattr(wandb, "Table", broken)
    tracking.log_run(cell, row, SAMPLES, tmp_path, CONF_WANDB)
    assert wandb.run is None
    assert capfd.readouterr() == ("", "warning: this cell is not in W&B, only in row.json: no table today\n")
    row.status, row.started_at = "oom_prefill", "2026-12-01T00:00:00+00:00"
    tracking.log_run(cell, row, [], tmp_path / "second", CONF_WANDB)
    assert written(tmp_path / "second")["exit"] == 1


def test_two_cells_in_one_process_stay_apart(cell, row, tmp_path):
    tracking.log_run(cell, row, [], tmp_path / "first", CONF_WANDB)
    row.started_at = "2026-12-01T00:00:00.000001+00:00"
    tracking.log_run(cell, row, [], tmp_path / "second", CONF_WANDB)
    first, second = (written(tmp_path / name)["run"].run_id for name in ("first", "second"))
    assert first != second == f"{row.config_hash}-20261201T0000000000010000"


def test_online_without_a_key_is_offline_and_says_so(cell, row, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for something"))
    tracking.log_run(cell, row, [], tmp_path, CONF_WANDB)
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "WANDB_MODE=online but there is no API key" in err
    assert written(tmp_path)["summary"]


def test_key_that_is_refused_falls_back_to_offline(cell, row, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    tracking.log_run(cell, row, [], tmp_path, CONF_WANDB)
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "logging offline: WANDB_API_KEY invalid" in err
    assert written(tmp_path)["summary"]


def test_folder_that_cannot_be_written(cell, row, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    tracking.log_run(cell, row, [], tmp_path / "file" / "run", CONF_WANDB)
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("warning: ")


def test_wandb_that_breaks_is_one_line(cell, row, tmp_path, monkeypatch, capfd):
    def broken(**kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", broken)
    tracking.log_run(cell, row, SAMPLES, tmp_path, CONF_WANDB)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "warning: this cell is not in W&B, only in row.json: No space left on device\n")


@pytest.mark.parametrize("mode", ["disabled", "none"])
def test_nothing_is_written(cell, row, tmp_path, monkeypatch, capfd, mode):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracking.log_run(cell, row, SAMPLES, tmp_path, LoggerConf("none") if mode == "none" else CONF_WANDB)
    assert list(tmp_path.rglob("*.wandb")) == []
    assert capfd.readouterr() == ("", "")
