"""h2o: heavy hitters and recent tokens per KV head, chosen again at every decoded token (H2O, arXiv 2306.14048).

A key's score is the softmax probability that all queries so far gave it, summed over the query heads of its KV group. After the
prompt each KV head keeps the most recent tokens and the keys of highest score. Every decoded token adds its probabilities,
then the next token overwrites the lowest score outside the recent ones: memory is constant from the prompt on.

Against the paper: it has no grouped heads, so the sum over the group is ours; there a step sees its budget and the new token,
here the new token is one of the slots. Keys keep their true positions.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.column_sums import column_sums
from kernels.compact import compact
from kernels.h2o_update import h2o_update
from kernels.prefill_attention import prefill_attention
from kernels.select import select
from methods.base import Budgeted, KVLayer, Plan, Spec

SCORE_BYTES, POSITION_BYTES, LOGIT_BYTES, SLOT_BYTES = 4, 4, 4, 8  # fp32, int32, fp32, int64


@dataclass
class H2O(Budgeted):
    """Heavy and recent tokens at constant memory.

    heavy_fraction: share of the slots for heavy hitters (paper: 0.5), the rest hold the most recent tokens; 0 is a window.
    score: "sum" as in the paper, which favours old tokens, or "mean" = sum / number of queries that saw the key.
    """

    heavy_fraction: float = 0.5
    score: str = "sum"

    overwrites: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.heavy_fraction <= 1:
            raise ValueError(f"method.heavy_fraction={self.heavy_fraction} is outside [0, 1]: 0.5 is half heavy, half recent")
        if self.score not in ("sum", "mean"):
            raise ValueError(f"method.score={self.score} is not one of sum, mean")

    def plan(self, spec: Spec) -> Plan:
        heads = spec.batch_size * spec.num_layers * spec.num_kv_heads
        # the step's logits have one buffer for all layers, but it is as long as the cache: held, so counted
        per_slot = spec.num_layers * spec.num_kv_heads * (SCORE_BYTES + POSITION_BYTES) + spec.num_q_heads * LOGIT_BYTES
        kept = self.solve(spec, minimum=2, why="one heavy and one recent token", per_slot=per_slot, fixed=heads * SLOT_BYTES)
        if kept == spec.context_len:
            return self.plan_slots(spec, kept, grows=False)
        logits = spec.batch_size * spec.num_q_heads * kept * LOGIT_BYTES
        extra = {
            "scores": heads * kept * SCORE_BYTES,
            "index": heads * (kept * POSITION_BYTES + SLOT_BYTES),
            "logits": logits,
        }
        read = heads * kept * (SCORE_BYTES + POSITION_BYTES) + spec.num_layers * logits
        return self.plan_slots(spec, kept, grows=False, extra=extra, extra_read=read)

    def bind(self, spec: Spec) -> None:
        super().bind(spec)
        kept = self.planned.kept
        self.num_recent = kept - round(self.heavy_fraction * kept)
        if not self.planned.noop:
            shape = (spec.batch_size, spec.num_q_heads, kept)
            self.logits = torch.zeros(shape, dtype=torch.float32, device=spec.device)

    def release(self) -> None:
        super().release()
        self.logits = None

    def make_layer(self, layer_idx: int) -> KVLayer:
        return KVLayer(self, layer_idx) if self.planned.noop else H2OLayer(self, layer_idx)

    def begin_step(self, seen: Tensor) -> None:
        super().begin_step(seen)
        self.step["seen"] = seen + 1

    def facts(self) -> dict:
        return {"num_slots": self.planned.num_slots, "num_recent": self.num_recent}

    def tensors(self) -> dict[str, list[Tensor]]:
        return {} if self.planned.noop else {"logits": [self.logits]}


class H2OLayer(KVLayer):
    def __init__(self, method: H2O, layer_idx: int):
        super().__init__(method, layer_idx)
        spec = method.spec
        shape, options = (spec.batch_size, spec.num_kv_heads, method.planned.num_slots), {"device": spec.device}
        self.scores = torch.zeros(shape, dtype=torch.float32, **options)
        self.held = torch.full(shape, -1, dtype=torch.int32, **options)  # position of each slot's token
        self.slot = torch.zeros(shape[:2], dtype=torch.int64, **options)  # where the next token goes

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        out, lse = prefill_attention(q, k, v, self.method.spec.scale, return_lse=True)
        with self.method.clock:
            self.keep_heavy(q, k, v, lse, seq)
        return out

    def keep_heavy(self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, seq: int) -> None:
        """Recent tokens and the best of the rest into the first slots, by time; then the next token's slot is claimed."""
        method, spec = self.method, self.method.spec
        length = k.shape[2]
        kept = min(length, method.planned.kept)
        scores = column_sums(q, k, spec.scale, impl=spec.impl, lse=lse)  # [1, Hkv, T]
        num_queries = length - torch.arange(length, device=k.device)
        ranked = scores / num_queries if method.score == "mean" else scores
        index = select(ranked, kept, 0, min(method.num_recent, kept), spec.impl)  # [1, Hkv, kept]
        self.slots.store(seq, 0, compact(k, index, impl=spec.impl), compact(v, index, impl=spec.impl))
        one = slice(seq, seq + 1)
        self.scores[one, :, :kept] = scores.gather(2, index.long())
        self.held[one].fill_(-1)
        self.held[one, :, :kept] = index
        # no query: nothing is added, and the rule that claims a slot is the one of every later step
        logits = method.logits[one].fill_(float("-inf"))
        lse = torch.zeros(logits.shape[:2], device=k.device)
        filled, seen = (torch.tensor([count], device=k.device) for count in (kept, length))
        self.slot[one] = self.claim(self.scores[one], self.held[one], logits, lse, filled, seen)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method, step = self.method, self.method.step
        self.slots.append(k[:, :, 0], v[:, :, 0], self.slot)
        out, lse = self.slots.attend(q[:, :, 0], step["lengths"], method.spec.scale, logits=method.logits)
        self.slot.copy_(self.claim(self.scores, self.held, method.logits, lse, step["lengths"], step["seen"]))
        return out[:, :, None]

    def claim(self, *state: Tensor) -> Tensor:
        """Scores of a step added, the next token's slot [B, Hkv] named; arguments of kernels.h2o_update."""
        return h2o_update(*state, self.method.num_recent, self.method.score, self.method.spec.impl)

    def positions(self, seen: Tensor) -> Tensor:
        # the slot claimed for the token at position `seen` counts as empty: its old token has left the scores
        return torch.where(self.held < seen[:, None, None], self.held, -1).long()

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.slots.tensors() | {"scores": [self.scores], "index": [self.held, self.slot]}
