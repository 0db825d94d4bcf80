"""From the attention that keys receive to one score per key: on the device, alike in prefill and in a decode step.

`mass` is [P, ..., Hkv, T] fp32: attention mass per query, of P predictor layers, each KV head's query group already reduced.
"""

import math

import torch
from torch import Tensor, nn

from methods.base import Spec
from methods.trained import TrainedPart

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
    """Each score as its share of its segment's sum, along the last dimension; the last segment may be shorter."""
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


class StepScores:
    """Scores of every position while decoding, renewed in each step from the logits of P predictor layers.

    logits [B, Hq, C] of the layer at work, mass [P, B, Hkv, C] of this step, smoothed [B, C] over the steps; C positions.
    """

    def __init__(self, spec: Spec, num_layers: int):
        batch, positions = spec.batch_size, spec.context_len + spec.max_new_tokens
        self.logits = torch.zeros(batch, spec.num_q_heads, positions, device=spec.device)
        self.mass = torch.zeros(num_layers, batch, spec.num_kv_heads, positions, device=spec.device)
        self.smoothed = torch.zeros(batch, positions, device=spec.device)

    @staticmethod
    def num_bytes(spec: Spec, num_layers: int) -> int:
        """Bytes held."""
        positions = spec.batch_size * (spec.context_len + spec.max_new_tokens)
        return 4 * positions * (spec.num_q_heads + num_layers * spec.num_kv_heads + 1)

    @staticmethod
    def bytes_read(spec: Spec, num_layers: int) -> int:
        """Bytes that a step reads of them: every layer's logits and mass, and the smoothed scores to renew and to rank them."""
        positions = spec.batch_size * (spec.context_len + spec.max_new_tokens)
        return 4 * positions * (num_layers * (spec.num_q_heads + spec.num_kv_heads) + 2)

    def tensors(self) -> list[Tensor]:
        return [self.logits, self.mass, self.smoothed]

    def start(self, seq: int, scores: Tensor) -> None:
        """Scores [T] of a prompt take the place of all that sequence `seq` had."""
        self.smoothed[seq].zero_()
        self.smoothed[seq, : len(scores)] = scores

    def exists(self, lengths: Tensor) -> Tensor:
        """Which positions hold a token, [B, C], from lengths [B]."""
        return torch.arange(self.smoothed.shape[1], device=lengths.device) < lengths[:, None]

    def take(self, place: int, lse: Tensor, lengths: Tensor, head_reduce: str) -> None:
        """Mass of predictor `place` from its logits, their lse [B, Hq] and the lengths [B] that count."""
        # logits behind the lengths are undefined
        mass = (self.logits - lse[..., None]).exp().masked_fill(~self.exists(lengths)[:, None], 0)
        self.mass[place] = reduced(mass.unflatten(1, (self.mass.shape[2], -1)), head_reduce, 2)

    def smooth(self, scores: Tensor, lengths: Tensor, ema: float) -> None:
        """Scores [B, C] of this step count `ema`, those before it the rest."""
        # pooling reaches over the end: a token to come must not inherit a score
        self.smoothed.lerp_(scores.masked_fill(~self.exists(lengths), 0), ema)


class SelectorMLP(TrainedPart):
    """Small trained correction: score = fused score * exp(MLP of every head's mass, and of its pooled mass, per key).

    Untrained its last layer is zero and the score is the fused score itself. Trained by `python -m harness.train_heads`.
    """

    HIDDEN = 32
    knob, misfit = "method.selector=mlp", "holds no selector of this model"

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
