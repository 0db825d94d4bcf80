"""Trains sparda's selector MLP: its scores shall rank keys as the attention of deep layers at the answer does."""

import copy
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.calibrate import SPARSITIES, attention_to, deep_layers, kept_by, mean, rest_of
from harness.config import ConfigError
from harness.probe import look_into
from kernels.column_sums import column_sums
from methods.base import Spec
from methods.scoring import SelectorMLP, fused_scores
from methods.sparda import SparDA
from tasks.base import Sample

HELD_OUT = 4  # every fourth sample
LEARNING_RATE = 3e-3
CHECK_EVERY = 25


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
    lessons = [lesson for spec, sample in samples if (lesson := sparda_lesson(method, loaded, spec, sample)) is not None]
    if len(lessons) < HELD_OUT:
        raise ConfigError(f"{len(lessons)} of {len(samples)} samples need any token of their prompt: use more or longer ones")
    train = [lesson for i, lesson in enumerate(lessons) if i % HELD_OUT]
    held_out = lessons[::HELD_OUT]
    device = lessons[0].mass.device
    mlp = SelectorMLP(len(method.predictors), lessons[0].mass.shape[1], method.pool).to(device)

    def fused(lesson: Lesson) -> Tensor:
        return fused_scores(lesson.mass, method.head_reduce, method.fuse, method.pool, method.segment)

    def held_out_recall() -> dict[str, float]:
        with torch.no_grad():
            scores = [mlp(fused(lesson), lesson.mass).cpu() for lesson in held_out]
        kept = {s: [kept_by(line, s, method) for line in scores] for s in SPARSITIES}
        return {
            f"sparsity {s}": mean(
                None if mask is None else float(lesson.need.cpu()[mask].sum())
                for mask, lesson in zip(masks, held_out, strict=True)
            )
            for s, masks in kept.items()
        }

    def total(recall: dict[str, float]) -> float:
        return mean(recall.values()) or 0.0

    before = best = held_out_recall()
    best_state = None
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        lesson = train[step % len(train)]
        log_scores = fused(lesson).clamp(min=1e-9).log() + mlp.correction(lesson.mass)
        loss = -(lesson.need * log_scores.log_softmax(-1)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mlp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            now = held_out_recall()
            print(
                f"step {step + 1}: loss {loss.item():.3f} nats, held-out recall {total(now):.4f}", file=sys.stderr, flush=True
            )
            if total(now) > total(best):
                best, best_state = now, copy.deepcopy(mlp.state_dict())
    measure = "recall of what deep layers need"
    summary = {"samples": len(lessons), "measure": measure, "untrained": before, "trained": best}
    summary["facts"] = method.selector_facts()
    if best_state is None:
        return "sparda_mlp.safetensors", summary, None
    mlp.load_state_dict(best_state)
    return "sparda_mlp.safetensors", summary, mlp


def sparda_lesson(method: SparDA, loaded, spec: Spec, sample: Sample) -> Lesson | None:
    """What predictor layers see of a prompt and what deep layers need of it; None where they need nothing."""
    rest = rest_of(sample, loaded.tokenizer)
    if not rest:
        raise ConfigError("this task has no answers that need the prompt: use task=niah or task=perplexity")
    length = len(sample.prompt_ids)
    queries = length if method.observe == "all" else min(method.observe, length)
    deep, mass, need = deep_layers(spec.num_layers), [], []

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer_idx in method.predictors:
            sums = column_sums(q[:, :, :length], k[:, :, :length], spec.scale, queries, method.head_reduce, spec.impl)
            mass.append(sums[0] / queries)
        if layer_idx in deep:
            need.append(attention_to(q[0, :, length:], k[0], spec.scale)[..., :length].amax((0, 1)))

    look_into(loaded.model, torch.tensor(sample.prompt_ids + rest), spec.scale, look)
    # clones, because what inference mode made cannot be trained on
    needed = torch.stack(need).amax(0).clone()
    needed[: method.num_sinks], needed[length - method.window :] = 0, 0
    total = needed.sum()
    return Lesson(torch.stack(mass).clone(), needed / total) if total > 0 else None
