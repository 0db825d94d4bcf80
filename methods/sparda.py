"""sparda: a few predictor layers' attention chooses the KV that all layers keep.

While the prompt is prefilled, the predictor layers score every key by the attention it gets from the last `observe` queries;
heads are reduced, scores max-pooled over neighbours, layers fused. Sinks, a recent window and the top of the rest form one
index for all heads and layers. How scores are made of attention stands in methods/scoring.py.

select=prefill: layers up to the last predictor wait dense until the index is known; later layers never hold the full cache.
select=decode: predictor layers keep all KV and score again in every step, from that step's own logits. The other layers keep
all KV too and read only the index (bytes read fall, bytes held do not), or with evict=true hold a fixed number of slots, in
which a new token overwrites the worst-scored one for good. Layers before the last predictor use the index of the step before.

The name also belongs to another paper (SparDA, arXiv 2606.04511): it trains a forecast projection that picks blocks for the
next layer at each step and keeps all KV in host memory. This is not that method, and none of its numbers belong beside these.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.column_sums import column_sums
from kernels.compact import compact
from kernels.select import select as select_best
from methods.base import Budgeted, KVLayer, Plan, Spec
from methods.calibration import calibrated, model_file
from methods.kept import INDEX_BYTES, held_positions
from methods.scoring import SelectorMLP, StepScores, fused_scores, page_scores, reduced

BUCKET = 64  # batching=bucket rounds what a prompt keeps up to a multiple of this
CHOICES = {
    "select": ("prefill", "decode"),
    "head_reduce": ("max", "mean"),
    "fuse": ("max", "mean"),
    "granularity": ("token", 16, 64),
    "selector": ("pool", "mlp"),
    "batching": ("pad", "bucket"),
}


@dataclass
class SparDA(Budgeted):
    """One kept index for all layers, chosen by the attention of predictor layers.

    select: when to choose, once at prefill or in every decode step. evict: with select=decode, drop instead of reading less.
    ema: weight of a step's own scores against those before it (select=decode).
    predict_layers: layers, counted from 0, whose attention scores the keys; auto: those of the `calibration` file.
    depth_by_length: other layers from a context length on, as in {8192: [14, 15, 20]}; the longest that fits counts.
    observe: how many of the last queries score a prompt, or "all". head_reduce, fuse: how query heads and layers are joined.
    pool: neighbours (odd) over which scores are max-pooled, so that a token's neighbours stay with it.
    segment: keys are scored by their share of the attention to their segment of so many tokens; 0: of all attention.
    granularity: token, or pages of 16 or 64 tokens that stay or go together; a page is as good as its best token.
    selector: pool, or mlp: a trained correction of the scores from selector_file (the row is flagged untrained without one).
    batching: pad: any prompt may fill all slots; bucket: a shorter prompt keeps its own share of its length, rounded up to 64.
    """

    select: str = "prefill"
    evict: bool = False
    ema: float = 0.7
    predict_layers: Any = field(default_factory=lambda: [14, 15])
    depth_by_length: Any = None
    calibration: str | None = None
    observe: int | str = 32
    pool: int = 15
    segment: int = 0
    granularity: int | str = "token"
    head_reduce: str = "max"
    fuse: str = "max"
    selector: str = "pool"
    selector_file: str | None = None
    batching: str = "pad"
    num_sinks: int = 4
    window: int = 32

    @property
    def memory_class(self) -> str:
        return "reads_less" if self.select == "decode" and not self.evict else "freed"

    def __post_init__(self):
        super().__post_init__()
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"method.{name}={getattr(self, name)} is not one of {', '.join(map(str, valid))}")
        if self.observe != "all" and not (isinstance(self.observe, int) and self.observe >= 1):
            raise ValueError(f"method.observe={self.observe} must be a number of queries of at least 1, or all")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"method.pool={self.pool} must be odd and at least 1 (1: no pooling)")
        if self.num_sinks < 0 or self.window < 1 or self.segment < 0:
            raise ValueError(
                f"method.num_sinks={self.num_sinks} must be >= 0, method.window={self.window} >= 1, "
                f"method.segment={self.segment} >= 0 (0: no segments)"
            )
        if not 0 < self.ema <= 1:
            raise ValueError(f"method.ema={self.ema} is outside (0, 1]: 1 forgets all earlier steps, 0.7 is the default")
        if self.predict_layers != "auto":
            check_layers("predict_layers", self.predict_layers)
        if not isinstance(self.depth_by_length, dict | None) or not all(isinstance(n, int) for n in self.depth_by_length or ()):
            raise ValueError(
                f"method.depth_by_length={self.depth_by_length} must name layers by length, as in {{8192: [15, 22]}}"
            )
        for length, layers in (self.depth_by_length or {}).items():
            check_layers(f"depth_by_length.{length}", layers)
        if self.select == "prefill" and (self.evict or self.ema != 0.7):
            raise ValueError("method.evict and method.ema need method.select=decode; select=prefill chooses and drops once")
        if self.select == "decode" and self.batching == "bucket":
            raise ValueError("method.batching=bucket needs method.select=prefill; select=decode reads as much for every prompt")
        if self.evict and self.page > 1:
            raise ValueError("method.evict=true overwrites single tokens: it needs method.granularity=token")

    # planning

    @property
    def reads_lists(self) -> bool:
        return self.select == "decode" and not self.evict

    @property
    def overwrites(self) -> bool:
        return self.evict

    @property
    def page(self) -> int:
        return 1 if self.granularity == "token" else int(self.granularity)

    @property
    def forced_pages(self) -> tuple[int, int]:
        """Pages that hold the sinks, and most pages that the recent window can touch."""
        return -(-self.num_sinks // self.page), -(-(self.window - 1) // self.page) + 1

    def layers_for(self, spec: Spec) -> list[int]:
        """Predictor layers of this shape, ascending."""
        fitting = [length for length in self.depth_by_length or () if length <= spec.context_len]
        layers = self.depth_by_length[max(fitting)] if fitting else self.predict_layers
        if layers == "auto":
            layers = calibrated(self.calibration, "sparda", spec, "method.predict_layers=auto")["sparda"]["predict_layers"]
        if not all(0 <= layer < spec.num_layers for layer in layers):
            raise ValueError(
                f"method.predict_layers={list(layers)} names a layer that the model lacks; it has layers 0 to "
                f"{spec.num_layers - 1}, try method.predict_layers=[{spec.num_layers // 2}]"
            )
        return sorted(layers)

    def plan(self, spec: Spec) -> Plan:
        layers, kept = self.layers_for(spec), self.slots_within_budget(spec)
        if self.selector == "mlp" and spec.tp_size > 1:
            raise ValueError(
                "method.selector=mlp reads every head, which no rank has: use method.selector=pool with model.tp_size"
            )
        if kept >= spec.context_len:
            return self.plan_slots(spec, spec.context_len, grows=True)
        extra = {"index": spec.batch_size * kept // self.page * INDEX_BYTES}
        if self.selector == "mlp":
            extra["selector"] = SelectorMLP.num_bytes(len(layers), spec.num_kv_heads)
        if self.select == "prefill":
            extra["index"] += spec.batch_size * torch.int64.itemsize
            return self.plan_slots(spec, kept, grows=True, extra=extra)
        extra["scores"] = StepScores.num_bytes(spec, len(layers))
        traffic = StepScores.bytes_read(spec, len(layers))
        if self.evict:
            traffic += extra["index"]
            return self.plan_slots(spec, kept, grows=False, extra=extra, extra_read=traffic, whole=layers)
        held = self.plan_slots(spec, spec.context_len, grows=True, extra=extra)
        growing = spec.context_len + (spec.max_new_tokens + 1) / 2
        slots = len(layers) * growing + (spec.num_layers - len(layers)) * kept
        read = int(spec.batch_size * slots * spec.slot_bytes(self.stored_dtype(spec)))
        read += (spec.num_layers - len(layers)) * extra["index"] + traffic
        return dataclasses.replace(held, read_bytes=read, noop=False)

    def slots_within_budget(self, spec: Spec) -> int:
        """Slots that every layer but whole predictor layers may hold (reads_less: may read) within the budget."""
        layers = self.layers_for(spec)
        sinks, window = self.forced_pages
        why = f"{self.num_sinks} sinks, {self.window} recent tokens and one chosen"
        if self.page > 1:
            why += f" in pages of {self.page}"
        # charged to each sequence, though held once: a batch keeps what each of its prompts would keep alone
        weights = SelectorMLP.num_bytes(len(layers), spec.num_kv_heads) if self.selector == "mlp" else 0
        fixed = spec.batch_size * weights
        minimum = (sinks + window + 1) * self.page
        if self.select == "prefill":
            fixed += spec.batch_size * torch.int64.itemsize
            return self.solve(spec, minimum, why, per_slot=INDEX_BYTES, fixed=fixed, page=self.page)
        others = [layer for layer in range(spec.num_layers) if layer not in layers]
        if not others:
            raise ValueError("method.select=decode needs a layer that is no predictor: name fewer method.predict_layers")
        why += f" beside the whole KV of {len(layers)} predictor layer{'s' * (len(layers) > 1)}"
        fixed += sum(self.held_bytes(spec, spec.context_len, layers).values())
        # each of the other layers reads the index, but it is held once
        fixed += StepScores.num_bytes(spec, len(layers)) if self.evict else StepScores.bytes_read(spec, len(layers))
        per_page = INDEX_BYTES if self.evict else len(others) * INDEX_BYTES
        return self.solve(spec, minimum, why, per_slot=per_page, fixed=fixed, page=self.page, layers=others)

    # state

    def num_observed(self) -> int | None:
        return None if self.observe == "all" else self.observe

    def bind(self, spec: Spec) -> None:
        self.predictors = self.layers_for(spec)
        super().bind(spec)
        self.end_prefill(0)
        self.mlp, self.trained = None, False
        if self.planned.noop:
            return
        device, batch = spec.device, spec.batch_size
        num_pages = self.slots_within_budget(spec) // self.page
        # select=prefill: kept pages of each prompt; evict: position in each slot; else the pages that a step reads
        self.index = torch.full((batch, num_pages), -1, dtype=torch.int32, device=device)
        if self.select == "prefill":
            # what turns a position into a slot for the tokens after the prompt
            self.offset = torch.zeros(batch, dtype=torch.int64, device=device)
        else:
            self.step_scores = StepScores(spec, len(self.predictors))
        if self.selector == "mlp":
            self.mlp = SelectorMLP(len(self.predictors), spec.num_kv_heads, self.pool).requires_grad_(False)
            if file := model_file(self.selector_file):
                self.mlp.load(file, self.selector_facts())
                self.trained = True
            self.mlp.to(device)

    def release(self) -> None:
        super().release()
        self.end_prefill(0)

    def make_layer(self, layer_idx: int) -> KVLayer:
        if self.planned.noop:
            return KVLayer(self, layer_idx)
        if self.select == "prefill":
            return CompactedLayer(self, layer_idx)
        if layer_idx in self.predictors:
            return PredictorLayer(self, layer_idx)
        return CompactedLayer(self, layer_idx) if self.evict else IndexedLayer(self, layer_idx)

    def tensors(self) -> dict[str, list[Tensor]]:
        if self.planned.noop:
            return {}
        held = {"index": [self.index]}
        if self.select == "prefill":
            held["index"].append(self.offset)
        else:
            held["scores"] = self.step_scores.tensors()
        return held | ({"selector": list(self.mlp.parameters())} if self.mlp else {})

    def facts(self) -> dict:
        facts = {
            "predict_layers": self.predictors,
            "predictor_depth": round((self.predictors[-1] + 1) / self.spec.num_layers, 3),
            "calibration": None,
            "selector_file": self.selector_file if self.trained else None,
        }
        if self.predict_layers == "auto":
            made = calibrated(self.calibration, "sparda", self.spec, "method.predict_layers=auto")
            facts |= {"calibration": self.calibration, "calibration_weights": made["weights"]}
        return facts

    def selector_facts(self) -> dict:
        """Settings that a trained selector holds for."""
        return {"predict_layers": self.predictors, "observe": self.observe, "head_reduce": self.head_reduce, "pool": self.pool}

    def flags(self) -> list[str]:
        return ["untrained"] if self.selector == "mlp" and not self.trained else []

    # prefill

    def end_prefill(self, seq: int) -> None:
        self.waiting: list[tuple[KVLayer, Tensor, Tensor]] = []
        self.observed: list[Tensor] = []
        self.chosen: Tensor | None = None

    def look(self, layer_idx: int, q: Tensor, k: Tensor, seq: int) -> None:
        """Score in a predictor layer; behind the last of them the index is known. Shapes as KVLayer.prefill."""
        if layer_idx not in self.predictors:
            return
        length = k.shape[2]
        queries = length if self.observe == "all" else min(self.observe, length)
        self.observed.append(column_sums(q, k, self.spec.scale, queries, self.head_reduce, self.spec.impl)[0] / queries)
        if layer_idx != self.predictors[-1]:
            return
        scores = self.score(torch.stack(self.observed))
        if self.select == "decode":
            self.step_scores.start(seq, scores)
        if self.memory_class == "freed":
            self.chosen = self.choose(scores, seq)
            while self.waiting:
                self.store(*self.waiting.pop(), seq)

    def score(self, mass: Tensor) -> Tensor:
        """Score of every key [..., T] from mass [P, ..., Hkv, T]."""
        if self.spec.tp_size > 1:
            # the same on all ranks: as if one head stood for the heads of all of them
            mass = self.spec.over_ranks(reduced(mass, self.head_reduce, -2), self.head_reduce)[..., None, :]
        scores = fused_scores(mass, self.head_reduce, self.fuse, self.pool, self.segment)
        return self.mlp(scores, mass) if self.mlp else scores

    def choose(self, scores: Tensor, seq: int) -> Tensor:
        """Ascending positions of prompt `seq` that stay, [N] int64, from scores [T]; notes them in the index."""
        length = len(scores)
        kept, num_pages = self.index.shape[1], -(-length // self.page)
        if self.batching == "bucket":
            share = -(-kept * self.page * length // self.spec.context_len)
            kept = min(kept, max(-(-share // BUCKET) * BUCKET // self.page, sum(self.forced_pages) + 1))
        if num_pages <= kept:
            pages = torch.arange(num_pages, device=scores.device)
        else:
            pages = select_best(page_scores(scores, self.page), kept, *self.forced_pages, self.spec.impl).long()
        self.index[seq].fill_(-1)
        self.index[seq, : len(pages)] = pages.int()
        tokens = (pages[:, None] * self.page + torch.arange(self.page, device=pages.device)).flatten()
        # the last page is always kept, and may not be full
        tokens = tokens[: len(tokens) - -length % self.page]
        if self.select == "prefill":
            self.offset[seq] = length - len(tokens)
        return tokens

    def store(self, layer: KVLayer, k: Tensor, v: Tensor, seq: int) -> None:
        """The chosen rows of k, v [1, Hkv, T, D] into the layer's first slots, as soon as they are known."""
        if self.chosen is None:
            self.waiting.append((layer, k, v))
        else:
            layer.slots.store(seq, 0, *(compact(rows, self.chosen, impl=self.spec.impl) for rows in (k, v)))

    # decode

    def begin_step(self, seen: Tensor) -> None:
        if self.planned.noop or self.select == "prefill":
            super().begin_step(seen)
            return
        self.step = {"slot": seen, "lengths": seen + 1, "position": seen, "so_far": seen + 1}
        if self.evict:
            self.step |= {"slot": self.overwrite(seen), "lengths": (seen + 1).clamp(max=self.planned.kept)}
        elif self.predictors[-1] >= len(self.predictors):
            # some layer comes before the last predictor: it reads by the scores of the step before
            self.list_pages(seen)

    def overwrite(self, seen: Tensor) -> Tensor:
        """Slot [B] for the token at position seen [B]: the next free one, else that of the worst score; noted in the index."""
        positions = self.index.long()
        scores = self.step_scores.smoothed.gather(1, positions.clamp(min=0))
        forced = (positions < self.num_sinks) | (positions > (seen - self.window)[:, None])
        worst = scores.masked_fill(forced, torch.inf).argmin(1)
        slot = torch.where(seen < self.planned.kept, seen, worst)
        self.index.scatter_(1, slot[:, None], seen[:, None].int())
        return slot

    def list_pages(self, seen: Tensor) -> None:
        """Pages to read in this step, the new token's included: index [B, N] ascending, -1 behind."""
        pages, used = page_scores(self.step_scores.smoothed, self.page), seen // self.page + 1
        self.index.copy_(select_best(pages, self.index.shape[1], *self.forced_pages, self.spec.impl, lengths=used))

    def rescore(self, layer_idx: int, lse: Tensor) -> None:
        """Take the logits of a predictor layer, lse [B, Hq]; behind the last one scores and index are those of this step."""
        self.step_scores.take(self.predictors.index(layer_idx), lse, self.step["so_far"], self.head_reduce)
        if layer_idx == self.predictors[-1]:
            self.step_scores.smooth(self.score(self.step_scores.mass), self.step["so_far"], self.ema)
            if not self.evict:
                self.list_pages(self.step["position"])

    def slot_of(self, seen: Tensor) -> Tensor:
        return seen if self.planned.noop else seen - self.offset

    def lengths_of(self, seen: Tensor) -> Tensor:
        return self.slot_of(seen) + 1

    def positions(self, seen: Tensor) -> Tensor:
        if self.planned.noop or self.memory_class == "reads_less":
            return super().positions(seen)
        if self.evict:
            return self.index.long()
        pages = self.index.long()[..., None]
        held = torch.where(pages < 0, -1, pages * self.page + torch.arange(self.page, device=seen.device)).flatten(1)
        return held_positions(held[:, None], self.offset, self.planned.num_slots, seen)[:, 0]


