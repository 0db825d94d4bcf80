"""flash_lite: block-sparse prefill chosen by a light head, the whole cache in 4 bits, dequantised inside the attention kernel.

Prefill: the first and last `dense_layers` attend densely. In the others every block of 128 queries attends to the sink block,
to itself and to the best of the blocks before it; `prefill_skip` of its row is left out, and no block of keys may be left out
by more than `skip_cap` of the rows that could see it. Scores are products of pooled queries and pooled keys, training-free or
corrected by a small trained head; each query head has its own blocks. impl=triton skips the work. impl=reference, the twin
that CPUs run, masks it and takes no less time. The seconds of scoring and choosing are in compress_ms.

Memory comes from the 4 bits alone: every token stays, so the top-level `sparsity` has nothing to set and is ignored.
kv_dtype=auto means int4 here; any other works too, and bf16 is the sparse prefill alone. head_bits: 8 bits for the most
sensitive heads.

Decoding reads every slot unless `decode_skip` > 0 (floating kv_dtype only: quantised slots are read whole). Then each KV head
of the sparse layers reads the sink block, the newest two and the best of the rest, always by the training-free score.

`refresh`: a prompt is prefilled once, so its masks are its own. A later question comes token by token through decode steps,
which know neither turns nor roles; only what they read can go stale. refresh=turn chooses blocks in every step by that step's
query, so each turn reads its own, for the price of the pooled keys: held, and read in every step (in the ledger, the read
bytes and the row's facts). refresh=never reads what the prompt's last queries chose, and all blocks after it. A chat that is
prefilled again from the start, as attach() does for each generate(), gets masks of the whole text each time.

`auto_off`: choosing blocks costs more than it saves on short prompts, so those attend densely, and the row says so. It depends
on the length alone, not on the batch: prefill takes one sequence at a time, and a prompt shall give the same tokens alone and
in a batch.

Pooled products as block scores follow MInference (arXiv 2407.02490), a head distilled from pooled attention SeerAttention
(arXiv 2410.13276), pool=max the bound of Quest (arXiv 2406.10774), the 4 bits KIVI (arXiv 2402.02750).
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.prefill_attention import lists_of, prefill_attention
from kernels.select import select
from methods.base import KVLayer, Method, Plan, Spec
from methods.calibration import model_file
from methods.slots import DTYPES
from methods.trained import TrainedPart

BLOCK = 128  # tokens of a block, of queries and of keys
KV_GROUPS = (16, 32, 64)
SINKS, NEWEST = 1, 2  # blocks that a step reads in any case; the newest one may hold a single token
SUMMARY_DTYPE = torch.float32  # a running mean stalls in 16 bits
CHOICES = {"pool": ("mean", "max"), "selector": ("pool", "head"), "refresh": ("turn", "never")}


@dataclass
class FlashLite(Method):
    """Block-sparse prefill over a dense 4-bit cache.

    kv_group: numbers that share a step and a zero at 4 bits: 16, 32 or 64; None: 32, or 16 if the head dim is no multiple.
    dense_layers: so many first and so many last layers never skip. prefill_skip: share of each row of blocks that is left out.
    skip_cap: largest share of the rows that may leave out one block of keys; 1: no cap.
    pool: pooled keys are max, of each channel the end of its range that the query likes best (an upper bound), or the mean.
        Attention mass kept on smollm2-135m-32k, niah at 2k, at prefill_skip 0.25 / 0.5: max 0.968 / 0.897, mean 0.934 / 0.865.
    selector: pool, or head: scores corrected by the trained `block_head` file (the row is flagged untrained without one).
    decode_skip: share of the prompt's blocks that a step leaves out in the sparse layers; refresh: when its choice is renewed.
    auto_off: prompts of fewer tokens attend densely, and a context_len below it reads every slot; 0: never off.
    """

    kv_group: int | None = None
    dense_layers: int = 2
    prefill_skip: float = 0.25
    skip_cap: float = 0.75
    pool: str = "max"
    selector: str = "pool"
    block_head: str | None = None
    decode_skip: float = 0.0
    refresh: str = "turn"
    auto_off: int = 2048

    @property
    def memory_class(self) -> str:
        if self.kv_dtype not in DTYPES:
            return "freed"
        return "reads_less" if self.decode_skip else "none"

    @property
    def reads_lists(self) -> bool:
        return self.decode_skip > 0

    def __post_init__(self):
        if self.kv_dtype == "auto":
            self.kv_dtype = "int4"
        super().__post_init__()
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"method.{name}={getattr(self, name)} is not one of {', '.join(valid)}")
        for name in ("prefill_skip", "decode_skip"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"method.{name}={getattr(self, name)} is outside [0, 1): 0 skips nothing, 0.25 a quarter")
        if not 0 < self.skip_cap <= 1:
            raise ValueError(
                f"method.skip_cap={self.skip_cap} is outside (0, 1]: 1 is no cap; method.prefill_skip=0 skips nothing"
            )
        if self.dense_layers < 0 or self.auto_off < 0:
            raise ValueError(
                f"method.dense_layers={self.dense_layers} and method.auto_off={self.auto_off} must not be negative"
            )
        if self.kv_group is not None:
            if self.kv_group not in KV_GROUPS:
                raise ValueError(f"method.kv_group={self.kv_group} is not one of {', '.join(map(str, KV_GROUPS))}")
            if self.kv_dtype != "int4":
                raise ValueError(
                    f"method.kv_group={self.kv_group} groups 4-bit numbers: use kv_dtype=int4, not {self.kv_dtype}"
                )
        if self.decode_skip and self.kv_dtype not in DTYPES:
            raise ValueError(
                f"method.decode_skip={self.decode_skip} reads lists of slots, and kv_dtype={self.kv_dtype} is read whole: "
                "use method.decode_skip=0, or kv_dtype=bf16"
            )
        if self.refresh == "never" and not self.decode_skip:
            raise ValueError("method.refresh=never needs method.decode_skip above 0: steps that read every slot choose nothing")

    # planning

    def formats(self, spec: Spec) -> list:
        formats = super().formats(spec)
        if self.kv_group is None:
            return formats
        if spec.head_dim % self.kv_group:
            fitting = [group for group in KV_GROUPS if spec.head_dim % group == 0]
            raise ValueError(
                f"method.kv_group={self.kv_group} does not divide head dim {spec.head_dim}; use method.kv_group={max(fitting)}"
            )
        return [dataclasses.replace(format, group=self.kv_group) for format in formats]

    def full_bytes(self, spec: Spec) -> int:
        """Groups of another size have other scales than Spec knows of."""
        return sum(self.held_bytes(spec, spec.context_len).values()) + spec.other_bytes

    def sparse_layers(self, spec: Spec) -> range:
        """Layers between the dense first and last ones; ValueError where there is none and something shall be skipped."""
        layers = range(self.dense_layers, spec.num_layers - self.dense_layers)
        if not layers and (self.prefill_skip or self.decode_skip):
            most = (spec.num_layers - 1) // 2
            raise ValueError(
                f"method.dense_layers={self.dense_layers} first and last layers are all {spec.num_layers} of this model: "
                f"use method.dense_layers={most} or less"
            )
        return layers

    def num_read(self, spec: Spec) -> int | None:
        """Blocks of the prompt that a step reads in a sparse layer; None: it reads every slot."""
        num_blocks = -(-spec.context_len // BLOCK)
        num_read = max(num_blocks - skipped_of(num_blocks, self.decode_skip), SINKS + NEWEST + 1)
        listed = self.decode_skip and spec.context_len >= self.auto_off and num_read < num_blocks
        return num_read if listed else None

    def plan(self, spec: Spec) -> Plan:
        layers = self.sparse_layers(spec)
        if self.selector == "head" and spec.tp_size > 1:
            raise ValueError("method.selector=head has weights for every head, which no rank has: use method.selector=pool")
        extra = {}
        if self.selector == "head":
            extra["selector"] = BlockHead.num_bytes(len(layers), spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        num_read = self.num_read(spec)
        if num_read is None:
            return self.plan_slots(spec, spec.context_len, grows=True, extra=extra)
        own = len(layers) * self.choice_bytes(spec, num_read)
        held = self.plan_slots(spec, spec.context_len, grows=True, extra=extra | {"index": own})
        lengths = [spec.context_len + step for step in range(1, spec.max_new_tokens + 1)]
        others = [layer for layer in range(spec.num_layers) if layer not in layers]
        read_bytes = self.read_bytes(spec, lengths, others)
        read_bytes += self.read_bytes(spec, [self.slots_read(spec, num_read, n) for n in lengths], layers)
        return dataclasses.replace(held, read_bytes=read_bytes + own, noop=False)

    def slots_read(self, spec: Spec, num_read: int, length: int) -> int:
        """Slots that a step reads in a sparse layer when `length` tokens have come, its own included."""
        used = -(-length // BLOCK)
        if self.refresh == "never":
            num_read += used - -(-spec.context_len // BLOCK)
        return length if used <= num_read else (num_read - 1) * BLOCK + length - (used - 1) * BLOCK

    def num_pages(self, spec: Spec) -> int:
        """Blocks of slots in a layer."""
        return -(-(spec.context_len + spec.max_new_tokens) // BLOCK)

    def list_width(self, spec: Spec, num_read: int) -> int:
        """Entries of a list that no step renews: those of the prompt, and the blocks that may come."""
        return num_read + -(-spec.max_new_tokens // BLOCK)

    def choice_bytes(self, spec: Spec, num_read: int) -> int:
        """Bytes that a sparse layer holds, and reads in a step, to know what to read: pooled keys, or lists (refresh=never)."""
        heads = spec.batch_size * spec.num_kv_heads
        if self.refresh == "never":
            return heads * self.list_width(spec, num_read) * torch.int32.itemsize
        ends = 2 if self.pool == "max" else 1
        return ends * heads * self.num_pages(spec) * spec.head_dim * SUMMARY_DTYPE.itemsize

    # state

    def bind(self, spec: Spec) -> None:
        self.sparse, self.head, self.trained = self.sparse_layers(spec), None, False
        super().bind(spec)
        self.listed: list[Tensor] = []
        self.num_blocks = self.num_listed = self.num_causal = self.num_sparse = self.num_dense = 0
        if self.selector == "head":
            self.head = BlockHead(len(self.sparse), spec.num_q_heads, spec.num_kv_heads, spec.head_dim).requires_grad_(False)
            if file := model_file(self.block_head):
                self.head.load(file, self.head_facts())
                self.trained = True
            self.head.to(spec.device)

    def release(self) -> None:
        super().release()
        self.head = None

    def make_layer(self, layer_idx: int) -> KVLayer:
        if layer_idx not in self.sparse:
            return KVLayer(self, layer_idx)
        return SparseLayer(self, layer_idx) if self.num_read(self.spec) is None else ListedLayer(self, layer_idx)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"selector": list(self.head.parameters())} if self.head else {}

    def head_facts(self) -> dict:
        """Settings that a trained head holds for."""
        return {"dense_layers": self.dense_layers, "pool": self.pool}

    def flags(self) -> list[str]:
        return ["untrained"] if self.selector == "head" and not self.trained else []

    def facts(self) -> dict:
        density = self.num_listed / self.num_causal if self.num_causal else 1.0
        share = len(self.sparse) * self.num_sparse / max(1, self.num_sparse + self.num_dense) / self.spec.num_layers
        num_read = self.num_read(self.spec)
        return {
            "sparse_layers": [self.sparse.start, self.sparse.stop],
            "prefill_density": round(density, 4),
            "prefill_density_all_layers": round(1 - share * (1 - density), 4),
            "sparsity_off": self.why_off(),
            "masks_skip_work": self.spec.impl == "triton",
            "blocks_read_per_step": num_read,
            "refresh": None if num_read is None else self.refresh,
            "refresh_bytes_per_step": 0 if num_read is None else len(self.sparse) * self.choice_bytes(self.spec, num_read),
            "block_head": self.block_head if self.trained else None,
        }

    def why_off(self) -> str | None:
        """What of the asked sparsity did not take place, in words for the row; None: all of it did."""
        off = []
        if self.num_dense and self.prefill_skip:
            prompts = f"{self.num_dense} of {self.num_dense + self.num_sparse} prompts"
            off.append(f"{prompts} attended densely: fewer than auto_off={self.auto_off} tokens, or no whole block to skip")
        if self.decode_skip and self.num_read(self.spec) is None:
            off.append(f"steps read every slot: context_len below auto_off={self.auto_off}, or too few blocks to leave one out")
        return "; ".join(off) or None

    # prefill

    def skips(self, length: int) -> bool:
        """Whether a prompt of `length` leaves out any block."""
        num_blocks = -(-length // BLOCK)
        return length >= self.auto_off and num_blocks > 2 and skipped_of(num_blocks, self.prefill_skip) > 0

    def begin_prefill(self, seq: int, prompt: Tensor) -> None:
        self.num_blocks, self.listed = -(-len(prompt) // BLOCK), []
        sparse = self.skips(len(prompt))
        self.num_sparse += sparse
        self.num_dense += not sparse

    def end_prefill(self, seq: int) -> None:
        if self.listed:
            # one wait for the device per prompt, after all of its layers
            self.num_listed += int(torch.stack(self.listed).sum())
            self.num_causal += len(self.listed) * self.spec.num_q_heads * self.num_blocks * (self.num_blocks + 1) // 2
        self.listed = []

    def block_scores(self, layer_idx: int, q: Tensor, k: Tensor) -> Tensor:
        """Score of each block of keys for each block of queries, [Hq, n, n] fp32; q [1, Hq, T, D], k [1, Hkv, T, D]."""
        pooled = pooled_mean(q[0])
        scores = scores_of(pooled, pooled_keys(k[0], self.pool), self.spec.scale)
        if self.head is None:
            return scores
        return scores + self.head(layer_idx - self.sparse.start, pooled, key_features(k[0]))

    # decode

    def begin_step(self, seen: Tensor) -> None:
        super().begin_step(seen)
        if self.num_read(self.spec) is not None and self.refresh == "turn":
            self.step |= {"page": seen // BLOCK, "place": seen % BLOCK}


def skipped_of(num_blocks: int, share: float) -> int:
    """Blocks of a row of `num_blocks` that a share leaves out."""
    return int(share * num_blocks + 1e-6)


def blocks_of(x: Tensor) -> list[Tensor]:
    """Views of x [H, T, D]: its whole blocks [H, n, BLOCK, D], and what is left as one more [H, 1, rest, D]."""
    num_whole, rest = divmod(x.shape[1], BLOCK)
    whole = x[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK))
    return [whole, x[:, None, num_whole * BLOCK :]] if rest else [whole]


def pooled_mean(x: Tensor) -> Tensor:
    """Mean of each block of tokens: [H, T, D] -> [H, n, D] fp32."""
    return torch.cat([tokens.mean(2, dtype=torch.float32) for tokens in blocks_of(x)], 1)


def pooled_ends(k: Tensor) -> Tensor:
    """Largest and smallest number of each channel in each block of tokens: [H, T, D] -> [2, H, n, D] fp32."""
    blocks = blocks_of(k)
    return torch.stack([torch.cat([end(tokens, 2) for tokens in blocks], 1) for end in (torch.amax, torch.amin)]).float()


def pooled_keys(k: Tensor, pool: str) -> Tensor:
    """What scores see of each block of keys: [Hkv, T, D] -> [1 or 2, Hkv, n, D] fp32, the mean or both ends of its range."""
    return pooled_ends(k) if pool == "max" else pooled_mean(k)[None]


def key_features(k: Tensor) -> Tensor:
    """What the trained head sees of each block of keys, mean, largest, smallest: [Hkv, T, D] -> [Hkv, n, 3 D]."""
    return torch.cat([pooled_mean(k), *pooled_ends(k)], -1)


def scores_of(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Products of queries q [..., Hq, N, D] with pooled keys [1 or 2, ..., Hkv, n, D]: [..., Hq, N, n].

    Of two ends each channel takes the one that makes the product largest: no key in the block exceeds that score.
    """
    q = q.float().unflatten(-3, (keys.shape[-3], -1))
    keys = keys[..., None, :, :].mT
    ends = [q @ keys[0]] if len(keys) == 1 else [q.clamp(min=0) @ keys[0], q.clamp(max=0) @ keys[1]]
    return (sum(ends) * scale).flatten(-4, -3)


