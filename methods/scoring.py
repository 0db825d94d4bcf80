"""From the attention that keys receive to one score per key: pure functions on the device, alike in prefill and in a decode step.

`mass` is [P, ..., Hkv, T] fp32: attention mass per query, of P predictor layers, each KV head's query group already reduced.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

TINY = 1e-6  # attention below one in a million counts as none where a logarithm is taken


def reduced(x: Tensor, how: str, dim: int) -> Tensor:
    """Max or mean over one dimension."""
    return x.amax(dim) if how == "max" else x.mean(dim)


def pool_neighbours(scores: Tensor, pool: int) -> Tensor:
    """Max over `pool` (odd) neighbours along the last dimension; what lies outside does not exist."""
    if pool == 1:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return nn.functional.max_pool1d(flat, pool, stride=1, padding=pool // 2).view(scores.shape)


def share_of_segment(scores: Tensor, segment: int) -> Tensor:
    """Each score as its share of the sum of its segment (of `segment` keys, the last may be shorter), along the last dimension."""
    length = scores.shape[-1]
    padded = nn.functional.pad(scores, (0, -length % segment)).unflatten(-1, (-1, segment))
    return (padded / padded.sum(-1, keepdim=True).clamp(min=TINY)).flatten(-2)[..., :length]


def page_scores(scores: Tensor, page: int) -> Tensor:
    """Best score in each page: [..., T] -> [..., ceil(T / page)]."""
    if page == 1:
        return scores
    padded = nn.functional.pad(scores, (0, -scores.shape[-1] % page), value=-torch.inf)
    return padded.unflatten(-1, (-1, page)).amax(-1)


def fused_scores(mass: Tensor, head_reduce: str, fuse: str, pool: int, segment: int) -> Tensor:
    """One score per key, [..., T]: heads reduced, share of the segment (0: no segments), neighbours pooled, layers fused."""
    scores = reduced(mass, head_reduce, -2)
    if segment:
        scores = share_of_segment(scores, segment)
    return reduced(pool_neighbours(scores, pool), fuse, 0)


class SelectorMLP(nn.Module):
    """Small trained correction: score = fused score * exp(MLP of every head's mass, and of its pooled mass, per key).

    Untrained its last layer is zero and the score is the fused score itself. Trained by `python -m harness.train_heads`.
    """

    HIDDEN = 32

    def __init__(self, num_layers: int, num_kv_heads: int, pool: int):
        super().__init__()
        self.pool = pool
        self.first = nn.Linear(2 * num_layers * num_kv_heads, self.HIDDEN)
        self.last = nn.Linear(self.HIDDEN, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    @classmethod
    def num_bytes(cls, num_layers: int, num_kv_heads: int) -> int:
        """Bytes of the fp32 weights."""
        return 4 * ((2 * num_layers * num_kv_heads + 1) * cls.HIDDEN + cls.HIDDEN + 1)

    def correction(self, mass: Tensor) -> Tensor:
        """Logarithm of the factor, [..., T], from mass [P, ..., Hkv, T]."""
        features = torch.cat([mass, pool_neighbours(mass, self.pool)], dim=-2).clamp(min=TINY).log()
        features = 1 - 2 * features / math.log(TINY)  # -1 .. 1
        features = features.movedim(0, -3).flatten(-3, -2).mT  # [..., T, 2 P Hkv]
        return self.last(nn.functional.gelu(self.first(features)))[..., 0]

    def forward(self, fused: Tensor, mass: Tensor) -> Tensor:
        """Corrected scores [..., T] from the fused ones and mass."""
        return fused * self.correction(mass).clamp(-20, 20).exp()

    def save(self, path: Path, facts: dict) -> None:
        """Weights with the facts that they hold for: predict_layers, observe, head_reduce, where they come from."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        save_file(tensors, path, {"facts": json.dumps({"pool": self.pool, **facts})})

    def load(self, path: str | Path, facts: dict) -> None:
        """Weights from a file; ValueError with one line when it was trained for other settings."""
        with safe_open(path, framework="pt") as file:
            made_for = json.loads(file.metadata()["facts"])
            for name, value in {"pool": self.pool, **facts}.items():
                if made_for.get(name) != value:
                    raise ValueError(
                        f"method.selector=mlp: {path} was trained for {name}={made_for.get(name)}, not {value}: set "
                        f"method.{name}={made_for.get(name)}, or train again with python -m harness.train_heads"
                    )
            self.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
