"""Small trained parts of methods: files of weights that know what they hold for. `python -m harness.train_heads` makes them."""

import json
from pathlib import Path
from typing import ClassVar

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


class TrainedPart(nn.Module):
    """Base of trained parts. knob: what asks for the file, as in method.gate; misfit: what a file of other shapes is."""

    knob: ClassVar[str]
    misfit: ClassVar[str]

    def save(self, path: Path, facts: dict) -> None:
        """Weights with the facts that they hold for, and where they come from."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        save_file(tensors, path, {"facts": json.dumps(facts)})

    def load(self, path: str | Path, facts: dict) -> None:
        """Weights from a file; ValueError with one line when it was trained for other settings or another model."""
        again = "with python -m harness.train_heads"
        with safe_open(path, framework="pt") as file:
            made_for = json.loads((file.metadata() or {}).get("facts", "{}"))
            for name, value in facts.items():
                if made_for.get(name) != value:
                    raise ValueError(
                        f"{self.knob}: {path} was trained for {name}={made_for.get(name)}, not {value}: set "
                        f"method.{name}={made_for.get(name)}, or train again {again}"
                    )
            weights = {name: file.get_tensor(name) for name in file.keys()}
        if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in self.state_dict().items()}:
            raise ValueError(f"{self.knob}: {path} {self.misfit}: train one {again}")
        self.load_state_dict(weights)
