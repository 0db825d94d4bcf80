"""Trains hysparse's gate: its logits shall rank tokens as the attention of deep layers at the answer does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.trainers.common import RECALL, fit, need_of, recall_of, split
from methods.base import Spec
from methods.gate import Gate, token_classes
from methods.hysparse import HySparse
from tasks.base import Sample

FILE = "hysparse_gate.safetensors"
LEARNING_RATE = 1e-2


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
    found = [hysparse_lesson(method, loaded, table, spec, sample) for spec, sample in samples]
    train, held_out = split(found, len(samples))
    gate = Gate(train[0].values.shape[1]).to(train[0].values.device)

    def loss_of(lesson: Lesson) -> Tensor:
        return -(lesson.need * lesson.logits(gate).log_softmax(-1)).sum()

    def recall() -> dict[str, float | None]:
        return recall_of([lesson.logits(gate) for lesson in held_out], [lesson.need for lesson in held_out], method)

    before, best, helped = fit(gate, train, loss_of, recall, "recall", steps=steps, learning_rate=LEARNING_RATE)
    summary = {"samples": len(train) + len(held_out), "measure": RECALL, "untrained": before, "trained": best}
    summary["facts"] = method.gate_facts()
    if not helped:
        return FILE, summary, None
    with torch.no_grad():
        logits = torch.cat([lesson.logits(gate) for lesson in train])
        gate.bias -= logits.quantile(1 - method.key_fraction)
    return FILE, summary, gate


def hysparse_lesson(method: HySparse, loaded, table: Tensor, spec: Spec, sample: Sample) -> Lesson | None:
    """What the gate sees of a prompt and what deep layers need of it; None where they need nothing."""
    seen = {}
    method.spec = spec

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer_idx == 0:
            seen["values"] = v[0].transpose(0, 1).flatten(1).float()
        if layer_idx == method.layer:
            seen["received"] = method.received(q, k)

    need = need_of(method, loaded, spec, sample, look)
    if need is None:
        return None
    classes = table[sample.prompt_ids].long().to(need.device)
    # clones, because what inference mode made cannot be trained on
    return Lesson(classes, seen["values"].clone(), seen["received"].clone(), need)
