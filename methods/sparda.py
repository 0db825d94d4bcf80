"""sparda: a few predictor layers' attention chooses the KV that all layers keep.

While the prompt is prefilled, the predictor layers score every key by the attention it gets from the last `observe` queries;
heads are reduced, scores max-pooled over neighbours, layers fused. Sinks, a recent window and the top of the rest form one
index for all heads and layers. Layers up to the last predictor wait dense until the index is known; later layers never do.

The name also belongs to another paper (SparDA, arXiv 2606.04511): it trains a forecast projection that picks blocks for the
next layer at each step and keeps all KV in host memory. This is not that method, and none of its numbers belong beside these.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.column_sums import column_sums
from kernels.compact import compact
from kernels.select import select
from methods.base import Budgeted, KVLayer, Plan, Spec


@dataclass
class SparDA(Budgeted):
    """One kept index for all layers, chosen by attention at prefill.

    predict_layers: layers, counted from 0, whose attention scores the keys. pool: neighbours (odd) over which scores are
    max-pooled, so that a token's neighbours stay with it. observe: how many of the last queries score, or "all".
    head_reduce, fuse: how query heads and predictor layers are joined, max or mean.
    """

    predict_layers: list[int] = field(default_factory=lambda: [14, 15])
    observe: int | str = 32
    pool: int = 15
    head_reduce: str = "max"
    fuse: str = "max"
    num_sinks: int = 4
    window: int = 32

    def __post_init__(self):
        super().__post_init__()
        for name in ("head_reduce", "fuse"):
            if getattr(self, name) not in ("max", "mean"):
                raise ValueError(f"method.{name}={getattr(self, name)} is not one of max, mean")
        if self.observe != "all" and not (isinstance(self.observe, int) and self.observe >= 1):
            raise ValueError(f"method.observe={self.observe} must be a number of queries of at least 1, or all")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"method.pool={self.pool} must be odd and at least 1 (1: no pooling)")
        if self.num_sinks < 0 or self.window < 1:
            raise ValueError(f"method.num_sinks={self.num_sinks} must be >= 0 and method.window={self.window} >= 1")
        if not self.predict_layers or len(set(self.predict_layers)) != len(self.predict_layers):
            raise ValueError(f"method.predict_layers={self.predict_layers} must name at least one layer, each once")

    def plan(self, spec: Spec) -> Plan:
        if not all(0 <= layer < spec.num_layers for layer in self.predict_layers):
            raise ValueError(
                f"method.predict_layers={list(self.predict_layers)} names a layer that the model lacks; it has layers 0 to "
                f"{spec.num_layers - 1}, try method.predict_layers=[{spec.num_layers // 2}]"
            )
        index_bytes, offset_bytes = torch.int32.itemsize, spec.batch_size * torch.int64.itemsize
        kept = self.solve(
            spec,
            minimum=self.num_sinks + self.window + 1,
            why=f"{self.num_sinks} sinks, {self.window} recent tokens and one chosen",
            per_slot=index_bytes,
            fixed=offset_bytes,
        )
        extra = {"index": spec.batch_size * kept * index_bytes + offset_bytes} if kept < spec.context_len else None
        return self.plan_slots(spec, kept, grows=True, extra=extra)

    def num_observed(self) -> int | None:
        return None if self.observe == "all" else self.observe

    def bind(self, spec: Spec) -> None:
        super().bind(spec)
        if not self.planned.noop:
            # true positions of the kept prompt tokens, and what turns a position into a slot for the tokens after them
            self.index = torch.full((spec.batch_size, self.planned.kept), -1, dtype=torch.int32, device=spec.device)
            self.offset = torch.zeros(spec.batch_size, dtype=torch.int64, device=spec.device)
        self.end_prefill(0)

    def release(self) -> None:
        super().release()
        self.end_prefill(0)

    def make_layer(self, layer_idx: int) -> KVLayer:
        return KVLayer(self, layer_idx) if self.planned.noop else SparDALayer(self, layer_idx)

    def end_prefill(self, seq: int) -> None:
        self.waiting: list[tuple[KVLayer, Tensor, Tensor]] = []
        self.scores: list[Tensor] = []
        self.chosen: Tensor | None = None

    def observe_layer(self, layer: "SparDALayer", q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        """Score in a predictor layer, wait until the last of them, store from then on. Shapes as KVLayer.prefill."""
        if self.chosen is not None:
            self.store(layer, k, v, seq)
            return
        self.waiting.append((layer, k, v))
        if layer.layer_idx in self.predict_layers:
            self.scores.append(self.score_keys(q, k))
        if layer.layer_idx == max(self.predict_layers):
            self.chosen = self.choose(k.shape[2])
            self.index[seq].fill_(-1)
            self.index[seq, : len(self.chosen)] = self.chosen.int()
            self.offset[seq] = k.shape[2] - len(self.chosen)
            while self.waiting:
                self.store(*self.waiting.pop(), seq)

    def store(self, layer: KVLayer, k: Tensor, v: Tensor, seq: int) -> None:
        """The chosen rows of k, v [1, Hkv, T, D] into the layer's first slots."""
        kept = [compact(rows, self.chosen, impl=self.spec.impl) for rows in (k, v)]
        layer.slots.store(seq, 0, *kept)

    def score_keys(self, q: Tensor, k: Tensor) -> Tensor:
        """Pooled attention mass per key, [T] fp32."""
        queries = None if self.observe == "all" else self.observe
        mass = column_sums(q, k, self.spec.scale, queries, self.head_reduce, self.spec.impl)[0]  # [Hkv, T]
        mass = mass.amax(0) if self.head_reduce == "max" else mass.mean(0)
        mass = self.spec.over_ranks(mass, self.head_reduce)
        return torch.nn.functional.max_pool1d(mass[None, None], self.pool, stride=1, padding=self.pool // 2)[0, 0]

    def choose(self, length: int) -> Tensor:
        """Ascending positions that stay, [N] int64."""
        if length <= self.planned.kept:
            return torch.arange(length, device=self.spec.device)
        scores = torch.stack(self.scores)
        fused = scores.amax(0) if self.fuse == "max" else scores.mean(0)
        return select(fused, self.planned.kept, self.num_sinks, self.window, self.spec.impl)

    def slot_of(self, seen: Tensor) -> Tensor:
        return seen if self.planned.noop else seen - self.offset

    def lengths_of(self, seen: Tensor) -> Tensor:
        return self.slot_of(seen) + 1

    def positions(self, seen: Tensor) -> Tensor:
        if self.planned.noop:
            return super().positions(seen)
        slots = torch.arange(self.planned.num_slots, device=seen.device)
        later = slots + self.offset[:, None]
        held = torch.cat([self.index.long(), later[:, self.planned.kept :]], dim=1)
        # a short prompt leaves index entries at -1; the tokens after it lie at slot = position
        held = torch.where(held < 0, later, held)
        return torch.where(slots < (seen - self.offset)[:, None], held, -1)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {} if self.planned.noop else {"index": [self.index, self.offset]}


class SparDALayer(KVLayer):
    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        self.method.observe_layer(self, q, k, v, seq)
