"""streaming_llm: attention sinks plus a window, keys at cache positions (StreamingLLM, arXiv 2309.17453).

The paper rotates every key by its place in the cache. The window's keys keep their true relative distances that way, so only
the sinks differ: each step a copy of their keys is turned by as many positions as the cache has slid, for all layers at once.
`prefill=dense` evicts once the prompt has been seen; `prefill=stream` is the paper's own use: eviction between the chunks of an
endless text, in which every token sees the sinks and the window as it would if the text came token by token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.base import Budgeted, KVLayer, Plan, Spec
from methods.window import attend, check_prefill, grouped_logits, near_logits, store_ring, with_ring


@dataclass
class StreamingLLM(Budgeted):
    """`num_sinks` first tokens (paper: 4) and a ring of the rest of the budget; prefill: dense or stream."""

    num_sinks: int = 4
    prefill: str = "dense"

    overwrites: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_prefill(self.prefill)
        if self.num_sinks < 1:
            raise ValueError(f"num_sinks={self.num_sinks} must be at least 1; without sinks use method=window")

    @property
    def streams(self) -> bool:
        return self.prefill == "stream"

    def num_observed(self) -> int:
        return 0

    def plan(self, spec: Spec) -> Plan:
        copies = spec.batch_size * spec.num_layers * spec.num_kv_heads * self.num_sinks * spec.head_dim * spec.dtype.itemsize
        kept = self.solve(spec, minimum=self.num_sinks + 1, why=f"{self.num_sinks} sinks and one token", fixed=copies)
        if kept == spec.context_len:
            return self.plan_slots(spec, kept, grows=False)
        return self.plan_slots(spec, kept, grows=False, extra={"sink_copies": copies}, extra_read=copies)

    def bind(self, spec: Spec) -> None:
        super().bind(spec)
        if not self.planned.noop:
            shape = (spec.num_layers, spec.batch_size, spec.num_kv_heads, self.num_sinks, spec.head_dim)
            self.copies = torch.zeros(shape, dtype=spec.dtype, device=spec.device)  # the sinks' keys as they came

    def release(self) -> None:
        super().release()
        self.copies = None

    def make_layer(self, layer_idx: int) -> KVLayer:
        return KVLayer(self, layer_idx) if self.planned.noop else StreamingLayer(self, layer_idx)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {} if self.planned.noop else {"sink_copies": [self.copies]}

    def slot_of(self, seen: Tensor) -> Tensor:
        ring = self.planned.num_slots - self.num_sinks
        return torch.where(seen < self.num_sinks, seen, self.num_sinks + (seen - self.num_sinks) % ring)

    def positions(self, seen: Tensor) -> Tensor:
        slots = torch.arange(self.planned.num_slots, device=seen.device)
        newest = seen[:, None] - 1
        held = newest - (newest - slots) % (self.planned.num_slots - self.num_sinks)
        held = torch.where(slots < self.num_sinks, slots, held)
        # a ring slot not reached yet would name a sink's position
        return torch.where((held <= newest) & ((slots < self.num_sinks) | (held >= self.num_sinks)), held, -1)

    def shift(self, seen: Tensor) -> Tensor:
        """How far the sinks move up for the query at position seen [B], which stands at cache position min(seen, C - 1)."""
        return seen - seen.clamp(max=self.planned.num_slots - 1)

    def begin_step(self, seen: Tensor) -> None:
        super().begin_step(seen)
        if self.planned.noop:
            return
        sinks = torch.arange(self.num_sinks, device=seen.device)
        self.step["is_sink"] = (sinks == seen[:, None])[:, None, :, None]  # [B, 1, S, 1]
        cos, sin = self.rotary(self.shift(seen)[:, None])  # [B, 1, 1, D]
        # the copies carry an attention scaling already
        scaling = torch.hypot(cos, sin)
        turned = rotate(self.copies.float(), cos / scaling, sin / scaling)
        for layer, keys in zip(self.layers, turned.unbind(), strict=True):
            # the row of a sink that comes in this step is overwritten by its append
            layer.slots.overwrite_keys(0, keys)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, N, D] at positions [B, N]."""
        cos, sin = self.spec.rotary(positions)
        return cos[:, None], sin[:, None]


class StreamingLayer(KVLayer):
    @property
    def copy(self) -> Tensor:
        """Keys of this layer's sinks as they came, [B, Hkv, S, D]."""
        return self.method.copies[self.layer_idx]

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        sinks, num_slots = self.method.num_sinks, self.method.planned.num_slots
        self.slots.store(seq, 0, k[:, :, :sinks], v[:, :, :sinks])
        store_ring(self.slots, seq, sinks, num_slots - sinks, k[:, :, sinks:], v[:, :, sinks:])
        self.copy[seq, :, : k.shape[2]] = k[0, :, :sinks]

    def prefill_chunk(self, q: Tensor, k: Tensor, v: Tensor, seq: int, start: int, length: int) -> Tensor:
        method = self.method
        if not method.streams:
            return super().prefill_chunk(q, k, v, seq, start, length)
        sinks, ring, scale = method.num_sinks, method.planned.num_slots - method.num_sinks, method.spec.scale
        if start == 0:
            if k.shape[2] < min(sinks, length):
                raise ValueError(f"the first chunk of {k.shape[2]} tokens must hold the {sinks} sinks")
            self.keep(q, k, v, seq)
            keys, values = k[:, :, sinks:], v[:, :, sinks:]
        else:
            keys, values = with_ring(self.slots, seq, sinks, ring, start - sinks, k, v)
            store_ring(self.slots, seq, sinks, ring, k, v, start - sinks)
        positions = torch.arange(start, start + q.shape[2], device=q.device)
        places = positions.clamp(max=sinks + ring - 1)  # of the queries inside the cache; sink i lies at place i
        turned = rotate(unrotate(q.float(), *method.rotary(positions[None])), *method.rotary(places[None]))
        first = torch.arange(min(sinks, start + q.shape[2]), device=q.device)
        sink_keys = self.copy[seq, :, : len(first)][None].float()
        to_sinks = grouped_logits(turned, sink_keys, scale).masked_fill(first > positions[:, None], float("-inf"))
        values = torch.cat([self.slots.v[seq, :, : len(first)][None].to(v.dtype), values], dim=2)
        return attend(torch.cat([to_sinks, near_logits(q, keys, scale, ring)], dim=-1), values, q.dtype)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # a prompt shorter than the sinks gets its missing sinks while it decodes
        torch.where(self.method.step["is_sink"], k, self.copy, out=self.copy)
        return super().decode(q, k, v)

    def rotated_at(self, seen: Tensor) -> Tensor:
        held = self.positions(seen).clone()
        held[:, :, : self.method.num_sinks] += self.method.shift(seen - 1)[:, None, None]
        return held


def half_turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Llama, Qwen and Mistral; x [B, H, N, D]."""
    return x * cos + half_turned(x) * sin


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverse of rotate, also where cos and sin carry an attention scaling."""
    return (x * cos - half_turned(x) * sin) / (cos * cos + sin * sin)
