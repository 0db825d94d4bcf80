"""The sliding-attention layers of hybrid models (Gemma 3): each keeps its own window, whatever the method does with the others.

They are no method's business, but they are memory: the ledger lists them, and a budget is over all layers of the model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import KVLayer, Plan, Spec
from methods.window import Window, WindowLayer


@dataclass
class Sliding(Window):
    """A ring of the model's own `window` tokens per layer, in the model's dtype; shorter where that many cannot come."""

    window: int = 1
    prefill: str = "stream"

    def plan(self, spec: Spec) -> Plan:
        slots = min(self.window, spec.context_len + spec.max_new_tokens)
        kept = min(slots, spec.context_len)
        num_bytes = spec.batch_size * spec.num_layers * spec.slot_bytes(self.stored_dtype(spec))
        return Plan(kept=kept, headroom=slots - kept, ledger={"sliding": kept * num_bytes}, read_bytes=slots * num_bytes)

    def make_layer(self, layer_idx: int) -> KVLayer:
        return SlidingLayer(self, layer_idx)


class SlidingLayer(WindowLayer):
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        self.keep(q, k, v, seq)
        return sliding_attention(q, k, v, self.method.spec.scale, self.method.window)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"sliding": [x for held in self.slots.tensors().values() for x in held]}


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention of each query to itself and the window - 1 keys before it: q [1, Hq, T, D] -> [1, Hq, T, D].

    One window of queries at a time against the two windows of keys that it can see: never a T x T mask.
    """
    length, blocks = k.shape[2], []
    for start in range(0, length, window):
        stop, first = min(start + window, length), max(0, start - window + 1)
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        mask = (distance >= 0) & (distance < window)
        rows, keys = slice(start, stop), slice(first, stop)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, scale=scale, enable_gqa=True
        )
        blocks.append(out)
    return torch.cat(blocks, dim=2)
