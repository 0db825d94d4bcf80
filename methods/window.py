"""window: the last W tokens. The simplest eviction, and the control for all others (Longformer, arXiv 2004.05150).

`prefill=stream` evicts between the chunks of the prompt too: memory is constant however long the text is, and every token
sees what it would see if the text came token by token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.base import Budgeted, KVLayer, Plan, Spec
from methods.slots import Slots


@dataclass
class Window(Budgeted):
    """A ring of W slots, W from the budget; the token at position p lies in slot p mod W.

    prefill: dense (the prompt attends to all of itself, then the ring keeps its end) or stream.
    """

    prefill: str = "dense"

    def __post_init__(self):
        super().__post_init__()
        check_prefill(self.prefill)

    @property
    def streams(self) -> bool:
        return self.prefill == "stream"

    def num_observed(self) -> int:
        return 0

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

    def prefill_chunk(self, q: Tensor, k: Tensor, v: Tensor, seq: int, start: int, length: int) -> Tensor:
        if not self.method.streams:
            return super().prefill_chunk(q, k, v, seq, start, length)
        ring = self.method.planned.num_slots
        keys, values = with_ring(self.slots, seq, 0, ring, start, k, v)
        out = attend(near_logits(q, keys, self.method.spec.scale, ring), values, q.dtype)
        store_ring(self.slots, seq, 0, ring, k, v, start)
        return out


def check_prefill(prefill: str) -> None:
    if prefill not in ("dense", "stream"):
        raise ValueError(f"method.prefill={prefill} is not one of dense, stream")


def store_ring(slots, seq: int, first: int, size: int, k: Tensor, v: Tensor, start: int = 0) -> None:
    """The last `size` rows of k, v [1, Hkv, N, D] into the ring of slots first .. first + size - 1.

    Row i, the ring's token number start + i, goes to slot first + (start + i) mod size.
    """
    skipped = max(0, k.shape[2] - size)
    place = (start + skipped) % size
    turn = skipped + size - place  # rows from here on begin again at the ring's first slot
    slots.store(seq, first + place, k[:, :, skipped:turn], v[:, :, skipped:turn])
    slots.store(seq, first, k[:, :, turn:], v[:, :, turn:])


def with_ring(slots, seq: int, first: int, size: int, start: int, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values [1, Hkv, min(start, size) + N, D] in order of time: the ring after `start` tokens, then k, v."""
    if not isinstance(slots, Slots):
        raise ValueError("method.prefill=stream reads the ring back, which a quantised cache cannot; use kv_dtype=auto")
    held = first + torch.arange(max(0, start - size), start, device=k.device) % size
    return [torch.cat([rows[seq, :, held][None].to(new.dtype), new], dim=2) for rows, new in ((slots.k, k), (slots.v, v))]


def near_logits(q: Tensor, keys: Tensor, scale: float, size: int) -> Tensor:
    """Scaled logits [1, Hkv, G, N, M], fp32, of the newest N tokens against the newest M keys, -inf outside the last `size`."""
    distance = torch.arange(keys.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
    distance = keys.shape[2] - q.shape[2] - distance
    return grouped_logits(q, keys, scale).masked_fill((distance < 0) | (distance >= size), float("-inf"))


def grouped_logits(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled logits [1, Hkv, G, N, M] in fp32: q [1, Hq, N, D], keys [1, Hkv, M, D]."""
    return (q.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT).float() * scale


def attend(logits: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of logits [1, Hkv, G, N, M] over values [1, Hkv, M, D]: [1, Hq, N, D]."""
    return (logits.softmax(-1).to(dtype) @ values[:, :, None]).flatten(1, 2)
