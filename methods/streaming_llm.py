"""streaming_llm: attention sinks plus a window, keys at cache positions (StreamingLLM, arXiv 2309.17453).

The paper rotates every key by its place in the cache. The window's keys keep their true relative distances that way, so only
the sinks differ: each step they are rotated again, from an unrotated fp32 copy, to the distance they have inside the cache.
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
        copies = spec.batch_size * spec.num_layers * spec.num_kv_heads * self.num_sinks * spec.head_dim * 4
        kept = self.solve(spec, minimum=self.num_sinks + 1, why=f"{self.num_sinks} sinks and one token", fixed=copies)
        if kept == spec.context_len:
            return self.plan_slots(spec, kept, grows=False)
        return self.plan_slots(spec, kept, grows=False, extra={"sink_copies": copies}, extra_read=copies)

    def make_layer(self, layer_idx: int) -> KVLayer:
        return KVLayer(self, layer_idx) if self.planned.noop else StreamingLayer(self, layer_idx)

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
        shift = self.shift(seen)
        self.step["sink_cos"], self.step["sink_sin"] = self.rotary(shift[:, None] + sinks)  # [B, 1, S, D]
        self.step["cos"], self.step["sin"] = self.rotary(seen[:, None])  # [B, 1, 1, D]
        self.step["is_sink"] = (sinks == seen[:, None])[:, None, :, None]  # [B, 1, S, 1]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, N, D] at positions [B, N]."""
        cos, sin = self.spec.rotary(positions)
        return cos[:, None], sin[:, None]


class StreamingLayer(KVLayer):
    def __init__(self, method: StreamingLLM, layer_idx: int):
        super().__init__(method, layer_idx)
        spec = method.spec
        shape = (spec.batch_size, spec.num_kv_heads, method.num_sinks, spec.head_dim)
        self.unrotated = torch.zeros(shape, dtype=torch.float32, device=spec.device)

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        sinks, num_slots = self.method.num_sinks, self.method.planned.num_slots
        self.slots.store(seq, 0, k[:, :, :sinks], v[:, :, :sinks])
        store_ring(self.slots, seq, sinks, num_slots - sinks, k[:, :, sinks:], v[:, :, sinks:])
        first = k[:, :, :sinks]
        cos, sin = self.method.rotary(torch.arange(first.shape[2], device=k.device)[None])
        self.unrotated[seq, :, : first.shape[2]] = unrotate(first.float(), cos, sin)[0]

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
        sink_keys = rotate(self.unrotated[seq, :, : len(first)][None], *method.rotary(first[None]))
        to_sinks = grouped_logits(turned, sink_keys, scale).masked_fill(first > positions[:, None], float("-inf"))
        values = torch.cat([self.slots.v[seq, :, : len(first)][None].to(v.dtype), values], dim=2)
        return attend(torch.cat([to_sinks, near_logits(q, keys, scale, ring)], dim=-1), values, q.dtype)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = self.method.step
        # a prompt shorter than the sinks gets its missing sinks while it decodes
        fresh = unrotate(k.float(), step["cos"], step["sin"])
        self.unrotated.copy_(torch.where(step["is_sink"], fresh, self.unrotated))
        self.slots.overwrite_keys(0, rotate(self.unrotated, step["sink_cos"], step["sink_sin"]).to(k.dtype))
        return super().decode(q, k, v)

    def rotated_at(self, seen: Tensor) -> Tensor:
        held = self.positions(seen).clone()
        held[:, :, : self.method.num_sinks] += self.method.shift(seen - 1)[:, None, None]
        return held

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.slots.tensors() | {"sink_copies": [self.unrotated]}


def half_turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Llama, Qwen and Mistral; x [B, H, N, D]."""
    return x * cos + half_turned(x) * sin


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverse of rotate, also where cos and sin carry an attention scaling."""
    return (x * cos - half_turned(x) * sin) / (cos * cos + sin * sin)
