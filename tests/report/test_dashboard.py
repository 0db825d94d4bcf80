"""The W&B workspace and report, offline: every metric that they name is one that rows and runs really log."""

import json
import re
import warnings

import pytest
from hydra import compose, initialize_config_dir

with warnings.catch_warnings():
    # the library's own use of pydantic
    warnings.simplefilter("ignore")
    pytest.importorskip("wandb_workspaces.workspaces")

from harness import config, dashboard, tracking  # noqa: E402
from harness.config import CONF, cell_of  # noqa: E402
from harness.report.rows import load  # noqa: E402


def flat(node: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in node.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}"}
    return found


def strings(node):
    if isinstance(node, dict):
        for value in node.values():
            yield from strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from strings(value)
    elif isinstance(node, str):
        yield node


@pytest.fixture(scope="module")
def spec():
    return dashboard.spec("a-project")


@pytest.fixture(scope="module")
def logged():
    """Summary names of all committed rows, and config names of a cell."""
    rows = load(["docs/results/example"]).entries
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cell = cell_of(compose("config", ["method=sparda"]))
    return set().union(*(flat(entry.row.to_dict()) for entry in rows)), flat(cell)


def test_every_metric_is_logged(spec, logged):
    summary, cell = logged
    words = list(strings(spec))
    metrics = {word.partition("summary_metrics.")[2] for word in words if word.startswith("summary_metrics.")}
    metrics |= {word.partition("summary:")[2] for word in words if word.startswith("summary:")}
    metrics |= {name for word in words for name in re.findall(r"\$\{summary:(.*?)\}", word)}
    assert len(metrics) > 15
    assert metrics - summary == set()
    configs = {word.partition("config:")[2].replace(".value", "") for word in words if word.startswith("config:")}
    configs |= {name for word in words for name in re.findall(r"\$\{config:(.*?)\}", word)}
    configs |= {word.replace(".value", "") for word in words if ".value." in word and not word.startswith("config:")}
    assert configs == {"method.name"} and configs <= cell


def test_every_curve_is_logged(spec):
    curves = {word for word in strings(spec) if word.startswith("sample/")}
    logged = []

    class Run:
        def define_metric(self, *args, **kwargs):
            pass

        def log(self, values):
            logged.append(values)

    tracking._log_samples(Run(), [{"id": "a", "score": 1.0, "output_len": 3}, {"id": "b", "score": 0.0}])
    assert curves == {"sample/index", "sample/mean_score"} and curves <= set(logged[0])
    assert [values["sample/mean_score"] for values in logged] == [1.0, 0.5]


def test_all_kinds_of_panels_are_there(spec):
    for part in ("workspace", "report"):
        text = json.dumps(spec[part])
        for kind in ("Scatter Plot", "Bar Chart", "Parallel Coordinates Plot", "Run Comparer", "Run History Line Plot"):
            assert f'"{kind}"' in text


def test_workspace_groups_finished_runs_by_method(spec):
    text = json.dumps(spec["workspace"])
    assert '"grouping": [{"section": "config", "name": "method.value.name"}]' in text
    assert '"key": {"section": "summary", "name": "status"}, "op": "=", "value": "ok"' in text


@pytest.fixture
def no_login(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for something"))


@pytest.mark.parametrize("mode", ["online", "offline", None], ids=str)
def test_without_a_login_the_file_is_written(no_login, monkeypatch, tmp_path, capsys, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    assert dashboard.main(["--project", "a-project", "--out", str(tmp_path / "spec.json")]) == 0
    assert set(json.loads((tmp_path / "spec.json").read_text())) == {"workspace", "report"}
    assert "wandb login" in capsys.readouterr().out


def test_a_server_that_refuses_costs_one_line(no_login, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(dashboard, "logged_in", lambda: True)

    def refuse(**kwargs):
        raise OSError("no such\nteam")

    monkeypatch.setattr(dashboard.wandb, "Api", refuse)
    assert dashboard.main(["--out", str(tmp_path / "spec.json")]) == 0
    assert capsys.readouterr().err == "warning: not saved in W&B: no such team\n"
    assert (tmp_path / "spec.json").exists()


def test_logged_in_saves_both(monkeypatch, tmp_path, capsys):
    saved = []

    class Api:
        default_entity = "a-team"

    monkeypatch.setattr(dashboard, "logged_in", lambda: True)
    monkeypatch.setattr(dashboard.wandb, "Api", lambda **kwargs: Api())
    for kind in (dashboard.ws.Workspace, dashboard.wr.Report):
        monkeypatch.setattr(kind, "save", lambda self: saved.append((type(self).__name__, self.entity, self.project)))
        monkeypatch.setattr(kind, "url", "https://example.invalid/it", raising=False)
    assert dashboard.main(["--project", "a-project", "--out", str(tmp_path / "spec.json")]) == 0
    assert saved == [("Workspace", "a-team", "a-project"), ("Report", "a-team", "a-project")]
    assert capsys.readouterr().out.count("https://") == 2
    assert not (tmp_path / "spec.json").exists()
