"""Configuration: one dataclass per Hydra group, and a pre-flight that turns every mistake into one line.

Methods and tasks are found, not registered: the dataclass in methods/<name>.py is the schema of
conf/method/<name>.yaml. See a composed cell with `python run.py method=window --cfg job --resolve`.
"""

import argparse
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import methods
import tasks
from harness import assets
from harness.models import ModelConf
from harness.nearest import did_you_mean
from harness.results import Row
from methods.base import Method
from methods.slots import KV_DTYPES
from tasks.base import Task

CONF = Path(__file__).resolve().parent.parent / "conf"
QUESTIONS = ("visible", "hidden", "two_turn")
IMPLS = ("auto", "reference", "triton")
DECODE_IMPLS = ("auto", "graph", "eager")
LOGGERS = ("wandb", "none")
PLANS = ("run", "only")
RERUNS = ("missing", "failed", "all")
# kept: resident bytes over those of the dense cache; prediction_error: |resident / predicted - 1|
THRESHOLDS = ("min_accuracy", "max_kept_ratio", "max_prediction_error", "max_bound_ratio")
# top-level values that flow into the method or the task, but only where its yaml takes them
SHARED = {"sparsity": "method", "kv_budget": "method", "kv_dtype": "method", "question": "task"}
# launchers that come with an extra of pyproject.toml, and the package that must be there
EXTRAS = {"SlurmLauncher": ("slurm", "submitit"), "LocalLauncher": ("slurm", "submitit"), "RayLauncher": ("ray", "ray")}
# what OmegaConf says of a wrong type, and what it wants
EXPECTED = {
    "converted to Float": "a number",
    "converted to Integer": "a whole number",
    "not a valid bool": "true or false",
    "not a ListConfig": "a list as in [1,2]",
    "not Optional": "a value",
}


class ConfigError(ValueError):
    """A mistake in what the user asked for; the message is one line."""


@dataclass
class ShapeConf:
    """Lengths in tokens. repeats: timed runs per cell, of which the median is reported.

    prefill_chunk: tokens of the prompt that go through all layers at a time; null: the whole prompt, layer by layer.
    """

    context_len: int = 1024
    batch_size: int = 1
    num_new_tokens: int = 128
    repeats: int = 5
    prefill_chunk: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"shape.{name}={value} is too small: it must be at least 1")


@dataclass
class LoggerConf:
    """Where rows go besides row.json. group: W&B group; in a sweep the default is the sweep's folder."""

    name: str = "none"
    project: str = "kvgauge"
    group: str | None = None

    def __post_init__(self):
        _one_of("logger.name", self.name, LOGGERS)


@dataclass
class Config:
    """One cell. `sparsity`, `kv_budget` and `kv_dtype` flow into the method; compare: measure `full` beside it.

    plan=only: show what would run; rerun: which cells of a sweep run again though they have a row of this code;
    cell_timeout_s: after it a cell of a sweep is ended; thresholds: by method, `all` holds for every row.
    """

    model: ModelConf = MISSING
    method: Any = MISSING
    task: Any = MISSING
    shape: ShapeConf = MISSING
    logger: LoggerConf = MISSING
    sparsity: float = 0.8
    kv_budget: float | None = None
    kv_dtype: str = "auto"
    question: str = "visible"
    seed: int = 0
    impl: str = "auto"
    decode_impl: str = "auto"
    compare: bool = True
    plan: str = "run"
    rerun: str = "missing"
    cell_timeout_s: float = 14400
    thresholds: dict[str, Any] = field(default_factory=lambda: {"all": dict.fromkeys(THRESHOLDS)})

    def __post_init__(self):
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity} is outside [0, 1): 0 keeps all, 0.8 drops 80 % of the bytes")
        if self.kv_budget is not None and not 0 < self.kv_budget <= 1:
            raise ValueError(f"kv_budget={self.kv_budget} is outside (0, 1]: the share of the bf16 full cache's bytes")
        if self.cell_timeout_s <= 0:
            raise ValueError(f"cell_timeout_s={self.cell_timeout_s} is too small: give seconds above 0")
        for scope, limits in self.thresholds.items():
            if not isinstance(limits, dict):
                raise ValueError(f"thresholds.{scope}={limits} has the wrong type: expected one of {', '.join(THRESHOLDS)}")
            for name, limit in limits.items():
                _one_of(f"thresholds.{scope}", name, THRESHOLDS)
                if isinstance(limit, bool) or not isinstance(limit, int | float | None):
                    raise ValueError(f"thresholds.{scope}.{name}={limit} has the wrong type: expected a number")
        _one_of("plan", self.plan, PLANS)
        _one_of("rerun", self.rerun, RERUNS)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative: use 0 or more")
        _one_of("kv_dtype", self.kv_dtype, ("auto", *KV_DTYPES))
        _one_of("question", self.question, QUESTIONS)
        _one_of("impl", self.impl, IMPLS)
        _one_of("decode_impl", self.decode_impl, DECODE_IMPLS)


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value} is unknown{_suggest(value, choices)}")


