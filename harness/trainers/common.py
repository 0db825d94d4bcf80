"""What trainers share: what deep layers need of a prompt, recall of it, and the loop that keeps the best weights."""

import copy
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from harness.calibrate import SPARSITIES, attention_to, deep_layers, kept_by, mean, rest_of
from harness.config import ConfigError
from harness.probe import Look, look_into
from methods.base import Spec
from tasks.base import Sample

HELD_OUT = 4  # every fourth sample
CHECK_EVERY = 25
RECALL = "recall of what deep layers need"


def need_of(knobs, loaded, spec: Spec, sample: Sample, look: Look) -> Tensor | None:
    """What deep layers need of a prompt's tokens while they answer, [T], summing to 1; None where they need nothing.

    Args:
        knobs: a method with num_sinks and window, whose tokens are kept anyway. look: sees q, k, v of the prompt alone.
    """
    rest = rest_of(sample, loaded.tokenizer)
    if not rest:
        raise ConfigError("this task has no answers that need the prompt: use task=niah or task=perplexity")
    length, deep, need = len(sample.prompt_ids), deep_layers(spec.num_layers), []

    def look_deeper(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        look(layer_idx, *(x[:, :, :length] for x in (q, k, v)))
        if layer_idx in deep:
            need.append(attention_to(q[0, :, length:], k[0], spec.scale)[..., :length].amax((0, 1)))

    look_into(loaded.model, torch.tensor(sample.prompt_ids + rest), spec.scale, look_deeper)
    # a clone, because what inference mode made cannot be trained on
    needed = torch.stack(need).amax(0).clone()
    needed[: knobs.num_sinks], needed[length - knobs.window :] = 0, 0
    total = needed.sum()
    return needed / total if total > 0 else None


def split(found: list, num_samples: int) -> tuple[list, list]:
    """Lessons to train on and those held out; ConfigError when too few of `num_samples` gave one (the others are None)."""
    lessons = [lesson for lesson in found if lesson is not None]
    if len(lessons) < HELD_OUT:
        raise ConfigError(f"{len(lessons)} of {num_samples} samples need any token of their prompt: use more or longer ones")
    return [lesson for i, lesson in enumerate(lessons) if i % HELD_OUT], lessons[::HELD_OUT]


def recall_of(scores: list[Tensor], needs: list[Tensor], knobs) -> dict[str, float | None]:
    """Mean share of the need [T] that falls on what the scores [T] keep, by sparsity."""
    kept = {s: [kept_by(line.cpu(), s, knobs) for line in scores] for s in SPARSITIES}
    return {
        f"sparsity {s}": mean(
            None if mask is None else float(need.cpu()[mask].sum()) for mask, need in zip(masks, needs, strict=True)
        )
        for s, masks in kept.items()
    }


def fit(
    part: nn.Module,
    train: list,
    loss_of: Callable,
    held_out: Callable[[], dict[str, float | None]],
    word: str,
    *,
    steps: int,
    learning_rate: float,
) -> tuple[dict, dict, bool]:
    """Train `part` on one lesson after the other; it ends with the weights that do best on the held-out samples.

    Args:
        loss_of: a lesson's loss. held_out: what the part reaches now, by setting, the more the better; word: its name.
    Returns:
        what it reached before and at its best, and whether that is more.
    """

    def measure() -> dict[str, float | None]:
        with torch.no_grad():
            return held_out()

    def total(reached: dict[str, float | None]) -> float:
        return mean(reached.values()) or 0.0

    before = best = measure()
    best_state = None
    optimizer = torch.optim.AdamW(part.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        loss = loss_of(train[step % len(train)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            now = measure()
            line = f"step {step + 1}: loss {loss.item():.3f} nats, held-out {word} {total(now):.4f}"
            print(line, file=sys.stderr, flush=True)
            if total(now) > total(best):
                best, best_state = now, copy.deepcopy(part.state_dict())
    if best_state is not None:
        part.load_state_dict(best_state)
    return before, best, best_state is not None
