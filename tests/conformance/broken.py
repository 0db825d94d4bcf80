"""Methods that are broken on purpose, as real tools were: at least one for every check of harness/conform.py.

Each differs from a sound method by one fault. Sampled is the sound one that most of them stand on.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from harness.masked_dense import rotated
from kernels.compact import compact
from methods.base import Budgeted, KVLayer
from methods.full import Full
from methods.slots import make_slots
from methods.window import Window


@dataclass
class Sampled(Budgeted):
    """Sound: evenly spaced tokens of the prompt, and all that are decoded."""

    def plan(self, spec):
        counters = 8 * spec.batch_size
        kept = self.solve(spec, minimum=1, why="one token", fixed=counters)
        return self.plan_slots(spec, kept, grows=True, extra={"index": counters})

    def bind(self, spec):
        super().bind(spec)
        self.dropped = torch.zeros(spec.batch_size, dtype=torch.long, device=spec.device)

    def make_layer(self, layer_idx):
        return SampledLayer(self, layer_idx)

    def choose(self, length):
        """Positions of a prompt that stay."""
        kept = min(length, self.planned.kept)
        return torch.arange(kept, device=self.spec.device) * length // kept

    def slot_of(self, seen):
        return seen - self.dropped

    def lengths_of(self, seen):
        return self.slot_of(seen) + 1

    def positions(self, seen):
        slots, dropped = torch.arange(self.planned.num_slots, device=seen.device), self.dropped[:, None]
        kept = self.planned.kept
        held = torch.where(slots < kept, slots * (kept + dropped) // kept, slots + dropped)
        return torch.where(slots < self.slot_of(seen)[:, None], held, -1)

    def tensors(self):
        return {"index": [self.dropped]}


class SampledLayer(KVLayer):
    def keep(self, q, k, v, seq):
        index = self.method.choose(k.shape[2])
        self.method.dropped[seq] = k.shape[2] - len(index)
        self.slots.store(seq, 0, compact(k, index), compact(v, index))


def with_layer(layer_class):
    """make_layer of a method whose layers are of this class."""
    return lambda method, layer_idx: layer_class(method, layer_idx)


# order_and_sinks


class UnsortedTopK(Sampled):
    """The best keys in the order of their scores, as topk gives them (kvpress#173)."""

    def bind(self, spec):
        super().bind(spec)
        self.order = torch.randperm(self.planned.kept, generator=torch.Generator().manual_seed(0)).to(spec.device)

    def choose(self, length):
        index = super().choose(length)
        return index[self.order] if len(index) == len(self.order) else index

    def positions(self, seen):
        held = super().positions(seen)
        shuffled = torch.cat([held[:, self.order], held[:, self.planned.kept :]], 1)
        return torch.where((self.dropped > 0)[:, None], shuffled, held)


class SinkLoser(Window):
    """Says that it has sinks, and its ring runs over them."""

    num_sinks: ClassVar[int] = 4


class SinksInTheRingLayer(KVLayer):
    def keep(self, q, k, v, seq):
        length, size = k.shape[2], self.method.planned.num_slots
        self.method.length[seq] = length
        if length <= size:
            self.slots.store(seq, 0, k, v)
            return
        # the oldest four of the window make room for the sinks
        kept = torch.arange(length - size, length, device=k.device)
        kept[:4] = torch.arange(4, device=k.device)
        for place, position in enumerate(kept.tolist()):
            one = slice(position, position + 1)
            self.slots.store(seq, (length - size + place) % size, k[:, :, one], v[:, :, one])


class SinksInTheRing(Window):
    """The slots that the next tokens overwrite are those of the sinks (kvpress#173)."""

    num_sinks: ClassVar[int] = 4
    make_layer = with_layer(SinksInTheRingLayer)

    def bind(self, spec):
        super().bind(spec)
        self.length = torch.zeros(spec.batch_size, dtype=torch.long, device=spec.device)

    def positions(self, seen):
        held = super().positions(seen)
        sink = held - (self.length - self.planned.num_slots)[:, None]
        is_sink = (sink >= 0) & (sink < 4) & (self.length > self.planned.num_slots)[:, None]
        return torch.where(is_sink, sink, held)


class ComesBack(Window):
    """Claims an evicted token again in every other step."""

    def positions(self, seen):
        held = super().positions(seen)
        held[:, 0] -= self.planned.num_slots * (seen % 2 * (held[:, 0] >= self.planned.num_slots))
        return held


# unique_positions


class ClaimsTwice(Window):
    """Slots that are not filled yet claim position 0."""

    def positions(self, seen):
        return super().positions(seen).clamp(min=0)


class ClaimsTheFuture(Sampled):
    """Counts the token that is to come as held."""

    def positions(self, seen):
        return super().positions(seen + 1)


# true_positions


class CacheLengthIsPosition(Sampled):
    """Takes the place in the cache for the position (VeloxQuant-MLX#137)."""

    def positions(self, seen):
        slots = torch.arange(self.planned.num_slots, device=seen.device)
        return torch.where(slots < self.slot_of(seen)[:, None], slots, -1)


class RerotatedLayer(SampledLayer):
    def keep(self, q, k, v, seq):
        index = self.method.choose(k.shape[2])
        places = torch.arange(len(index), device=k.device)
        frequencies = torch.arange(0, k.shape[3], 2, device=k.device) / k.shape[3]
        self.method.dropped[seq] = k.shape[2] - len(index)
        moved = rotated(compact(k, index), places - index, 10000.0**-frequencies)
        self.slots.store(seq, 0, moved, compact(v, index))


class Rerotated(Sampled):
    """Rotates kept keys to their place in the cache and leaves queries at their true positions (H2O#32)."""

    make_layer = with_layer(RerotatedLayer)


class SwappedValuesLayer(SampledLayer):
    def keep(self, q, k, v, seq):
        super().keep(q, k, v.roll(1, 2), seq)


class SwappedValues(Sampled):
    """Keys and values of different tokens in one slot."""

    make_layer = with_layer(SwappedValuesLayer)


class RoundsTwiceLayer(KVLayer):
    def decode(self, q, k, v):
        return super().decode(q, k.bfloat16().float(), v)


@dataclass
class RoundsTwice(Full):
    """Rounds keys to the model's 16 bits, then to 8: the first error is as large as half a step."""

    kv_dtype: str = "int8"

    make_layer = with_layer(RoundsTwiceLayer)


# kernel_is_masked_dense


class OneTooFew(Window):
    """The newest token does not attend to itself: an off-by-one in a window (flash-attention#60)."""

    def lengths_of(self, seen):
        return (super().lengths_of(seen) - 1).clamp(min=1)


class HalfHeadsLayer(KVLayer):
    def decode(self, q, k, v):
        out = super().decode(q, k, v)
        out[:, 0] = out[:, 1]
        return out


class HeadsMixed(Sampled):
    """One query head gets the result of another."""

    def make_layer(self, layer_idx):
        return type("Layer", (HalfHeadsLayer, SampledLayer), {})(self, layer_idx)


# keep_all_is_dense


class NeverNoop(Window):
    """Keeps everything and does not say so (H2O#11)."""

    def plan(self, spec):
        return replace(super().plan(spec), noop=False)


class LossyFullLayer(KVLayer):
    def keep(self, q, k, v, seq):
        super().keep(q, k, v.bfloat16().to(v.dtype), seq)


class LossyFull(Full):
    """A dense cache that is rounded on the way in."""

    make_layer = with_layer(LossyFullLayer)


# gqa


class RepeatedHeadsLayer(KVLayer):
    def __init__(self, method, layer_idx):
        super().__init__(method, layer_idx)
        spec = method.spec
        sizes = (spec.batch_size, spec.num_q_heads, method.planned.num_slots, spec.head_dim)
        self.slots = make_slots(*sizes, method.stored_dtype(spec), spec.device, spec.impl)
        self.group = spec.num_q_heads // spec.num_kv_heads

    def keep(self, q, k, v, seq):
        super().keep(q, k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1), seq)

    def decode(self, q, k, v):
        return super().decode(q, k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1))


