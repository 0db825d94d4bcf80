"""window: only the last W tokens stay. The simplest eviction, and the control for all others (Longformer, arXiv 2004.05150)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.base import Budgeted, KVLayer, Plan, Spec


@dataclass
class Window(Budgeted):
    """A ring of W slots, W from the budget; the token at position p lies in slot p mod W."""

    overwrites: ClassVar[bool] = True

    def plan(self, spec: Spec) -> Plan:
        return self.plan_slots(spec, self.solve(spec, minimum=1, why="one token"), grows=False)

    def make_layer(self, layer_idx: int) -> KVLayer:
        return WindowLayer(self, layer_idx)

    def slot_of(self, seen: Tensor) -> Tensor:
        return seen % self.planned.num_slots

    def positions(self, seen: Tensor) -> Tensor:
        num_slots = self.planned.num_slots
        slots = torch.arange(num_slots, device=seen.device)
        newest = seen[:, None] - 1
        held = newest - (newest - slots) % num_slots
        return torch.where(held >= 0, held, -1)


class WindowLayer(KVLayer):
    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        store_ring(self.slots, seq, 0, self.method.planned.num_slots, k, v)


def store_ring(slots, seq: int, first: int, size: int, k: Tensor, v: Tensor) -> None:
    """Last `size` rows of k, v [1, Hkv, N, D] into the ring of slots first .. first + size - 1: row i at first + i mod size."""
    length = k.shape[2]
    start = max(0, length - size)
    turn = min(length, (start + size - 1) // size * size)  # rows from here on begin again at the ring's first slot
    slots.store(seq, first + start % size, k[:, :, start:turn], v[:, :, start:turn])
    slots.store(seq, first, k[:, :, turn:], v[:, :, turn:])