def _suggest(word: str, choices) -> str:
    """The end of an error line: the nearest of `choices` and all of them."""
    guess = did_you_mean(word, choices)
    return f"{f'{guess} Valid' if guess else '; valid'}: {', '.join(choices)}"


def discover(package, base: type) -> dict[str, type]:
    """Every module of `package` that defines a subclass of `base`, by module name; not base.py, no abstract class."""
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name == "base":
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for item in vars(module).values():
            own = isinstance(item, type) and item.__module__ == module.__name__
            if own and issubclass(item, base) and not inspect.isabstract(item):
                found[info.name] = item
    return found


def register() -> None:
    """Tell Hydra the schemas."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, schema in (("model", ModelConf), ("shape", ShapeConf), ("logger", LoggerConf)):
        store.store(group=group, name=f"{group}_schema", node=schema)
    for group, package, base in (("method", methods, Method), ("task", tasks, Task)):
        for name, schema in discover(package, base).items():
            store.store(group=group, name=f"{name}_schema", node=schema)


def _new_dir(path: str) -> str:
    """Make `path`, or path-2, path-3, ... when it is taken: two runs of the same second keep their own folders."""
    number, free = 1, Path(path)
    while True:
        try:
            free.mkdir(parents=True)
            return str(free)
        except FileExistsError:
            number += 1
            free = Path(f"{path}-{number}")


def _cell_dir(number: int, overrides: str) -> str:
    """Folder of one cell of a sweep: `3_method=full,seed=1`, short and without characters that file systems dislike."""
    return f"{number}_{re.sub(r'[^A-Za-z0-9=.,_-]+', '-', overrides)[:100]}"


def _list_options() -> str:
    return "\n".join(f"{group}: {', '.join(options(group))}" for group in _groups())


def _model_file(file: str, *, _root_) -> str:
    """Path of a file that belongs to the cell's model: its calibration, a trained head."""
    return assets.find(_root_.model.name, _root_.model.path, file)


# on import: a worker of a cluster reads a configuration without a pre-flight
OmegaConf.register_new_resolver("new_dir", _new_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("cell_dir", _cell_dir, replace=True)
OmegaConf.register_new_resolver("options", _list_options, replace=True)
OmegaConf.register_new_resolver("model_file", _model_file, replace=True)


def _groups() -> list[str]:
    return _groups_of(GlobalHydra.instance().config_loader())


def options(group: str) -> list[str]:
    """Names that can be chosen in a config group; needs an initialised Hydra."""
    return _options_of(GlobalHydra.instance().config_loader(), group)


# Hydra reads the folders at every call, a sweep asks hundreds of times
@functools.lru_cache(1)
def _groups_of(loader) -> list[str]:
    return [group for group in loader.list_groups("") if group != "hydra"]


@functools.lru_cache(16)
def _options_of(loader, group: str) -> list[str]:
    return sorted(name for name in loader.get_group_options(group) if not name.endswith("_schema"))


@functools.lru_cache(64)
def _compose_groups(loader, overrides: tuple[str, ...]) -> DictConfig:
    return compose("config", list(overrides))


def choice_of(node: DictConfig) -> str:
    """Name of the chosen method or task: that of the module which holds its schema."""
    return OmegaConf.get_type(node).__module__.rpartition(".")[2]


def task_name(task: DictConfig) -> str:
    """The name shown for a task; where it stands for many, with the one chosen: lm_eval:gsm8k."""
    chosen = task.get("name")
    return f"{choice_of(task)}:{Path(chosen).stem}" if chosen else choice_of(task)


def model_name(model: ModelConf | DictConfig) -> str:
    """The name shown for a model: the last part of its path where one is given."""
    return Path(model.path).name if model.path else model.name


def cell_of(cfg: DictConfig) -> dict:
    """All that identifies a result, resolved: not the logger, nor values that neither method nor task takes."""
    cell = OmegaConf.to_container(cfg, resolve=True)
    cell = {key: cell[key] for key in ("model", "method", "task", "shape", "question", "seed", "impl", "decode_impl")}
    if "question" in cell["task"]:
        cell["question"] = cell["task"]["question"]
    else:
        del cell["question"]
    for group in ("method", "task"):
        cell[group] = {"name": choice_of(cfg[group]), **cell[group]}
    path = cell["model"]["path"]
    if path:
        # the path wins over the name; a folder means the same from every working directory
        cell["model"]["name"] = model_name(cfg.model)
        cell["model"]["path"] = str(Path(path).resolve()) if Path(path).exists() else path
    return cell


def blank_row(cfg: DictConfig, reproduce: str) -> Row:
    """A row that knows which cell it is and nothing else."""
    return Row(
        model=model_name(cfg.model),
        method=choice_of(cfg.method),
        knobs=OmegaConf.to_container(cfg.method, resolve=True),
        task=task_name(cfg.task),
        question=cfg.task.get("question", ""),
        sparsity=cfg.method.get("sparsity"),
        kv_budget=cfg.method.get("kv_budget"),
        kv_dtype=cfg.method.kv_dtype,
        context_len=cfg.shape.context_len,
        batch_size=cfg.shape.batch_size,
        num_new_tokens=cfg.shape.num_new_tokens,
        tp_size=cfg.model.tp_size,
        prefill_chunk=cfg.shape.prefill_chunk,
        seed=cfg.seed,
        config_hash=config_hash(cell_of(cfg)),
        started_at=datetime.now(UTC).isoformat(),
        reproduce=reproduce,
    )


def config_hash(cell: dict) -> str:
    """12 hex digits that do not depend on the order of keys."""
    return hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:12]