class RepeatedHeads(Full):
    """The cache is stored after KV heads have been repeated; the prediction knows it (KVCache-Factory#49)."""

    make_layer = with_layer(RepeatedHeadsLayer)

    def plan(self, spec):
        plan = super().plan(spec)
        group = spec.num_q_heads // spec.num_kv_heads
        return replace(plan, ledger={kind: size * group for kind, size in plan.ledger.items()})


class FirstHeadForAllLayer(SampledLayer):
    def decode(self, q, k, v):
        return super().decode(q, k[:, :1].expand_as(k), v)


class FirstHeadForAll(Sampled):
    """New keys of the first KV head go to all: right only where there is one KV head."""

    make_layer = with_layer(FirstHeadForAllLayer)


# ragged_batch


class LongestLength(Full):
    """Every sequence attends to as many slots as the longest: padding in the softmax (KIVI#18)."""

    def lengths_of(self, seen):
        return (seen.max() + 1).expand_as(seen)


class PlaceInBatchLayer(SampledLayer):
    def keep(self, q, k, v, seq):
        super().keep(q, k * (1 + seq / 10), v, seq)


class PlaceInBatch(Sampled):
    """What is stored depends on the sequence's place in the batch, as a shared random generator does."""

    make_layer = with_layer(PlaceInBatchLayer)


