"""Reads what `python -m harness.calibrate` wrote for a model: json with the model's shape and a part for each method."""

import json
from pathlib import Path

from methods.base import Spec

ROOT = Path(__file__).resolve().parents[1]
# of Spec: a calibration holds for a model of these
SHAPE = ("num_layers", "num_q_heads", "num_kv_heads", "head_dim")
MAKE = "make it with `python -m harness.calibrate` and the same model=..."


def model_file(path: str | None) -> Path | None:
    """The file that a knob names, if it exists; a relative path counts from the checkout."""
    found = ROOT / path if path else None
    return found if found and found.is_file() else None


def calibrated(path: str | None, part: str, spec: Spec, knob: str) -> dict:
    """A calibration that has this method's part; ValueError of one line, naming `knob` as what needs it and the way out."""
    file = model_file(path)
    if file is None:
        missing = f"{path} does not exist" if path else "method.calibration names no file"
        raise ValueError(f"{knob} needs a calibration and {missing}: {MAKE}")
    try:
        content = json.loads(file.read_text())
        shape, _ = content["shape"], content[part]
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{knob}: {path} is no calibration of {part} ({err!r}): {MAKE}") from None
    if shape != shape_of(spec):
        raise ValueError(f"{knob}: {path} was made for another model, of {shape} and not {shape_of(spec)}: {MAKE}")
    return content


def shape_of(spec: Spec) -> dict[str, int]:
    """What must be alike in the model that was calibrated and the one that runs."""
    return {name: getattr(spec, name) for name in SHAPE}