def family_hash(cell: dict) -> str:
    """Hash of a cell without its size: cells that differ in context length and batch only have the same."""
    sizes = ("context_len", "batch_size")
    return config_hash(cell | {"shape": {key: value for key, value in cell["shape"].items() if key not in sizes}})


@dataclass
class Request:
    """What the arguments ask for. cells: configuration and overrides of each different cell by its config hash.

    argv: the same arguments with `method=glob(*)` written out, because Hydra's own glob would match the schemas too.
    """

    argv: list[str]
    multirun: bool = False
    cells: dict[str, tuple[DictConfig, list[str]]] = field(default_factory=dict)
    # overrides of cells that equal an earlier one, and the overrides of that one
    duplicates: list[tuple[list[str], list[str]]] = field(default_factory=list)
    # with a sweeper that chooses as it goes: how many cells it will try; `cells` then holds one example
    num_trials: int | None = None
    # the cells run on other machines, of which this one knows nothing
    remote: bool = False


def preflight(argv: list[str]):
    """Compose and check every cell that these arguments ask for, before Hydra runs and before any weights are loaded.

    Returns:
        the harness.plan.Plan, or None where the arguments only ask for help or a configuration. Warnings go to stderr.
    Raises:
        ConfigError: with one line for the first mistake; in a sweep a cell whose plan is impossible is none, unless no
            cell is left: it becomes a row with status invalid.
    """
    register()
    args = _flags(argv)
    if args.help or args.hydra_help or args.shell_completion:
        return None
    notes = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        request = Request([_without_glob(word) for word in argv])
        cells = _expand(_flags(request.argv), request)
        for overrides in cells:
            cfg = _compose(overrides)
            notes += _ignored(overrides, cfg)
            scopes = ("all", *options("method"))
            for name in cfg.thresholds:
                if name not in scopes:
                    raise ConfigError(f"thresholds.{name} is for no method{_suggest(name, scopes)}")
            key = config_hash(cell_of(cfg))
            if key in request.cells:
                request.duplicates.append((overrides, request.cells[key][1]))
            else:
                request.cells[key] = cfg, overrides
    if args.cfg or args.info:
        return None
    # imported late: a typo is reported before the engine is loaded
    from harness.plan import make_plan

    plan = make_plan(request)
    impossible = [cell.why for cell in plan.cells if cell.state == "impossible"]
    if impossible and not request.remote and (not request.multirun or len(impossible) == len(plan.cells)):
        raise ConfigError(impossible[0])
    for note in dict.fromkeys(notes):
        print(note, file=sys.stderr)
    return plan


def compose_cells(overrides: list[str]) -> list[DictConfig]:
    """The composed cells of these overrides, one for each combination of several values; ConfigError for the first mistake.

    For programs beside run.py: no plan is checked.
    """
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        request = Request([_without_glob(word) for word in ["-m", *overrides]])
        return [_compose(lines) for lines in _expand(_flags(request.argv), request)]


