"""Trains sparda's selector MLP: its scores shall rank keys as the attention of deep layers at the answer does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.trainers.common import RECALL, fit, need_of, recall_of, split
from kernels.column_sums import column_sums
from methods.base import Spec
from methods.scoring import SelectorMLP, fused_scores
from methods.sparda import SparDA
from tasks.base import Sample

FILE = "sparda_mlp.safetensors"
LEARNING_RATE = 3e-3


@dataclass
class Lesson:
    """One sample for the SparDA selector: mass [P, Hkv, T] as prefill gives it, and what deep layers need [T], summing to 1."""

    mass: Tensor
    need: Tensor


def train_sparda(
    method: SparDA, loaded, samples: list[tuple[Spec, Sample]], steps: int
) -> tuple[str, dict, SelectorMLP | None]:
    """The selector MLP: its scores shall rank keys as the attention of deep layers at the answer does.

    Returns:
        file name, summary, and the trained part (None when the held-out recall did not rise).
    """
    method.predictors = method.layers_for(samples[-1][0])
    found = [sparda_lesson(method, loaded, spec, sample) for spec, sample in samples]
    train, held_out = split(found, len(samples))
    device = train[0].mass.device
    mlp = SelectorMLP(len(method.predictors), train[0].mass.shape[1], method.pool).to(device)

    def fused(lesson: Lesson) -> Tensor:
        return fused_scores(lesson.mass, method.head_reduce, method.fuse, method.pool, method.segment)

    def loss_of(lesson: Lesson) -> Tensor:
        log_scores = fused(lesson).clamp(min=1e-9).log() + mlp.correction(lesson.mass)
        return -(lesson.need * log_scores.log_softmax(-1)).sum()

    def recall() -> dict[str, float | None]:
        scores = [mlp(fused(lesson), lesson.mass) for lesson in held_out]
        return recall_of(scores, [lesson.need for lesson in held_out], method)

    before, best, helped = fit(mlp, train, loss_of, recall, "recall", steps=steps, learning_rate=LEARNING_RATE)
    summary = {"samples": len(train) + len(held_out), "measure": RECALL, "untrained": before, "trained": best}
    return FILE, summary | {"facts": method.selector_facts()}, mlp if helped else None


def sparda_lesson(method: SparDA, loaded, spec: Spec, sample: Sample) -> Lesson | None:
    """What predictor layers see of a prompt and what deep layers need of it; None where they need nothing."""
    length, mass = len(sample.prompt_ids), []
    queries = length if method.observe == "all" else min(method.observe, length)

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer_idx in method.predictors:
            mass.append(column_sums(q, k, spec.scale, queries, method.head_reduce, spec.impl)[0] / queries)

    need = need_of(method, loaded, spec, sample, look)
    # a clone, because what inference mode made cannot be trained on
    return None if need is None else Lesson(torch.stack(mass).clone(), need)
