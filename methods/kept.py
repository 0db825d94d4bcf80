"""Shared by methods that choose once, at prefill, which tokens of the prompt stay, and append all that is decoded.

Chosen tokens lie in slots 0 .. kept - 1 in the order of time, decoded ones behind them. Not a method itself.
"""

import torch
from torch import Tensor

from kernels.compact import compact
from methods.base import KVLayer, Method, Spec

INDEX_BYTES, OFFSET_BYTES = 4, 8  # int32 position of a kept token, int64 per sequence


class ChoosesOnce:
    """Half of a method, in front of Budgeted: what turns a position into a slot, the same in all layers."""

    def bind(self, spec: Spec) -> None:
        super().bind(spec)
        if not self.planned.noop:
            self.offset = torch.zeros(spec.batch_size, dtype=torch.int64, device=spec.device)

    def begin_prefill(self, seq: int, prompt: Tensor) -> None:
        if not self.planned.noop:
            self.offset[seq] = max(0, len(prompt) - self.planned.kept)

    def slot_of(self, seen: Tensor) -> Tensor:
        return seen if self.planned.noop else seen - self.offset

    def lengths_of(self, seen: Tensor) -> Tensor:
        return self.slot_of(seen) + 1

    def tensors(self) -> dict[str, list[Tensor]]:
        return {} if self.planned.noop else {"index": [self.offset]}


def empty_index(method: Method, num_heads: int) -> Tensor:
    """Index [B, num_heads, kept] of a bound method's cache that holds nothing yet."""
    shape = (method.spec.batch_size, num_heads, method.planned.kept)
    return torch.full(shape, -1, dtype=torch.int32, device=method.spec.device)


def held_positions(index: Tensor, offset: Tensor, num_slots: int, seen: Tensor) -> Tensor:
    """True position in each slot of kept tokens and the later ones behind them, [B, H, num_slots], -1 where empty.

    Args:
        index: [B, H, kept] true positions, -1 where empty; offset [B]: position of a later token less its slot; seen [B].
    """
    slots = torch.arange(num_slots, device=seen.device)
    later = (slots + offset[:, None])[:, None].expand(-1, index.shape[1], -1)
    held = torch.cat([index.long(), later[..., index.shape[2] :]], dim=2)
    # a short prompt leaves index entries at -1; the tokens after it lie at slot + offset
    held = torch.where(held < 0, later, held)
    return torch.where(slots < (seen - offset)[:, None, None], held, -1)


class KeptLayer(KVLayer):
    """Stores what choose() names and remembers it in `index` [B, Hkv or 1, kept] int32: true positions, -1 where empty."""

    def __init__(self, method: Method, layer_idx: int, index: Tensor):
        super().__init__(method, layer_idx)
        self.index = index

    def choose(self, q: Tensor, k: Tensor, seq: int) -> Tensor:
        """Ascending positions [1, Hkv or 1, kept] that stay of a prompt longer than `kept`; shapes as KVLayer.prefill."""
        raise NotImplementedError

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        length, kept = k.shape[2], self.method.planned.kept
        if length > kept:
            index = self.choose(q, k, seq)
            k, v = (compact(rows, index, impl=self.method.spec.impl) for rows in (k, v))
        else:
            index = torch.arange(length, device=k.device)
        self.slots.store(seq, 0, k, v)
        self.index[seq].fill_(-1)
        self.index[seq, :, : min(length, kept)] = index

    def positions(self, seen: Tensor) -> Tensor:
        method = self.method
        held = held_positions(self.index, method.offset, method.planned.num_slots, seen)
        return held.expand(-1, method.spec.num_kv_heads, -1)

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.slots.tensors() | {"index": [self.index]}
