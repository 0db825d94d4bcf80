"""Trains hysparse's gate: its logits shall rank tokens as the attention of deep layers at the answer does."""

import copy
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.calibrate import SPARSITIES, attention_to, deep_layers, kept_by, mean, rest_of
from harness.config import ConfigError
from harness.probe import look_into
from methods.base import Spec
from methods.gate import Gate, token_classes
from methods.hysparse import HySparse
from tasks.base import Sample

FILE = "hysparse_gate.safetensors"
HELD_OUT = 4  # every fourth sample
LEARNING_RATE = 1e-2
CHECK_EVERY = 25


@dataclass
class Lesson:
    """One prompt as the gate sees it, and what deep layers need of it, [T], summing to 1.

    classes [T], values of layer 0 [T, C], log2 of the attention received [T].
    """

    classes: Tensor
    values: Tensor
    received: Tensor
    need: Tensor

    def logits(self, gate: Gate) -> Tensor:
        """Gate logits [T]."""
        sensitivity = gate.sensitivity(gate.distances(self.values, gate.before(self.values)))
        return gate(self.classes, sensitivity, self.received)


def train_hysparse(method: HySparse, loaded, samples: list[tuple[Spec, Sample]], steps: int) -> tuple[str, dict, Gate | None]:
    """The gate, distilled from full attention while the model stays frozen.

    Its bias is set afterwards, so that `key_fraction` of the training prompts' tokens are gated in.

    Returns:
        file name, summary, and the trained part (None when the held-out recall did not rise).
    """
    method.layer = method.layer_of(samples[-1][0])
    table = torch.tensor(list(token_classes(loaded.tokenizer, loaded.model.config.get_text_config().vocab_size)))
    lessons = [lesson for spec, one in samples if (lesson := hysparse_lesson(method, loaded, table, spec, one)) is not None]
    if len(lessons) < HELD_OUT:
        raise ConfigError(f"{len(lessons)} of {len(samples)} samples need any token of their prompt: use more or longer ones")
    train = [lesson for i, lesson in enumerate(lessons) if i % HELD_OUT]
    held_out = lessons[::HELD_OUT]
    gate = Gate(lessons[0].values.shape[1]).to(lessons[0].values.device)

    def held_out_recall() -> dict[str, float]:
        with torch.no_grad():
            logits = [lesson.logits(gate).cpu() for lesson in held_out]
        kept = {s: [kept_by(line, s, method) for line in logits] for s in SPARSITIES}
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
    optimizer = torch.optim.AdamW(gate.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        lesson = train[step % len(train)]
        loss = -(lesson.need * lesson.logits(gate).log_softmax(-1)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gate.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            now = held_out_recall()
            print(
                f"step {step + 1}: loss {loss.item():.3f} nats, held-out recall {total(now):.4f}", file=sys.stderr, flush=True
            )
            if total(now) > total(best):
                best, best_state = now, copy.deepcopy(gate.state_dict())
    measure = "recall of what deep layers need"
    summary = {"samples": len(lessons), "measure": measure, "untrained": before, "trained": best}
    summary["facts"] = method.gate_facts()
    if best_state is None:
        return FILE, summary, None
    gate.load_state_dict(best_state)
    with torch.no_grad():
        logits = torch.cat([lesson.logits(gate) for lesson in train])
        gate.bias -= logits.quantile(1 - method.key_fraction)
    return FILE, summary, gate


def hysparse_lesson(method: HySparse, loaded, table: Tensor, spec: Spec, sample: Sample) -> Lesson | None:
    """What the gate sees of a prompt and what deep layers need of it; None where they need nothing."""
    rest = rest_of(sample, loaded.tokenizer)
    if not rest:
        raise ConfigError("this task has no answers that need the prompt: use task=niah or task=perplexity")
    length = len(sample.prompt_ids)
    deep, seen, need = deep_layers(spec.num_layers), {}, []
    method.spec = spec

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer_idx == 0:
            seen["values"] = v[0, :, :length].transpose(0, 1).flatten(1).float()
        if layer_idx == method.layer:
            seen["received"] = method.received(q[:, :, :length], k[:, :, :length])
        if layer_idx in deep:
            need.append(attention_to(q[0, :, length:], k[0], spec.scale)[..., :length].amax((0, 1)))

    look_into(loaded.model, torch.tensor(sample.prompt_ids + rest), spec.scale, look)
    # clones, because what inference mode made cannot be trained on
    needed = torch.stack(need).amax(0).clone()
    needed[: method.num_sinks], needed[length - method.window :] = 0, 0
    total = needed.sum()
    if not total > 0:
        return None
    classes = table[sample.prompt_ids].long().to(needed.device)
    return Lesson(classes, seen["values"].clone(), seen["received"].clone(), needed / total)
