"""random: sinks, recent tokens and a random middle. The control that shows what a selector's choice is worth at the same bytes.

One draw per prompt, the same for all layers and heads, so that a forgotten token is forgotten everywhere. It depends on the
seed and the prompt's tokens alone, not on the batch.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.select import select
from methods.base import Budgeted, KVLayer, Plan, Spec
from methods.kept import INDEX_BYTES, OFFSET_BYTES, ChoosesOnce, KeptLayer, empty_index


@dataclass
class Random(ChoosesOnce, Budgeted):
    """First `num_sinks` and last `window` tokens of the prompt, and a draw by `seed` from the rest."""

    num_sinks: int = 4
    window: int = 32
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.num_sinks < 0 or self.window < 1:
            raise ValueError(f"method.num_sinks={self.num_sinks} must be >= 0 and method.window={self.window} >= 1")

    def plan(self, spec: Spec) -> Plan:
        fixed = spec.batch_size * OFFSET_BYTES
        why = f"{self.num_sinks} sinks, {self.window} recent tokens and one drawn"
        kept = self.solve(spec, minimum=self.num_sinks + self.window + 1, why=why, per_slot=INDEX_BYTES, fixed=fixed)
        extra = {"index": spec.batch_size * kept * INDEX_BYTES + fixed}
        return self.plan_slots(spec, kept, grows=True, extra=extra if kept < spec.context_len else None)

    def make_layer(self, layer_idx: int) -> KVLayer:
        if self.planned.noop:
            return KVLayer(self, layer_idx)
        if layer_idx == 0:
            self.index = empty_index(self, 1)
        return RandomLayer(self, layer_idx, self.index)

    def begin_prefill(self, seq: int, prompt: Tensor) -> None:
        super().begin_prefill(seq, prompt)
        if len(prompt) > self.planned.kept:
            # a CPU generator: the same draw on every device
            generator = torch.Generator().manual_seed(zlib.crc32(prompt.cpu().numpy().tobytes(), self.seed))
            scores = torch.rand(len(prompt), generator=generator).to(prompt.device)
            self.drawn = select(scores, self.planned.kept, self.num_sinks, self.window, self.spec.impl)[None, None]

    def end_prefill(self, seq: int) -> None:
        self.drawn = None  # the index has it


class RandomLayer(KeptLayer):
    def choose(self, q: Tensor, k: Tensor, seq: int) -> Tensor:
        return self.method.drawn