class SharesTheBudget(Window):
    """What a batch holds once is divided among its prompts: each keeps more than it would alone."""

    def plan(self, spec):
        kept = self.solve(spec, minimum=1, why="one token", fixed=4096)
        return self.plan_slots(spec, kept, grows=False)


# short_prompt, one_token_prompt


class FractionOfPrompt(Sampled):
    """Keeps a share of the prompt at hand instead of the budget, int(k * n) may be 0 (kvpress#264)."""

    def choose(self, length):
        kept = int((1 - self.sparsity) * length)
        return torch.arange(kept, device=self.spec.device) * length // max(kept, 1)

    def positions(self, seen):
        slots, dropped = torch.arange(self.planned.num_slots, device=seen.device), self.dropped[:, None]
        length = seen[:, None] - (self.slot_of(seen)[:, None] - self.count[:, None])
        held = torch.where(slots < self.count[:, None], slots * length // self.count[:, None].clamp(min=1), slots + dropped)
        return torch.where(slots < self.slot_of(seen)[:, None], held, -1)

    def bind(self, spec):
        super().bind(spec)
        self.count = torch.zeros(spec.batch_size, dtype=torch.long, device=spec.device)

    def begin_prefill(self, seq, prompt):
        self.count[seq] = int((1 - self.sparsity) * len(prompt))


class AssertsLengthLayer(SampledLayer):
    def keep(self, q, k, v, seq):
        assert k.shape[2] > 8, "the window does not fit"
        super().keep(q, k, v, seq)


class AssertsLength(Sampled):
    """Refuses a prompt shorter than its window with an assertion (kvpress#61)."""

    make_layer = with_layer(AssertsLengthLayer)


# smallest_budget, refusal


class EmptyRemoteLayer(SampledLayer):
    def keep(self, q, k, v, seq):
        remote = self.method.choose(k.shape[2])[4:].float() + 1
        # the share of an empty set is 0 / 0
        share = remote.sum() / remote.sum()
        super().keep(q, k, v * share, seq)


class EmptyRemote(Sampled):
    """Divides by what is chosen besides sinks, which may be nothing (kvpress#264)."""

    make_layer = with_layer(EmptyRemoteLayer)


class KeepsNothing(Window):
    """int(k * n) is 0 and nobody minds (kvpress#264)."""

    def plan(self, spec):
        return self.plan_slots(spec, self.solve(spec, minimum=0, why="nothing"), grows=False)


class AtLeastOne(Window):
    """An impossible budget silently becomes one token."""

    def plan(self, spec):
        return self.plan_slots(spec, max(1, int((1 - self.sparsity) * spec.context_len)), grows=False)


class NamelessRefusal(Window):
    """Says no and not what would do."""

    def plan(self, spec):
        try:
            return super().plan(spec)
        except ValueError:
            raise ValueError("the budget is too small") from None


class WrongAdvice(Window):
    """Names a largest sparsity that is far from it."""

    def plan(self, spec):
        try:
            return super().plan(spec)
        except ValueError:
            raise ValueError("too small; largest sparsity here: 0.5") from None


# bytes_are_predicted, budget_is_met


class ForgetsIndex(Sampled):
    """The index is held and declared, and not predicted (KVQuant's scales, SnapKV#24)."""

    def plan(self, spec):
        plan = super().plan(spec)
        return replace(plan, ledger={"kv": plan.ledger["kv"]})


class Overshoots(Sampled):
    """Sinks come on top of the budget; the prediction knows it."""

    def plan(self, spec):
        counters = 8 * spec.batch_size
        kept = self.solve(spec, minimum=1, why="one token", fixed=counters) + 4
        return self.plan_slots(spec, min(kept, spec.context_len), grows=True, extra={"index": counters})


class MaskOnlyLayer(KVLayer):
    def decode(self, q, k, v):
        step, spec = self.method.step, self.method.spec
        self.slots.append(k[:, :, 0], v[:, :, 0], step["slot"])
        last = step["lengths"][:, None] - 1 - torch.arange(self.method.num_read, device=q.device)
        index = last.flip(1).int()[:, None].contiguous()
        return self.slots.attend(q[:, :, 0], step["lengths"], spec.scale, index=index)[0][:, :, None]


class MaskOnly(Window):
    """Hides all but the last tokens and calls that freed (ThinK#5, SnapKV#24)."""

    make_layer = with_layer(MaskOnlyLayer)

    def plan(self, spec):
        self.num_read = self.solve(spec, minimum=1, why="one token")
        plan = self.plan_slots(spec, spec.context_len, grows=True)
        return replace(plan, noop=self.num_read == spec.context_len)

    def slot_of(self, seen):
        return seen

    def positions(self, seen):
        return super(Window, self).positions(seen)


class MislabelledFull(Full):
    """Frees nothing and says freed."""

    memory_class: ClassVar[str] = "freed"


class SilentlySimulated(MaskOnly):
    """Saves nothing, says so in memory_class and leaves the flag out."""

    memory_class: ClassVar[str] = "none"


class ReadsLess(MaskOnly):
    """Sound: holds everything, reads the last tokens only, and says so."""

    memory_class: ClassVar[str] = "reads_less"

    def plan(self, spec):
        plan = super().plan(spec)
        read = spec.batch_size * spec.num_layers * self.num_read * spec.slot_bytes(self.stored_dtype(spec))
        return plan if plan.noop else replace(plan, read_bytes=read)

    def make_layer(self, layer_idx):
        return (KVLayer if self.planned.noop else MaskOnlyLayer)(self, layer_idx)


class ReadsAll(ReadsLess):
    """Says that it reads less, and attends to all."""

    make_layer = with_layer(KVLayer)


# nothing_undeclared, no_views


class HoarderLayer(SampledLayer):
    def keep(self, q, k, v, seq):
        self.dense = k.clone()
        super().keep(q, k, v, seq)


class Hoarder(Sampled):
    """The dense prompt stays beside what is kept (SnapKV#24)."""

    make_layer = with_layer(HoarderLayer)


class SlicerLayer(SampledLayer):
    def __init__(self, method, layer_idx):
        super().__init__(method, layer_idx)
        length = method.spec.context_len + method.spec.max_new_tokens
        self.slots.k = self.slots.k.new_zeros(*self.slots.k.shape[:2], length, self.slots.k.shape[3])
        self.slots.k = self.slots.k[:, :, : method.planned.num_slots]


class Slicer(Sampled):
    """The slots are a slice of a storage as large as the full cache."""

    make_layer = with_layer(SlicerLayer)


# no_growth

LEAKED = []


class Leaks(Sampled):
    """Every step leaves a tensor where the ledger does not look: in a module's global."""

    def begin_step(self, seen):
        super().begin_step(seen)
        LEAKED.append(seen.clone())


class GrowingWindow(Window):
    """New tokens are concatenated: the window grows with every step."""

    def begin_step(self, seen):
        super().begin_step(seen)
        for layer in self.layers:
            layer.slots.k = torch.cat([layer.slots.k, layer.slots.k[:, :, :1]], 2)
            layer.slots.v = torch.cat([layer.slots.v, layer.slots.v[:, :, :1]], 2)


class Reallocates(Sampled):
    """Holds the same bytes at a new address after every step."""

    def begin_step(self, seen):
        super().begin_step(seen)
        self.dropped = self.dropped + 0


# second_prompt


class StaleLayer(SampledLayer):
    total = 0.0

    def keep(self, q, k, v, seq):
        self.total = self.total + k.abs().mean()
        super().keep(q, k / self.total, v, seq)


class Stale(Sampled):
    """Adds this prompt's numbers to those of the prompt before."""

    make_layer = with_layer(StaleLayer)


# unused_slots_do_not_leak


class ZeroWeightLayer(SampledLayer):
    def decode(self, q, k, v):
        step, spec = self.method.step, self.method.spec
        self.slots.append(k[:, :, 0], v[:, :, 0], step["slot"])
        group = spec.num_q_heads // spec.num_kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in (self.slots.k, self.slots.v))
        unused = torch.arange(keys.shape[2], device=q.device) >= step["lengths"][:, None]
        scores = (q @ keys.mT * spec.scale).masked_fill(unused[:, None, None], -torch.inf)
        # a weight of zero times NaN is NaN
        return scores.softmax(-1) @ values


class ZeroWeight(Sampled):
    """Gives unused slots a weight of zero and multiplies."""

    make_layer = with_layer(ZeroWeightLayer)


# no_host_sync, same_ops_each_step, graph_is_eager


class Item(Sampled):
    """A step looks at a number."""

    def begin_step(self, seen):
        super().begin_step(seen)
        self.longest = int(seen.max())


class ToList(Sampled):
    """A step copies positions to a Python list."""

    def begin_step(self, seen):
        super().begin_step(seen)
        self.places = seen.tolist()


class NonZero(Sampled):
    """A step asks which sequences are long."""

    def begin_step(self, seen):
        super().begin_step(seen)
        self.step["long"] = torch.nonzero(seen > 3)


class BooleanIndex(Sampled):
    """A step picks by a mask."""

    def begin_step(self, seen):
        super().begin_step(seen)
        self.step["long"] = seen[seen > 3]


class PythonCounter(Window):
    """Counts its steps in Python: a graph would write to one slot for ever."""

    def end_prefill(self, seq):
        self.count = 0

    def begin_step(self, seen):
        super().begin_step(seen)
        self.count = getattr(self, "count", 0) + 1
        self.step["slot"] = torch.full_like(seen, self.count % self.planned.num_slots)


class Periodic(Sampled):
    """Every third step does something else."""

    count = 0

    def begin_step(self, seen):
        super().begin_step(seen)
        self.count += 1
        if self.count % 3 == 0:
            self.dropped.add_(0)
