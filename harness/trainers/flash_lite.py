"""Trains flash_lite's block head: its scores shall rank blocks of keys as full attention's own mass does."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.calibrate import attention_to, mean
from harness.config import ConfigError
from harness.probe import look_into
from harness.trainers.common import HELD_OUT, fit, split
from methods.base import Spec
from methods.flash_lite import BLOCK, BlockHead, FlashLite, block_mask, key_features, pooled_keys, pooled_mean, scores_of
from tasks.base import Sample

FILE = "flash_lite_head.safetensors"
LEARNING_RATE = 3e-3
SKIPS = (0.25, 0.5, 0.75)
# the first row of blocks with two that may be left out, so that there is a choice
FIRST_ROW = 3


@dataclass
class Lesson:
    """One prompt in L sparse layers.

    q: pooled queries [L, Hq, n, D]. features: of keys [L, Hkv, n, 3 D]. scores: training-free ones [L, Hq, n, n].
    mass: of full attention [L, Hq, n, n], each row sums to 1.
    """

    q: Tensor
    features: Tensor
    scores: Tensor
    mass: Tensor


def train_flash_lite(
    method: FlashLite, loaded, samples: list[tuple[Spec, Sample]], steps: int
) -> tuple[str, dict, BlockHead | None]:
    """The head of the sparse layers, distilled from the block mass of full attention over whole prompts.

    Returns:
        file name, summary, and the trained part (None when the held-out mass did not rise).
    """
    spec = samples[-1][0]
    layers = method.sparse_layers(spec)
    long_enough = [(own, sample) for own, sample in samples if len(sample.prompt_ids) > FIRST_ROW * BLOCK]
    if not layers:
        raise ConfigError("no layer of this model leaves out any block: use method.prefill_skip above 0, fewer dense_layers")
    if len(long_enough) < HELD_OUT:
        raise ConfigError(
            f"{len(long_enough)} of {len(samples)} samples have more than {FIRST_ROW * BLOCK} tokens: use at least {HELD_OUT}"
        )
    train, held_out = split([lesson_of(method, loaded, own, sample) for own, sample in long_enough], len(samples))
    head = BlockHead(len(layers), spec.num_q_heads, spec.num_kv_heads, spec.head_dim).to(train[0].q.device)

    def scores(lesson: Lesson) -> Tensor:
        added = [head(place, q, features) for place, (q, features) in enumerate(zip(lesson.q, lesson.features, strict=True))]
        return lesson.scores + torch.stack(added)

    def held_out_mass() -> dict[str, float | None]:
        found = [(scores(lesson), lesson.mass) for lesson in held_out]
        return {
            f"prefill_skip {skip}": mean(kept_mass(own, mass, skip, method.skip_cap) for own, mass in found) for skip in SKIPS
        }

    def loss(lesson: Lesson) -> Tensor:
        return loss_of(scores(lesson), lesson.mass)

    before, best, helped = fit(head, train, loss, held_out_mass, "mass", steps=steps, learning_rate=LEARNING_RATE)
    measure = "attention mass that the mask keeps"
    summary = {"samples": len(train) + len(held_out), "measure": measure, "untrained": before, "trained": best}
    return FILE, summary | {"facts": method.head_facts()}, head if helped else None


def lesson_of(method: FlashLite, loaded, spec: Spec, sample: Sample) -> Lesson:
    """What the head sees of a prompt in every sparse layer, and what full attention does there."""
    layers, seen = method.sparse_layers(spec), []

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer_idx in layers:
            pooled = pooled_mean(q[0])
            scores = scores_of(pooled, pooled_keys(k[0], method.pool), spec.scale)
            seen.append((pooled, key_features(k[0]), scores, block_mass(q[0], k[0], spec.scale)))

    look_into(loaded.model, torch.tensor(sample.prompt_ids), spec.scale, look)
    # clones, because what inference mode made cannot be trained on
    return Lesson(*(torch.stack(parts).clone() for parts in zip(*seen, strict=True)))


def block_mass(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Mean attention of each block of queries to each block of keys, [Hq, n, n] fp32; q [Hq, T, D], k [Hkv, T, D]."""
    num_blocks = -(-q.shape[1] // BLOCK)
    rows = []
    for start in range(0, q.shape[1], BLOCK):
        end = min(start + BLOCK, q.shape[1])
        weights = attention_to(q[:, start:end], k[:, :end], scale).mean(1)  # [Hq, end]
        rows.append(nn.functional.pad(weights, (0, num_blocks * BLOCK - end)).unflatten(1, (-1, BLOCK)).sum(-1))
    return torch.stack(rows, 1)


def loss_of(scores: Tensor, mass: Tensor) -> Tensor:
    """Cross entropy over the blocks that may be left out, each row as heavy as its mass there; [..., n, n] both."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    free = (place > 0) & (place < place[:, None])
    logs = scores.masked_fill(~free, -torch.inf)[..., FIRST_ROW:, :].log_softmax(-1)
    mass, free = mass[..., FIRST_ROW:, :], free[FIRST_ROW:]
    return -(mass * logs.masked_fill(~free, 0)).sum(-1).mean()


def kept_mass(scores: Tensor, mass: Tensor, skip: float, cap: float) -> float:
    """Mean share of a row's attention that the mask keeps, over layers, heads and the rows that leave something to choose."""
    masks = torch.stack([block_mask(layer, skip, cap) for layer in scores])
    return float((mass * masks).sum(-1)[..., FIRST_ROW:].mean())
