"""What a cache method is: a dataclass of knobs that plans slots, makes one KVLayer per layer and owns what crosses layers.

One method = one file here + one yaml in conf/method/. The life of a method in a cell:

    plan(spec) -> Plan       slots and predicted bytes, before anything is allocated; ValueError when impossible
    bind(spec)               allocate: one KVLayer per layer, via make_layer
    begin_prefill(seq, ids)  a prompt is about to go through the layers
    layer.prefill(q, k, v)   per layer and sequence, the whole prompt at once; keeps what the method keeps
    layer.prefill_chunk(...) instead of it, once per layer and chunk, when the engine was told to prefill in chunks
    end_prefill(seq)         after the last layer of a sequence
    begin_step(seen)         once per decoded token, device only
    layer.decode(q, k, v)    per layer
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kernels.prefill_attention import prefill_attention
from methods.slots import BLOCK, DTYPES, KV_DTYPES, PlainFormat, Slots, format_of, make_slots, name_of, read_head_bits


@dataclass(frozen=True)
class Spec:
    """Shapes of one cell: all that a plan may depend on. context_len is the longest prompt that prefill sees.

    num_layers counts the layers that the method serves: those with full attention. other_bytes is what the model's other
    layers (sliding windows of hybrid models) hold after prefill; it belongs to the full cache and to every budget.
    With tensor parallelism (tp_size ranks) heads and bytes are those of one rank.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    batch_size: int
    context_len: int
    max_new_tokens: int
    dtype: torch.dtype
    device: torch.device
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # positions [N] -> cos, sin [N, D] in fp32
    impl: str = "reference"
    other_bytes: int = 0
    tp_size: int = 1

    def full_bytes(self, kv_dtype: str) -> int:
        """Bytes of the dense cache after prefill in `kv_dtype`: scales, int4's 16-bit tail and the fill of tiles included."""
        held = format_of(kv_dtype, self.head_dim).held_bytes(
            self.batch_size, self.num_kv_heads, self.context_len, self.head_dim
        )
        return self.num_layers * sum(held.values()) + self.other_bytes

    def slot_bytes(self, kv_dtype: str) -> int:
        """Bytes of one slot: K and V of all heads of one token in one layer; int4: once it is sealed."""
        return format_of(kv_dtype, self.head_dim).read_bytes(self.num_kv_heads, self.head_dim, BLOCK) // BLOCK

    def over_ranks(self, scores: Tensor, reduce: str) -> Tensor:
        """Scores of this rank's heads joined with the other ranks', by "max" or "mean": the same on all ranks."""
        if self.tp_size > 1:
            operation = torch.distributed.ReduceOp.MAX if reduce == "max" else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(scores, operation)
            return scores if reduce == "max" else scores / self.tp_size
        return scores


@dataclass(frozen=True)
class Plan:
    """What a method will hold. Bytes are over all layers and sequences of the batch."""

    kept: int  # slots filled after a prompt of context_len, per layer
    headroom: int  # further slots per layer for tokens to come; 0 where new tokens overwrite old ones
    ledger: dict[str, int]  # predicted resident bytes by kind, without headroom
    read_bytes: int  # KV bytes read per decode step, mean over max_new_tokens steps
    noop: bool = False  # the budget covers the prompt: same as full
    other_layers: dict[int, tuple[int, int]] = field(default_factory=dict)  # kept, headroom of layers that differ from that

    @property
    def num_slots(self) -> int:
        return self.kept + self.headroom

    def layer_slots(self, layer_idx: int) -> tuple[int, int]:
        """Kept and headroom slots of one layer."""
        return self.other_layers.get(layer_idx, (self.kept, self.headroom))

    @property
    def resident_bytes(self) -> int:
        return sum(self.ledger.values())