def block_mask(scores: Tensor, skip: float, cap: float) -> Tensor:
    """Blocks that attention computes, from scores [H, n, n]: bool [H, n, n], on the device without a wait.

    Row i leaves out the worst floor(skip * (i + 1)) of its i + 1 causal blocks, never the first or its own. Then each column
    takes back the rows that value it most until at most floor(cap * rows that can see it) leave it out.
    """
    num_blocks = scores.shape[-1]
    place = torch.arange(num_blocks, device=scores.device)
    causal = place <= place[:, None]
    free = causal & (place > 0) & (place < place[:, None])
    wanted = ((place + 1) * skip + 1e-6).long()
    worst_first = scores.masked_fill(~free, torch.inf).argsort(dim=-1, stable=True).argsort(-1)
    skipped = free & (worst_first < wanted[:, None])
    # rows compare as shares of their own total
    worth = scores.masked_fill(~causal, -torch.inf).log_softmax(-1).masked_fill(~skipped, -torch.inf)
    allowed = ((num_blocks - place) * cap + 1e-6).long()
    best_first = worth.argsort(dim=-2, descending=True, stable=True).argsort(-2)
    back = best_first < skipped.sum(-2, keepdim=True) - allowed
    return causal & ~(skipped & ~back)


class BlockHead(TrainedPart):
    """Small trained correction of the block scores: per sparse layer and head, a product of two low-rank projections.

    Queries are pooled means [Hq, n, D], keys key_features [Hkv, n, 3 D]. Untrained it adds zero. Trained by
    `python -m harness.train_heads`.
    """

    RANK = 16
    knob, misfit = "method.selector=head", "is not for this model's heads"

    def __init__(self, num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(num_layers, num_q_heads, head_dim, self.RANK))
        self.k = nn.Parameter(torch.randn(num_layers, num_kv_heads, 3 * head_dim, self.RANK) * (3 * head_dim) ** -0.5)

    @classmethod
    def num_bytes(cls, num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of the fp32 weights."""
        return 4 * num_layers * (num_q_heads + 3 * num_kv_heads) * head_dim * cls.RANK

    def forward(self, place: int, q: Tensor, features: Tensor) -> Tensor:
        """What the place-th sparse layer adds to its scores, [Hq, n, n]."""
        q = (q @ self.q[place]).unflatten(0, (len(features), -1))
        return (q @ (features @ self.k[place])[:, None].mT).flatten(0, 1)


class SparseLayer(KVLayer):
    """Skips blocks in prefill, keeps and reads everything."""

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        method, spec = self.method, self.method.spec
        if not method.skips(k.shape[2]):
            return super().prefill(q, k, v, seq)
        with method.clock:
            mask = block_mask(method.block_scores(self.layer_idx, q, k), method.prefill_skip, method.skip_cap)
            index, count = lists_of(mask[None])
            method.listed.append(count.sum())
        out = prefill_attention(q, k, v, spec.scale, blocks=(index, count), block_size=BLOCK, impl=spec.impl)
        with method.clock:
            self.keep(q, k, v, seq)
        return out

    def prefill_chunk(self, q: Tensor, k: Tensor, v: Tensor, seq: int, start: int, length: int) -> Tensor:
        if self.method.skips(length):
            raise ValueError(
                f"flash_lite chooses blocks over a whole prompt, not over chunks of it: use shape.prefill_chunk=null, "
                f"or for dense chunks method.prefill_skip=0 or method.auto_off={length + 1}"
            )
        return super().prefill_chunk(q, k, v, seq, start, length)


class ListedLayer(SparseLayer):
    """decode_skip: steps read the blocks that a list names, made anew from pooled keys in each of them or once for all."""

    def __init__(self, method: FlashLite, layer_idx: int):
        super().__init__(method, layer_idx)
        spec, self.num_read = method.spec, method.num_read(method.spec)
        heads, num_pages = (spec.batch_size, spec.num_kv_heads), method.num_pages(spec)
        if method.refresh == "never":
            width = method.list_width(spec, self.num_read)
            self.choice = torch.full((*heads, width), -1, dtype=torch.int32, device=spec.device)
        else:
            shape = (2 if method.pool == "max" else 1, *heads, num_pages, spec.head_dim)
            self.choice = torch.zeros(shape, dtype=SUMMARY_DTYPE, device=spec.device)

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        super().keep(q, k, v, seq)
        keys = pooled_keys(k[0], self.method.pool)
        if self.method.refresh == "never":
            self.choice[seq] = self.listed_once(q, keys)
        else:
            self.choice[:, seq, :, : keys.shape[2]] = keys

    def listed_once(self, q: Tensor, keys: Tensor) -> Tensor:
        """What the last block of queries chooses of the prompt, and the blocks after it: [Hkv, width] int32."""
        num_blocks, spec = keys.shape[2], self.method.spec
        later = torch.arange(num_blocks, num_blocks + self.choice.shape[2], dtype=torch.int32, device=q.device)
        # no slot lies behind the last page
        later = torch.where(later < self.method.num_pages(spec), later, -1).expand(self.choice.shape[1], -1)
        if num_blocks <= self.num_read:
            chosen = torch.arange(num_blocks, dtype=torch.int32, device=q.device).expand(self.choice.shape[1], -1)
        else:
            asked = q[0, :, -BLOCK:].float().mean(1, keepdim=True)
            chosen = self.best(scores_of(asked, keys, spec.scale)[:, 0])
        return torch.cat([chosen, later], 1)[:, : self.choice.shape[2]]

    def best(self, scores: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ascending blocks [..., Hkv, num_read] by scores [..., Hq, n]; the head of a group that wants a block most decides."""
        joined = scores.unflatten(-2, (self.method.spec.num_kv_heads, -1)).amax(-2)
        return select(joined, self.num_read, SINKS, NEWEST, self.method.spec.impl, lengths=lengths)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method, spec, step = self.method, self.method.spec, self.method.step
        self.slots.append(k[:, :, 0], v[:, :, 0], step["slot"])
        if method.refresh == "never":
            index = self.choice
        else:
            self.pool_in(k[:, :, 0].float())
            used = (step["page"] + 1)[:, None].expand(-1, spec.num_kv_heads)
            index = self.best(scores_of(q, self.choice, spec.scale)[:, :, 0], used)
        out, _ = self.slots.attend(q[:, :, 0], step["lengths"], spec.scale, index=index, block_size=BLOCK)
        return out[:, :, None]

    def pool_in(self, k: Tensor) -> None:
        """The new keys [B, Hkv, D] into the pooled keys of their block."""
        step = self.method.step
        page = step["page"][:, None, None, None].expand(len(self.choice), -1, self.choice.shape[2], 1, self.choice.shape[4])
        place, new = step["place"][:, None, None, None], k[:, :, None]
        old = self.choice.gather(3, page)
        if self.method.pool == "max":
            joined = torch.stack([torch.maximum(old[0], new), torch.minimum(old[1], new)])
        else:
            joined = old + (new - old) / (place + 1)
        # a block begins: what lay there is of another prompt
        self.choice.scatter_(3, page, torch.where(place == 0, new, joined))

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.slots.tensors() | {"index": [self.choice]}
