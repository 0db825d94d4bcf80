"""snapkv: each layer and KV head keeps what the prompt's last queries attend to (SnapKV, arXiv 2404.14469).

The last `window` queries vote with their softmax probabilities, votes are pooled along the keys so that a token's neighbours
stay with it, the best stay together with the window itself. What is decoded is appended.

Against the paper: it has no grouped heads and its code repeats KV heads first, so every query head keeps a set of its own at
G times the bytes; here the heads of a group share one, joined by `head_reduce`. Its code offers mean and max pooling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.column_sums import column_sums
from kernels.select import select
from methods.base import Budgeted, KVLayer, Plan, Spec
from methods.kept import INDEX_BYTES, OFFSET_BYTES, ChoosesOnce, KeptLayer, empty_index


@dataclass
class SnapKV(ChoosesOnce, Budgeted):
    """Top tokens per layer and KV head by the attention of the last queries.

    window: last queries that vote, and last tokens that always stay. pool: width (odd) of the max-pooling of votes; 1: none.
    head_reduce: how the votes of the query heads of one KV head are joined, mean or max.
    """

    window: int = 32
    pool: int = 7
    head_reduce: str = "mean"

    def __post_init__(self):
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"method.window={self.window} must be at least 1: the last query votes")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"method.pool={self.pool} must be odd and at least 1 (1: no pooling)")
        if self.head_reduce not in ("mean", "max"):
            raise ValueError(f"method.head_reduce={self.head_reduce} is not one of mean, max")

    def plan(self, spec: Spec) -> Plan:
        per_slot = spec.num_layers * spec.num_kv_heads * INDEX_BYTES
        fixed = spec.batch_size * OFFSET_BYTES
        why = f"the last {self.window} tokens and one chosen"
        kept = self.solve(spec, minimum=self.window + 1, why=why, per_slot=per_slot, fixed=fixed)
        extra = {"index": spec.batch_size * kept * per_slot + fixed}
        return self.plan_slots(spec, kept, grows=True, extra=extra if kept < spec.context_len else None)

    def make_layer(self, layer_idx: int) -> KVLayer:
        if self.planned.noop:
            return KVLayer(self, layer_idx)
        return SnapKVLayer(self, layer_idx, empty_index(self, self.spec.num_kv_heads))


class SnapKVLayer(KeptLayer):
    def choose(self, q: Tensor, k: Tensor, seq: int) -> Tensor:
        method, spec = self.method, self.method.spec
        votes = column_sums(q, k, spec.scale, method.window, method.head_reduce, spec.impl)[0]  # [Hkv, T]
        earlier, last = votes[:, : -method.window], votes[:, -method.window :]
        pooled = torch.nn.functional.max_pool1d(earlier, method.pool, stride=1, padding=method.pool // 2)
        return select(torch.cat([pooled, last], 1)[None], method.planned.kept, 0, method.window, spec.impl)