def check_layers(name: str, layers: Any) -> None:
    """ValueError unless it is a list of distinct layers."""
    if not isinstance(layers, list | tuple):
        raise ValueError(f"method.{name}={layers} has the wrong type: expected a list as in [1,2], or auto")
    if not all(isinstance(layer, int) for layer in layers):
        raise ValueError(f"method.{name}={list(layers)} has the wrong type: expected a whole number for each layer")
    if not layers or len(set(layers)) != len(layers):
        raise ValueError(f"method.{name}={list(layers)} must name at least one layer, each once")


class CompactedLayer(KVLayer):
    """Keeps the chosen tokens; decodes as any layer does, into the slots that the method names."""

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        self.method.look(self.layer_idx, q, k, seq)
        self.method.store(self, k, v, seq)


class PredictorLayer(KVLayer):
    """select=decode: keeps everything, slot = position, and scores the keys again in every step."""

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        super().keep(q, k, v, seq)
        self.method.look(self.layer_idx, q, k, seq)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method, step = self.method, self.method.step
        self.slots.append(k[:, :, 0], v[:, :, 0], step["position"])
        out, lse = self.slots.attend(q[:, :, 0], step["so_far"], method.spec.scale, logits=method.step_scores.logits)
        method.rescore(self.layer_idx, lse)
        return out[:, :, None]

    def positions(self, seen: Tensor) -> Tensor:
        slots = torch.arange(self.method.step_scores.smoothed.shape[1], device=seen.device)
        held = torch.where(slots < seen[:, None], slots, -1)
        return held[:, None].expand(-1, self.method.spec.num_kv_heads, -1)


class IndexedLayer(KVLayer):
    """select=decode without evict: keeps everything, reads only the pages that the index names."""

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method, step = self.method, self.method.step
        self.slots.append(k[:, :, 0], v[:, :, 0], step["slot"])
        index, options = method.index[:, None], {"block_size": method.page}
        return self.slots.attend(q[:, :, 0], step["lengths"], method.spec.scale, index=index, **options)[0][:, :, None]
