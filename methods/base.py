"""What a cache method is: a dataclass of knobs that plans slots, makes one KVLayer per layer and owns what crosses layers.

One method = one file here + one yaml in conf/method/. The life of a method in a cell:

    plan(spec) -> Plan       slots and predicted bytes, before anything is allocated; ValueError when impossible
    bind(spec)               allocate: one KVLayer per layer, via make_layer
    begin_prefill(seq, ids)  a prompt is about to go through the layers
    layer.prefill(q, k, v)   per layer and sequence, the whole prompt at once; keeps what the method keeps
    end_prefill(seq)         after the last layer of a sequence
    begin_step(seen)         once per decoded token, device only
    layer.decode(q, k, v)    per layer
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.prefill_attention import prefill_attention
from methods.slots import KV_DTYPES, make_slots, name_of, payload_bytes, row_bytes


@dataclass(frozen=True)
class Spec:
    """Shapes of one cell: all that a plan may depend on. context_len is the longest prompt that prefill sees."""

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

    def full_bytes(self, kv_dtype: str) -> int:
        """Bytes of the dense cache after prefill, in `kv_dtype`, scales included."""
        return self.batch_size * self.num_layers * self.context_len * self.slot_bytes(kv_dtype)

    def slot_bytes(self, kv_dtype: str) -> int:
        """Bytes of one slot: K and V of all heads of one token in one layer."""
        return 2 * self.num_kv_heads * row_bytes(kv_dtype, self.head_dim)


@dataclass(frozen=True)
class Plan:
    """What a method will hold. Bytes are over all layers and sequences of the batch."""

    kept: int  # slots filled after a prompt of context_len, per layer
    headroom: int  # further slots per layer for tokens to come; 0 where new tokens overwrite old ones
    ledger: dict[str, int]  # predicted resident bytes by kind, without headroom
    read_bytes: int  # KV bytes read per decode step, mean over max_new_tokens steps
    noop: bool = False  # the budget covers the prompt: same as full

    @property
    def num_slots(self) -> int:
        return self.kept + self.headroom

    @property
    def resident_bytes(self) -> int:
        return sum(self.ledger.values())


@dataclass
class Method:
    """Base of all methods. Fields are knobs (and the Hydra schema); state is made by bind()."""

    kv_dtype: str = "auto"

    memory_class: ClassVar[str] = "none"

    def __post_init__(self):
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ValueError(f"kv_dtype={self.kv_dtype} is not one of auto, {', '.join(KV_DTYPES)}")

    def stored_dtype(self, spec: Spec) -> str:
        """kv_dtype with `auto` resolved to the model's."""
        return name_of(spec.dtype) if self.kv_dtype == "auto" else self.kv_dtype

    def plan(self, spec: Spec) -> Plan:
        """Slots and predicted bytes for these shapes; ValueError with one line when they are impossible."""
        raise NotImplementedError

    def plan_slots(self, spec: Spec, kept: int, grows: bool, extra: dict[str, int] | None = None, extra_read: int = 0) -> Plan:
        """Plan of `kept` slots in every layer; new tokens take further slots when it grows, else they overwrite.

        Args:
            extra: predicted bytes of what is held beside the slots, by ledger kind; extra_read: bytes of it that a step reads.
        """
        noop = kept >= spec.context_len
        grows = grows or noop
        rows = spec.batch_size * spec.num_layers * 2 * spec.num_kv_heads
        kv_dtype = self.stored_dtype(spec)
        payload = payload_bytes(kv_dtype, spec.head_dim)
        ledger = {"kv": rows * kept * payload}
        if scales := row_bytes(kv_dtype, spec.head_dim) - payload:
            ledger["scales"] = rows * kept * scales
        mean_slots = kept + (spec.max_new_tokens + 1) / 2 if grows else kept
        return Plan(
            kept=kept,
            headroom=spec.max_new_tokens if grows else 0,
            ledger=ledger | (extra or {}),
            read_bytes=int(rows * mean_slots * row_bytes(kv_dtype, spec.head_dim)) + extra_read,
            noop=noop,
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

    def end_prefill(self, seq: int) -> None:
        """All layers of sequence `seq` have been prefilled."""

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
    """A method that holds a chosen share of the full cache's bytes."""

    sparsity: float = 0.8
    kv_budget: float | None = None

    memory_class: ClassVar[str] = "freed"

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity} is outside [0, 1): 0 keeps all, 0.8 drops 80 % of the bytes")
        if self.kv_budget is not None and not 0 < self.kv_budget <= 1:
            raise ValueError(f"kv_budget={self.kv_budget} is outside (0, 1]: the share of the bf16 full cache's bytes")

    def budget_bytes(self, spec: Spec) -> int:
        """Bytes that may be resident after prefill: of the full cache in kv_dtype, or of the bf16 one with kv_budget."""
        if self.kv_budget is not None:
            return int(self.kv_budget * spec.full_bytes("bf16"))
        # the slack of 1e-9 keeps 1 - 0.8 from losing a slot to binary rounding
        return int((1 - self.sparsity) * spec.full_bytes(self.stored_dtype(spec)) + 1e-6)

    def solve(self, spec: Spec, minimum: int, why: str, per_slot: int = 0, fixed: int = 0) -> int:
        """Slots per layer that the budget buys; all of context_len when it covers the prompt.

        Args:
            minimum: fewest slots that make sense, named by `why` in the error.
            per_slot: further bytes per slot and sequence, once for all layers (an index, positions).
            fixed: further bytes whatever the number of slots.
        """
        budget = self.budget_bytes(spec)
        full = spec.full_bytes(self.stored_dtype(spec))
        if budget >= full:
            return spec.context_len
        slot = spec.num_layers * spec.slot_bytes(self.stored_dtype(spec)) + per_slot
        kept = max(0, budget - fixed) // (spec.batch_size * slot)
        if kept >= minimum:
            return min(kept, spec.context_len)
        limit = 1 - (minimum * spec.batch_size * slot + fixed) / full
        knob = f"sparsity={self.sparsity:g}" if self.kv_budget is None else f"kv_budget={self.kv_budget:g}"
        way_out = f"largest sparsity here: {int(limit * 1000) / 1000:g}" if limit > 0 else "use a longer context_len"
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
            method.planned.num_slots,
            spec.head_dim,
            method.stored_dtype(spec),
            spec.device,
            spec.impl,
        )

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        """Whole prompt of one sequence: q [1, Hq, T, D], k, v [1, Hkv, T, D] -> [1, Hq, T, D]."""
        out = prefill_attention(q, k, v, self.method.spec.scale)
        with self.method.clock:
            self.keep(q, k, v, seq)
        return out

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        """Store what the method keeps of this layer's prompt."""
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
