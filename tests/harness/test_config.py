"""Configuration: every yaml composes, every mistake is one line that names the way out, a cell has one hash."""

import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from harness import config
from harness.config import CONF, ConfigError, cell_of, config_hash, options, preflight

YAMLS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]


@pytest.fixture
def composed():
    """Compose one cell from overrides."""
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: compose("config", list(overrides))
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(("group", "name"), YAMLS, ids=lambda value: value)
def test_every_yaml_composes(composed, group, name):
    if name == "search":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra `search`")
    cell = OmegaConf.to_object(composed(f"{group}={name}"))
    assert isinstance(cell, config.Config)


@pytest.mark.parametrize(
    "path", [CONF / "config.yaml", *sorted(CONF.glob("*/*.yaml"))], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_yaml_starts_with_its_command(path):
    head = path.read_text().splitlines()[:3]
    commands = [line for line in head if line.startswith("# python run.py")]
    assert commands
    if path.parent != CONF:
        assert any(f"{path.parent.name}={path.stem}" in line or path.stem == "default" for line in commands)


def test_every_method_and_task_has_a_yaml(composed):
    for group, package, base in (("method", config.methods, config.Method), ("task", config.tasks, config.Task)):
        assert options(group) == sorted(config.discover(package, base))


def test_name_is_that_of_the_module(composed):
    for name in options("method"):
        assert config.choice_of(composed(f"method={name}").method) == name


# what is typed, and the words that the one line must have
MISTAKES = [
    ("method=windw", "unknown method 'windw': did you mean window? Valid: "),
    ("method=h20", "unknown method 'h20'"),
    ("method=null", "unknown method 'null'"),
    ("method=", "unknown method ''"),
    ("method=[full,window]", "unknown method '[full,window]'"),
    ("task=nia", "unknown task 'nia': did you mean niah?"),
    ("logger=non", "unknown logger 'non': did you mean none? Valid: none, wandb"),
    ("experiment=smok", "unknown experiment 'smok': did you mean smoke?"),
    ("methd=full", "unknown key 'methd': did you mean method?"),
    ("sparcity=0.5", "unknown key 'sparcity': did you mean sparsity or method.sparsity?; keys: model, method, "),
    ("context_len=512", "unknown key 'context_len': did you mean shape.context_len?"),
    ("shape.contextlen=512", "unknown key 'shape.contextlen': did you mean shape.context_len?; keys of shape: "),
    (
        "method=full method.sparsity=0.5",
        "unknown key 'method.sparsity': did you mean sparsity?; keys of method: kv_dtype",
    ),
    ("+new=1", "unknown key 'new'"),
    ("++new=1", "unknown key 'new'"),
    ("+sparsity=0.5", "+sparsity=0.5 is not allowed: write it without the +"),
    ("+experiment=smoke", "+experiment=smoke is not allowed: write it without the +"),
    ("~logger", "~logger is not allowed: nothing can be removed, only set, as in logger=..."),
    ("~shape.repeats", "~shape.repeats is not allowed"),
    ("sparsity=abc", "sparsity=abc has the wrong type: expected a number"),
    ("sparsity=", "sparsity= has the wrong type: expected a number"),
    ("shape.context_len=1.5", "shape.context_len=1.5 has the wrong type: expected a whole number"),
    ("compare=maybe", "compare=maybe has the wrong type: expected true or false"),
    ("seed=null", "seed=null has the wrong type: expected a value"),
    (
        "method=sparda method.predict_layers=3",
        "method.predict_layers=3 has the wrong type: expected a list as in [1,2]",
    ),
    ("method=sparda method.predict_layers=[1,x]", "has the wrong type: expected a whole number"),
    ("sparsity=1", "outside [0, 1)"),
    ("method=full sparsity=-0.1", "sparsity=-0.1 is outside [0, 1)"),
    ("method=window method.sparsity=1.5", "sparsity=1.5 is outside [0, 1)"),
    ("kv_budget=0", "outside (0, 1]"),
    ("sparsity=0.5 kv_budget=0.5", "give only one of them"),
    ("shape.context_len=0", "shape.context_len=0 is too small: it must be at least 1"),
    ("shape.num_new_tokens=-5", "shape.num_new_tokens=-5 is too small"),
    ("seed=-1", "seed=-1 is negative"),
    ("question=hiden", "did you mean question=hidden?"),
    ("task=speed question=hiden", "question=hiden is unknown: did you mean hidden? Valid: visible, hidden"),
    ("kv_dtype=fp9", "kv_dtype=fp9"),
    ("impl=trition", "impl=trition is unknown: did you mean triton? Valid: auto, reference, triton"),
    ("logger.name=mlflow", "logger.name=mlflow is unknown; valid: wandb, none"),
    ("model.config.foo=1", "write +model.config.foo=1"),
    ("sparsity", "cannot read 'sparsity': write key=value"),
    ("model.path=a(b", "cannot read 'model.path=a(b': put quotes around special characters"),
    ("sparsity=${nothing}", "Interpolation key 'nothing' not found"),
    ("hydra.foo=1", "hydra.foo: Key 'foo' not in 'HydraConf'"),
    ("hydra/launcher=nope", "Could not find 'hydra/launcher/nope' Available options in 'hydra/launcher': basic process ray"),
    ("method=full,window", "method=full,window are several values: add -m"),
    ("--sparsity=0.5", "unknown option --sparsity=0.5: values are given without dashes, as in sparsity=..."),
    ("--cfg nope", "invalid choice: 'nope'"),
    ("--config-name other", "--config-name is not supported"),
    ("method=full -m seed=1", "flags such as -m stand before or after all overrides"),
    ("-m method=full,windw", "unknown method 'windw': did you mean window?"),
    ("-m method=full seed=0,1 sparsity=0.1,1.2", "sparsity=1.2 is outside [0, 1)"),
    ("-m method=glob(x*)", "method=glob(x*) matches no method; all of them: flash_lite, fp8, full, "),
    ("plan=onyl", "plan=onyl is unknown: did you mean only? Valid: run, only"),
    ("rerun=fail", "rerun=fail is unknown: did you mean failed? Valid: missing, failed, all"),
    ("cell_timeout_s=0", "cell_timeout_s=0.0 is too small: give seconds above 0"),
    ("thresholds.all.min_acuracy=1", "unknown key 'thresholds.all.min_acuracy'"),
    ("+thresholds.full.min_acuracy=1", "thresholds.full=min_acuracy is unknown: did you mean min_accuracy?"),
    ("+thresholds.ful.min_accuracy=1", "thresholds.ful is for no method: did you mean full?"),
    ("thresholds.all.min_accuracy=x", "thresholds.all.min_accuracy=x has the wrong type: expected a number"),
    ("-m seed=interval(0,1)", "give values as in a=1,2, or search with hydra/sweeper=optuna"),
    ("model=dummy shape.context_len=9999999", "9999999"),
    ("-m model=dummy shape.context_len=8888888,9999999", "8888888"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_is_one_line(line, words):
    with pytest.raises(ConfigError) as caught:
        preflight(shlex.split(line))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


FINE = [
    "method=full",
    "method=window ++sparsity=0.5",
    "method=full +model.config.attention_bias=false",
    "method=full model.path=null experiment=smoke",
    "-m method=window sparsity=range(0,1,0.25)",
    "-m method=glob(*,exclude=[*_schema,sparda])",
    "method=full +hydra.job.env_set.A=1",
    "method=full hydra.run.dir=x",
    "--help",
    "--cfg job method=full",
    "--info searchpath",
]


@pytest.mark.parametrize("line", FINE)
def test_nothing_to_say(line, capsys):
    preflight([*shlex.split(line), "model=dummy"])
    assert capsys.readouterr().err == ""


WARNINGS = [
    ("method=full sparsity=0.5", "warning: method=full ignores sparsity"),
    ("method=int8 kv_dtype=fp16", "warning: method=int8 ignores kv_dtype"),
    ("method=window sparsity=0.5 method.sparsity=0.2", "warning: method=window ignores sparsity"),
    ("method=full task=speed question=hidden", "warning: task=speed ignores question"),
]


@pytest.mark.parametrize(("line", "warning"), WARNINGS, ids=[line for line, _ in WARNINGS])
def test_value_that_nothing_reads_gives_one_warning(line, warning, capsys):
    preflight(["model=dummy", *line.split()])
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [warning]
    assert captured.out == ""


def test_sweep_names_duplicates_and_impossible_cells(capsys):
    lengths = "shape.context_len=300,9999999"
    plan = preflight(["-m", "model=dummy", "method=full", "sparsity=0.1,0.5", lengths])
    assert capsys.readouterr().err.splitlines() == ["warning: method=full ignores sparsity"]
    first, second = (f"sparsity={value} shape.context_len=300" for value in ("0.1", "0.5"))
    assert len(plan.dropped) == 2 and plan.dropped[0] == (second, first)
    assert [cell.state for cell in plan.cells] == ["run", "impossible"]
    assert "9999999" in plan.cells[1].why


def test_sweep_in_an_experiment_is_expanded(tmp_path, monkeypatch, capsys):
    # a copy of conf/ with an experiment that holds sweep parameters, one of them with a typo
    (tmp_path / "experiment").mkdir()
    for path in CONF.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONF)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      method: full,windw\n"
    (tmp_path / "experiment" / "two.yaml").write_text(text)
    monkeypatch.setattr(config, "CONF", tmp_path)
    with pytest.raises(ConfigError, match="unknown method 'windw'"):
        preflight(["model=dummy", "experiment=two"])


def test_hash_ignores_key_order_and_unused_values(composed):
    cell = cell_of(composed("method=full"))
    backwards = {key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in cell.items()}
    assert config_hash(dict(reversed(backwards.items()))) == config_hash(cell)
    for same in ("sparsity=0.3", "kv_budget=0.5", "logger=none", "compare=false", "shape.context_len=1024"):
        assert config_hash(cell_of(composed("method=full", same))) == config_hash(cell), same


@pytest.mark.parametrize(
    "change",
    [
        "sparsity=0.3",
        "method=full",
        "seed=1",
        "question=hidden",
        "shape.batch_size=2",
        "task.num_samples=3",
        "impl=triton",
    ]
    + ["kv_dtype=bf16", "model.dtype=bf16", "model=dummy", "model.path=some/model"],
)
def test_hash_sees_what_identifies_a_result(composed, change):
    assert config_hash(cell_of(composed("method=window"))) != config_hash(cell_of(composed("method=window", change)))


def test_hash_is_twelve_hex_digits_and_stable(composed):
    # printf '{"a": 1}' | sha256sum
    assert config_hash({"a": 1}) == "f9d86028c6e0"
    assert cell_of(composed("question=hidden")) == cell_of(composed("task.question=hidden"))


def test_path_wins_over_the_name(composed, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, absolute = (cell_of(composed(f"model.path={path}")) for path in ("mine", tmp_path / "mine"))
    assert relative == absolute
    assert relative["model"]["name"] == "mine"
    row = config.blank_row(composed("model.path=Qwen/Qwen3-0.6B", "method=window"), "python run.py")
    assert (row.model, row.method, row.sparsity, row.status) == ("Qwen3-0.6B", "window", 0.8, "failed")


def test_runs_of_one_second_have_their_own_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(config._new_dir, [f"{tmp_path}/outputs/2026-12-01/10-00-00"] * 16))
    assert len(set(folders)) == 16
    assert f"{tmp_path}/outputs/2026-12-01/10-00-00-16" in folders


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ("method=full,seed=1", "3_method=full,seed=1"),
        ("model.path=a/b c,method.predict_layers=[1,2]", "3_model.path=a-b-c,method.predict_layers=-1,2-"),
        ("x" * 1000, "3_" + "x" * 100),
        ("", "3_"),
    ],
    ids=["plain", "slashes", "long", "empty"],
)
def test_folder_of_a_cell_is_a_safe_name(overrides, folder):
    assert config._cell_dir(3, overrides) == folder