@dataclass
class Method:
    """Base of all methods. Fields are knobs (and the Hydra schema); state is made by bind().

    head_bits: with kv_dtype=int4, a json of `python -m harness.sensitivity`: the KV heads in it that get 8 bits.
    """

    kv_dtype: str = "auto"
    head_bits: str | None = None

    memory_class: ClassVar[str] = "none"
    # evicts between the chunks of a prompt, so that memory is constant however long the text is
    streams: ClassVar[bool] = False
    # whether new tokens go to slots that older ones held: then int4 cannot seal them in blocks and is stored as int4_token
    overwrites: ClassVar[bool] = False
    # whether steps attend to a list of slots, which quantised ones cannot
    reads_lists: ClassVar[bool] = False

    def __post_init__(self):
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ValueError(f"kv_dtype={self.kv_dtype} is not one of auto, {', '.join(KV_DTYPES)}")
        if self.head_bits is not None:
            if self.kv_dtype != "int4":
                raise ValueError(f"head_bits raises heads of kv_dtype=int4 to 8 bits; set kv_dtype=int4, not {self.kv_dtype}")
            if self.overwrites:
                raise ValueError(f"head_bits: {type(self).__name__} overwrites slots, mixed bits seal them; drop head_bits")
            self.bits = read_head_bits(self.head_bits)

    def stored_dtype(self, spec: Spec) -> str:
        """kv_dtype with `auto` resolved to the model's."""
        return name_of(spec.dtype) if self.kv_dtype == "auto" else self.kv_dtype

    def formats(self, spec: Spec) -> list:
        """How each layer is stored, PlainFormat or KVFormat; ValueError where this model cannot be."""
        kv_dtype = self.stored_dtype(spec)
        if self.reads_lists and kv_dtype not in DTYPES:
            raise ValueError(
                f"kv_dtype={kv_dtype} is read whole, and {type(self).__name__} reads lists of slots; use kv_dtype=auto"
            )
        if self.head_bits is None:
            return [format_of(kv_dtype, spec.head_dim, self.overwrites)] * spec.num_layers
        if [len(layer) for layer in self.bits] != [spec.num_kv_heads] * spec.num_layers:
            raise ValueError(
                f"head_bits={self.head_bits} is not for {spec.num_layers} layers with {spec.num_kv_heads} KV heads: "
                "run python -m harness.sensitivity with this model"
            )
        return [format_of(kv_dtype, spec.head_dim, head_bits=layer) for layer in self.bits]

    def count_formats(self, spec: Spec, layers: Collection[int] | None) -> Counter:
        """How many of these layers (None: all) are stored in which format."""
        return Counter(format for i, format in enumerate(self.formats(spec)) if layers is None or i in layers)

    def held_bytes(self, spec: Spec, num_slots: int, layers: Collection[int] | None = None) -> dict[str, int]:
        """Bytes of `num_slots` slots in each of these layers (None: all), by ledger kind."""
        held: Counter = Counter()
        for format, count in self.count_formats(spec, layers).items():
            by_kind = format.held_bytes(spec.batch_size, spec.num_kv_heads, num_slots, spec.head_dim)
            held.update({kind: count * size for kind, size in by_kind.items() if size})
        return dict(held)

    def read_bytes(self, spec: Spec, lengths: Sequence[int], layers: Collection[int] | None = None) -> int:
        """KV bytes that a step reads over these layers and all sequences, mean over steps in which `lengths` slots count."""
        total = 0
        for format, count in self.count_formats(spec, layers).items():
            total += count * sum(format.read_bytes(spec.num_kv_heads, spec.head_dim, length) for length in lengths)
        return spec.batch_size * total // len(lengths)

    def full_bytes(self, spec: Spec) -> int:
        """Bytes of the dense cache after prefill, stored as this method stores it."""
        if self.head_bits is not None:
            return sum(self.held_bytes(spec, spec.context_len).values())
        return spec.full_bytes(self.stored_dtype(spec))

    def stored_facts(self) -> dict:
        """For the row: how K and V are stored where not in a floating dtype, and bits of a number with its step and zero."""
        formats = self.formats(self.spec)
        if isinstance(formats[0], PlainFormat):
            return {}
        bits = [format.bits(self.spec.head_dim, self.spec.num_kv_heads) for format in formats]
        facts = {"kv_format": formats[0].name, "kv_bits": round(sum(bits) / len(bits), 4)}
        # the knob is a path: what stood in the file belongs to the row
        return facts | {"head_bits": ["".join(map(str, layer)) for layer in self.bits]} if self.head_bits else facts

    def stamp(self) -> str:
        """memory_class as the row may state it, once bound.

        What takes no fewer bytes than the dense cache in the model's dtype has freed nothing, whatever the method does to
        longer prompts (int4's tail, tiles, a budget that covers the prompt).
        """
        dense = self.spec.full_bytes(name_of(self.spec.dtype)) - self.spec.other_bytes
        return "none" if self.memory_class == "freed" and self.planned.resident_bytes >= dense else self.memory_class

    def plan(self, spec: Spec) -> Plan:
        """Slots and predicted bytes for these shapes; ValueError with one line when they are impossible."""
        raise NotImplementedError

    def plan_slots(
        self,
        spec: Spec,
        kept: int,
        grows: bool,
        extra: dict[str, int] | None = None,
        extra_read: int = 0,
        whole: Collection[int] = (),
    ) -> Plan:
        """Plan of `kept` slots in every layer; new tokens take further slots when it grows, else they overwrite.

        Args:
            extra: predicted bytes of what is held beside the slots, by ledger kind; extra_read: bytes of it that a step reads.
            whole: layers that keep every token of the prompt and append the new ones, whatever the others do.
        """
        noop = kept >= spec.context_len
        grows = grows or noop
        if not (grows or self.overwrites or all(format.overwrites for format in self.formats(spec))):
            raise ValueError(
                f"{type(self).__name__} overwrites slots, which a sealed kv_dtype={self.kv_dtype} cannot: let it say so with "
                "overwrites = True, or use kv_dtype=int8"
            )
        others = [layer for layer in range(spec.num_layers) if layer not in whole]
        ledger = Counter(self.held_bytes(spec, kept, others))
        ledger.update(self.held_bytes(spec, spec.context_len, whole))
        ledger.update(extra or {})
        steps = range(1, spec.max_new_tokens + 1)
        read_bytes = self.read_bytes(spec, [kept + step for step in steps] if grows else [kept], others)
        read_bytes += self.read_bytes(spec, [spec.context_len + step for step in steps], whole)
        return Plan(
            kept=kept,
            headroom=spec.max_new_tokens if grows else 0,
            ledger=dict(ledger),
            read_bytes=read_bytes + extra_read,
            noop=noop,
            other_layers=dict.fromkeys(whole, (spec.context_len, spec.max_new_tokens)),
        )

    def bind(self, spec: Spec) -> None:
        """Allocate all slots for `spec`. Called once per engine, before any clock runs."""
        self.spec, self.planned = spec, self.plan(spec)
        self.step: dict[str, Tensor] = {}
        self.clock = nullcontext()  # the engine puts its stopwatch here: it times scoring, selection and storing
        self.layers = [self.make_layer(i) for i in range(spec.num_layers)]

    def release(self) -> None:
        """Give the slots back; bind() may follow."""
        self.layers, self.step = [], {}

    def make_layer(self, layer_idx: int) -> "KVLayer":
        return KVLayer(self, layer_idx)

    def begin_prefill(self, seq: int, prompt: Tensor) -> None:
        """Prompt [T] of sequence `seq` is about to go through the layers; for methods that look at the tokens themselves."""

    def read_tokenizer(self, tokenizer, vocab_size: int) -> None:
        """The model's tokenizer, before bind(), where there is one; for methods that look at the text of tokens."""

    def see_token(self, token: Tensor) -> None:
        """Tokens [B] that the next step feeds, before begin_step(), on the device; for methods that look at them."""

    def end_prefill(self, seq: int) -> None:
        """All layers of sequence `seq` have been prefilled."""

    def num_observed(self) -> int | None:
        """How many of the prompt's last queries KVLayer.keep looks at, None: all. In chunks the others need not be held."""
        return None

    def facts(self) -> dict:
        """What the row must say about this run beyond the knobs (a calibration file, a realised rate): plain JSON values."""
        return {}

    def flags(self) -> list[str]:
        """Flags of harness.results.FLAGS that this method sets by itself, such as untrained or simulated."""
        return []

    def begin_step(self, seen: Tensor) -> None:
        """What all layers of a step need, from tokens seen [B], on the device: slot of the new token, how many slots count."""
        self.step = {"slot": self.slot_of(seen), "lengths": self.lengths_of(seen)}

    def slot_of(self, seen: Tensor) -> Tensor:
        """Slot of the token at position `seen`; default: slot = position."""
        return seen

    def lengths_of(self, seen: Tensor) -> Tensor:
        """Slots that count in this step, the new token's included; default: all so far, as far as there are slots."""
        return (seen + 1).clamp(max=self.planned.num_slots)

    def positions(self, seen: Tensor) -> Tensor:
        """True position held by each slot once `seen` [B] tokens have passed: [B, C], -1 where a slot is empty.

        Methods whose heads or layers keep different tokens say so in KVLayer.positions.
        """
        slots = torch.arange(self.planned.num_slots, device=seen.device).expand(len(seen), -1)
        return torch.where(slots < seen[:, None], slots, -1)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Tensors held across layers, by ledger kind."""
        return {}


@dataclass
class Budgeted(Method):
    """A method that holds a chosen share of the full cache's bytes.

    quant_headroom: taken off sparsity where kv_dtype is int8, fp8 or int4, since errors of selection and of quantisation add up
    (0.10 to 0.15 is a usual choice). The default is none: sparsity=0.8 drops 80 % of the bytes whatever the kv_dtype.
    """

    sparsity: float = 0.8
    kv_budget: float | None = None
    quant_headroom: float = 0.0

    memory_class: ClassVar[str] = "freed"

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity} is outside [0, 1): 0 keeps all, 0.8 drops 80 % of the bytes")
        if self.kv_budget is not None and not 0 < self.kv_budget <= 1:
            raise ValueError(f"kv_budget={self.kv_budget} is outside (0, 1]: the share of the bf16 full cache's bytes")
        if not 0 <= self.quant_headroom <= 1:
            raise ValueError(f"quant_headroom={self.quant_headroom} is outside [0, 1]: 0.1 turns sparsity 0.8 into 0.7")
        if self.quant_headroom and self.kv_budget is not None:
            raise ValueError(
                f"quant_headroom={self.quant_headroom} changes sparsity, kv_budget fixes the bytes: give only one of them"
            )

    def allowed_sparsity(self, spec: Spec) -> float:
        """sparsity, less quant_headroom where the cache is quantised."""
        quantised = not isinstance(self.formats(spec)[0], PlainFormat)
        return max(0.0, self.sparsity - self.quant_headroom) if quantised else self.sparsity

    def stored_facts(self) -> dict:
        facts = super().stored_facts()
        return facts | {"allowed_sparsity": self.allowed_sparsity(self.spec)} if facts and self.quant_headroom else facts

    def budget_bytes(self, spec: Spec) -> int:
        """Bytes that may be resident after prefill: of the full cache in kv_dtype, or of the bf16 one with kv_budget."""
        if self.kv_budget is not None:
            return int(self.kv_budget * spec.full_bytes("bf16"))
        # the slack of 1e-9 keeps 1 - 0.8 from losing a slot to binary rounding
        return int((1 - self.allowed_sparsity(spec)) * self.full_bytes(spec) + 1e-6)

    def solve(
        self,
        spec: Spec,
        minimum: int,
        why: str,
        per_slot: int = 0,
        fixed: int = 0,
        page: int = 1,
        layers: Collection[int] | None = None,
    ) -> int:
        """Slots per layer that the budget buys; all of context_len when it covers the prompt.

        Args:
            minimum: fewest slots that make sense, named by `why` in the error.
            per_slot: further bytes per slot (per page, where pages are larger) and sequence, once for all layers (an index).
            fixed: further bytes whatever the number of slots.
            page: slots are bought in pages of so many.
            layers: those that hold these slots (None: all); what the others hold belongs to `fixed`.
        """
        # what a batch holds once is charged to each sequence: a prompt keeps in a batch what it would keep alone
        fixed = -(-(fixed + spec.other_bytes) // spec.batch_size)
        spec = replace(spec, batch_size=1, other_bytes=spec.other_bytes // spec.batch_size)

        def held(num_slots: int) -> int:
            slots = sum(self.held_bytes(spec, num_slots, layers).values())
            return slots + (num_slots // page) * per_slot + fixed

        budget, full = self.budget_bytes(spec), self.full_bytes(spec)
        if budget >= full:
            return spec.context_len
        # tiles and tails make steps: the most slots that take no more than the budget
        sizes = range(0, spec.context_len + 1, page)
        kept = sizes[max(0, bisect_right(sizes, budget, key=held) - 1)]
        if kept >= minimum:
            return kept
        limit = 1 - held(-(-minimum // page) * page) / full + self.sparsity - self.allowed_sparsity(spec)
        knob = f"sparsity={self.sparsity:g}" if self.kv_budget is None else f"kv_budget={self.kv_budget:g}"
        way_out = f"largest sparsity here: {int(limit * 1000) / 1000:g}" if limit > 0 else "use a longer context_len"
        if tail := self.held_bytes(spec, 0).get("tail"):
            way_out += f" (the 16-bit tail of {BLOCK} tokens is {tail / full:.0%} of the full cache; kv_dtype=int8 has none)"
        raise ValueError(
            f"{knob} leaves {kept} slots of {spec.context_len}, fewer than the {minimum} that hold {why}; {way_out}"
        )


class KVLayer:
    """One layer's cache. Default: dense attention over the prompt, all of it kept, slot = Method.slot_of."""

    def __init__(self, method: Method, layer_idx: int):
        spec = method.spec
        self.method, self.layer_idx = method, layer_idx
        self.slots = make_slots(
            spec.batch_size,
            spec.num_kv_heads,
            sum(method.planned.layer_slots(layer_idx)),
            spec.head_dim,
            method.formats(spec)[layer_idx],
            spec.device,
            spec.impl,
            spec.dtype,
        )

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        """Whole prompt of one sequence: q [1, Hq, T, D], k, v [1, Hkv, T, D] -> [1, Hq, T, D]."""
        out = prefill_attention(q, k, v, self.method.spec.scale)
        with self.method.clock:
            self.keep(q, k, v, seq)
        return out

    def prefill_chunk(self, q: Tensor, k: Tensor, v: Tensor, seq: int, start: int, length: int) -> Tensor:
        """Tokens start .. start + n - 1 of a prompt of `length`: q [1, Hq, n, D], k, v [1, Hkv, n, D] -> [1, Hq, n, D].

        Default: the layer's whole prompt waits in dense scratch memory for the last chunk, then `keep` decides as ever.
        """
        stop, num_observed = start + q.shape[2], self.method.num_observed()
        # what is stored as it comes needs no scratch
        in_place = type(self).keep is KVLayer.keep and type(self.slots) is Slots and self.slots.k.dtype == k.dtype
        if in_place:
            self.slots.store(seq, start, k, v)
            keys, values = (x[seq, :, :stop][None] for x in (self.slots.k, self.slots.v))
        else:
            if start == 0:
                shape = (1, k.shape[1], length, k.shape[3])
                self.scratch, self.queries = (k.new_empty(shape), v.new_empty(shape)), q[:, :, :0]
            for scratch, rows in zip(self.scratch, (k, v), strict=True):
                scratch[:, :, start:stop] = rows
            keys, values = (scratch[:, :, :stop] for scratch in self.scratch)
            queries = torch.cat([self.queries, q], dim=2)
            self.queries = queries if num_observed is None else queries[:, :, max(0, queries.shape[2] - num_observed) :].clone()
        out = prefill_attention(q, keys, values, self.method.spec.scale)
        if stop == length and not in_place:
            with self.method.clock:
                self.keep(self.queries, keys, values, seq)
            del self.scratch, self.queries
        return out

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        """Store what the method keeps of this layer's prompt; q may be only its last queries (Method.num_observed)."""
        self.slots.store(seq, 0, k, v)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token per sequence: q [B, Hq, 1, D], k, v [B, Hkv, 1, D] -> [B, Hq, 1, D]."""
        self.slots.append(k[:, :, 0], v[:, :, 0], self.method.step["slot"])
        spec = self.method.spec
        return self.slots.attend(q[:, :, 0], self.method.step["lengths"], spec.scale)[0][:, :, None]

    def positions(self, seen: Tensor) -> Tensor:
        """True position held by each slot of each head, [B, Hkv, C], -1 where empty or given up; default: all alike."""
        return self.method.positions(seen)[:, None].expand(-1, self.method.spec.num_kv_heads, -1)

    def rotated_at(self, seen: Tensor) -> Tensor:
        """Positions at which the last step had the slots' keys rotated, [B, Hkv, C]; default: the true ones."""
        return self.positions(seen)

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.slots.tensors()
