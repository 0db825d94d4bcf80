"""PyTorch twin."""

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """See api.py."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up