def _without_glob(word: str) -> str:
    key, _, value = word.partition("=")
    if not value.startswith("glob(") or key not in _groups():
        return word
    (item,) = _parse(OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()), [word])
    names = [name for name in item.value().filter(options(key)) if not name.endswith("_schema")]
    if not names:
        raise ConfigError(f"{word} matches no {key}; all of them: {', '.join(options(key))}")
    return f"{key}={','.join(names)}"


def _flags(argv: list[str]) -> argparse.Namespace:
    """Hydra's own flags; those that it does not know are an error of one line."""
    parser = get_args_parser()

    def fail(message):
        raise ConfigError(f"{message}; see python run.py --hydra-help")

    parser.error = fail
    args, unknown = parser.parse_known_args(argv)
    if unknown and unknown[0].startswith("-"):
        word = unknown[0].lstrip("-")
        raise ConfigError(f"unknown option {unknown[0]}: values are given without dashes, as in {word.split('=')[0]}=...")
    if unknown:
        raise ConfigError(f"flags such as -m stand before or after all overrides, not between them: move {unknown[0]}")
    for name in ("config_path", "config_name", "config_dir"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is not supported: add a yaml to conf/experiment instead")
    return args


def _expand(args: argparse.Namespace, request: Request) -> list[list[str]]:
    """Overrides of each cell; the request learns what kind it is. Raises ConfigError for a name that exists nowhere."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = _parse(parser, args.overrides)
    fixed = [item.input_line for item in overrides if not item.is_sweep_override()]
    hydra = _compose(fixed, keep_hydra=True).hydra
    request.multirun = args.multirun or hydra.mode is not None and hydra.mode.name == "MULTIRUN"
    sweeps = [item.input_line for item in overrides if item.is_sweep_override()]
    if not request.multirun:
        if sweeps:
            raise ConfigError(f"{sweeps[0]} are several values: add -m to run one cell for each")
        return [fixed]
    request.remote = hydra.launcher._target_.rpartition(".")[2] in EXTRAS
    _check_extra(hydra.launcher._target_)
    own = {item.key_or_group for item in overrides}
    for key, value in (hydra.sweeper.params or {}).items():
        if key not in own:
            word = _without_glob(f"{key}={value}")
            overrides += _parse(parser, [word])
            if word != f"{key}={value}":
                request.argv.append(word)
    if not hydra.sweeper._target_.endswith(".BasicSweeper"):
        request.num_trials = hydra.sweeper.get("n_trials")
        return [[f"{item.key_or_group}={_example(item)}" for item in overrides]]
    try:
        return BasicSweeper.split_arguments(overrides, None)[0]
    except HydraException as err:
        raise ConfigError(f"{_one_line(err)}: give values as in a=1,2, or search with hydra/sweeper=optuna") from None


def _check_extra(target: str) -> None:
    """Refuse a launcher whose package is not installed."""
    for class_name, (extra, package) in EXTRAS.items():
        if target.endswith(class_name) and importlib.util.find_spec(package) is None:
            install = f"pip install -c constraints.txt -e '.[{extra}]'"
            raise ConfigError(f"this launcher needs the package {package}: {install}")


def _example(item: Override) -> str:
    """One value of an override that a sweeper will choose."""
    if not item.is_sweep_override():
        return item.get_value_element_as_str()
    if item.is_discrete_sweep():
        return next(iter(item.sweep_string_iterator()))
    return str(item.value().start)


def _parse(parser: OverridesParser, lines: list[str]) -> list[Override]:
    parsed = []
    for line in lines:
        try:
            parsed += parser.parse_overrides([line])
        except OverrideParseException:
            hint = "put quotes around special characters" if "=" in line else "write key=value"
            raise ConfigError(f"cannot read {line!r}: {hint}, as in 'model.path=\"a (copy)\"'") from None
    return parsed


def _compose(overrides: list[str], keep_hydra: bool = False) -> DictConfig:
    """The composed cell, all names and types checked."""
    parsed = _parse(OverridesParser.create(), overrides)
    own = [item for item in parsed if item.key_or_group.split(".")[0].split("/")[0] != "hydra"]
    for item in own:
        _check_group(item)
    groups = _groups()
    try:
        words = tuple(item.input_line for item in parsed if item.key_or_group in groups)
        chosen = _compose_groups(GlobalHydra.instance().config_loader(), words)
        for item in own:
            if item.key_or_group not in groups:
                _check_key(item, chosen)
        cfg = compose("config", overrides, return_hydra_config=keep_hydra)
        cell = cfg.copy()
        with open_dict(cell):
            cell.pop("hydra", None)
        missing = sorted(OmegaConf.missing_keys(cell))
        if missing:
            raise ConfigError(f"{missing[0]} has no value: give it as {missing[0]}=...")
        OmegaConf.to_object(cell)
    except (HydraException, OmegaConfBaseException) as err:
        raise ConfigError(_explain(err, own)) from err
    except ConfigError:
        raise
    except ValueError as err:
        raise ConfigError(_one_line(err)) from err
    return cfg


def _check_group(item: Override) -> None:
    """Refuse ~key, and an option that the group does not have."""
    key, value = item.key_or_group, item.value()
    if item.is_delete():
        raise ConfigError(f"{item.input_line} is not allowed: nothing can be removed, only set, as in {key}=...")
    if key not in _groups():
        return
    names = options(key)
    if item.is_add():
        raise ConfigError(f"{item.input_line} is not allowed: write it without the +")
    if value not in names and not (key == "experiment" and value is None):
        word = item.get_value_element_as_str()
        raise ConfigError(f"unknown {key} {word!r}{_suggest(word, names)}")


def _check_key(item: Override, cfg: DictConfig) -> None:
    """Refuse a key that the chosen groups do not have, also with a +, and name the nearest ones."""
    key = item.key_or_group
    valid = _keys(cfg)
    if key in valid:
        if item.is_add() and not item.is_force_add():
            raise ConfigError(f"{item.input_line} is not allowed: write it without the +")
        return
    parent, _, leaf = key.rpartition(".")
    home = parent
    while home and home not in valid:
        home = home.rpartition(".")[0]
    if home not in ("", "thresholds.all") and OmegaConf.get_type(OmegaConf.select(cfg, home)) is dict:
        # a free dict such as model.config takes new keys, but only with Hydra's +
        if item.is_add():
            return
        raise ConfigError(f"{key} is new in {home}: write +{item.input_line}")

    def likeness(other):
        home, _, name = other.rpartition(".")
        # elsewhere only what is nearly the same, as shape.context_len for context_len
        return SequenceMatcher(None, leaf, name).ratio() - (0 if home == parent else 0.2)

    near = sorted((other for other in valid if likeness(other) >= 0.6), key=likeness, reverse=True)[:3]
    home = parent if parent in valid and OmegaConf.is_dict(OmegaConf.select(cfg, parent)) else ""
    here = OmegaConf.select(cfg, home) if home else cfg
    guess = f": did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"unknown key {key!r}{guess}; keys{f' of {home}' if home else ''}: {', '.join(map(str, here))}")


def _keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """All dotted keys."""
    keys = []
    for name in cfg:
        keys.append(f"{prefix}{name}")
        if OmegaConf.is_dict(cfg._get_node(name)) and not OmegaConf.is_missing(cfg, name):
            keys += _keys(cfg[name], f"{prefix}{name}.")
    return keys


def _explain(err: Exception, overrides: list[Override]) -> str:
    """One line for an error of Hydra or OmegaConf: the override that it is about, its value and the expected type."""
    cause = err if isinstance(err, OmegaConfBaseException) else err.__cause__
    key = getattr(cause, "full_key", None)
    if not key:
        return _one_line(err).partition(" Config search path")[0]
    what = _one_line(cause)
    for item in overrides:
        if item.key_or_group == key.partition("[")[0]:
            wanted = next((plain for hint, plain in EXPECTED.items() if hint in what), None)
            return f"{item.input_line} has the wrong type: expected {wanted}" if wanted else f"{item.input_line}: {what}"
    return f"{key}: {what}"


def _one_line(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0] if isinstance(err, OmegaConfBaseException) else " ".join(lines)


def _ignored(overrides: list[str], cfg: DictConfig) -> list[str]:
    """A warning for each shared value that was given and that nothing reads; two budgets at once are an error."""
    given = {line.partition("=")[0].lstrip("+") for line in overrides}
    read = {key for key, group in SHARED.items() if key in cfg[group] and OmegaConf.is_interpolation(cfg[group], key)}
    if {"sparsity", "kv_budget"} <= given & read and cfg.kv_budget is not None:
        raise ConfigError("sparsity and kv_budget are two ways to set the same bytes: give only one of them")
    unread = {key: SHARED[key] for key in SHARED if key in given - read}
    unread |= {key: "task" for key in OmegaConf.get_type(cfg.task).unread if key in given}
    return [f"warning: {group}={choice_of(cfg[group])} ignores {key}" for key, group in unread.items()]
