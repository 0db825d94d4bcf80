"""oracle: every step reads only the slots that this step's own queries attend to most. Simulated: it frees and saves nothing.

All tokens stay in the cache. At each decoded token each layer and KV head computes the true attention of that very query over
all of them, keeps the k keys of highest probability, summed over the heads of the group, and attends to those alone; k is the
number of slots that `sparsity` or `kv_budget` buys. No method that reads k slots can catch more attention mass, so a task that
the oracle fails needs more slots, and one that it solves and a selector fails needs a better selector, or one that may change
its mind: the oracle chooses anew at each step, while a method that evicts is bound to one set.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.select import select
from methods.base import Budgeted, KVLayer, Plan, Spec

LOGIT_BYTES = 4  # fp32


@dataclass
class Oracle(Budgeted):
    """Top k of the step's own attention; sparsity is the share of slots that do not take part, no bytes are freed."""

    memory_class: ClassVar[str] = "none"
    reads_lists: ClassVar[bool] = True

    def num_read(self, spec: Spec) -> int:
        """Slots that take part in a step."""
        return self.solve(spec, minimum=1, why="one token")

    def plan(self, spec: Spec) -> Plan:
        num_read = self.num_read(spec)
        noop = num_read == spec.context_len
        logits = 0 if noop else spec.batch_size * spec.num_q_heads * (spec.context_len + spec.max_new_tokens) * LOGIT_BYTES
        chosen = 0 if noop else spec.batch_size * spec.num_layers * num_read * spec.slot_bytes(self.stored_dtype(spec))
        # what it really reads: everything, to know the best, then the best again
        plan = self.plan_slots(
            spec,
            spec.context_len,
            grows=True,
            extra={"logits": logits} if logits else None,
            extra_read=chosen + spec.num_layers * logits,
        )
        return dataclasses.replace(plan, noop=noop)

    def bind(self, spec: Spec) -> None:
        super().bind(spec)
        if not self.planned.noop:
            shape = (spec.batch_size, spec.num_q_heads, self.planned.num_slots)
            self.logits = torch.zeros(shape, dtype=torch.float32, device=spec.device)

    def release(self) -> None:
        super().release()
        self.logits = None

    def make_layer(self, layer_idx: int) -> KVLayer:
        return KVLayer(self, layer_idx) if self.planned.noop else OracleLayer(self, layer_idx)

    def facts(self) -> dict:
        return {"slots_attended_per_step": self.num_read(self.spec)}

    def flags(self) -> list[str]:
        return ["simulated"]

    def tensors(self) -> dict[str, list[Tensor]]:
        return {} if self.planned.noop else {"logits": [self.logits]}


class OracleLayer(KVLayer):
    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method, spec, step = self.method, self.method.spec, self.method.step
        self.slots.append(k[:, :, 0], v[:, :, 0], step["slot"])
        _, lse = self.slots.attend(q[:, :, 0], step["lengths"], spec.scale, logits=method.logits)
        mass = (method.logits - lse[..., None]).exp().unflatten(1, (spec.num_kv_heads, -1)).sum(2)  # [B, Hkv, C]
        lengths = step["lengths"][:, None].expand(-1, spec.num_kv_heads)
        index = select(mass, method.num_read(spec), 0, 0, spec.impl, lengths=lengths)
        out, _ = self.slots.attend(q[:, :, 0], step["lengths"], spec.scale, index=index)
        return out[:, :, None]
