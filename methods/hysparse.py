"""hysparse: a gate sends each token to full or to sparse attention, in prefill and in decode, and ranks what the cache keeps.

The gate g(t) in [0, 1] (methods/gate.py) joins a prior for the token's class (number, proper noun, content word), how far the
token's value departs from what a small depthwise convolution over its neighbours suggests, and the attention that it received
from the prompt's last queries. Hidden states are seen through layer 0's values, attention is that of `gate_layer`:
layers up to it attend densely and wait for the choice, only those behind it save work in prefill.

Key tokens: the best `key_fraction` by g, the first `num_first`, the last `window` and the classes in `forced`.
Prefill: behind the gate layer the rows of key tokens attend to everything before them. The other rows attend to all key tokens,
to their local window, and, in blocks of the other tokens, to the `max_k` blocks that score highest and the `min_k` that score
lowest (mean query of the rows times mean key of the block). Both kinds are regrouped into blocks of their own, so that what is
skipped costs nothing and nothing counts twice (kernels/rows_attention); the window is rounded up to whole blocks.
Cache: the `num_sinks` first and `window` last tokens, then forced classes, then by g as far as the budget reaches, so that key
tokens come first; a budget below key_fraction holds only the best of them. The rest is dropped for good.
Decode: answer_full=true reads every slot in each step. Otherwise only a token that is gated in does; the others read the window
and the best and worst blocks of slots. A fed token has received no attention yet and counts as the prompt's average, so that
its class and its value decide.
In chunks (shape.prefill_chunk) all layers attend densely, since the gate is known only with the last chunk.

The name belongs to a paper too (HySparse, arXiv 2602.03560): a pretraining architecture in which a full layer chooses blocks
for the sparse layers behind it and shares its KV with them. This is not that, and none of its numbers belong beside these.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.column_sums import column_sums
from kernels.compact import compact
from kernels.prefill_attention import lists_of, prefill_attention
from kernels.rows_attention import NO_KEY, NO_ROW, rows_attention
from kernels.select import select
from methods.base import Budgeted, KVLayer, Plan, Spec
from methods.calibration import calibrated, model_file
from methods.gate import CLASSES, Gate, relative_attention, token_classes
from methods.kept import INDEX_BYTES, OFFSET_BYTES, held_positions
from methods.scoring import pool_neighbours, reduced

FED_BYTES = 12  # class of the token that a step feeds, int64, and what it counts as having received, fp32
BLOCKS = (64, 128)
MONITOR_STEPS = 16  # steps before the gate rate of a sequence is judged


@dataclass
class HySparse(Budgeted):
    """A gate per token, top key tokens kept; see the module.

    gate: file of trained weights (python -m harness.train_heads); without it the row is flagged untrained.
    gate_layer: layer, counted from 0, whose attention enters the gate; auto: the deepest that the `calibration` file names.
    observe: last queries whose mean attention counts; the last `focus` of them weigh as much as all (0: all alike).
    head_reduce: how heads are joined, max or mean. pool: neighbours (odd) that share the attention, as its maximum.
    key_fraction: share of the prompt that the gate makes key tokens. num_first, window: first and last tokens that always are.
    num_sinks: first tokens that the cache always holds. forced: classes (number, proper, content) that are key tokens.
    local_window: tokens before it that any row attends to. block: 64 or 128 tokens; max_k, min_k: blocks of highest and of
    lowest score (min_k=0 is the ablation).
    answer_full: read all slots while decoding, in place of asking the gate.
    layer_sparsity: sparsity of single layers as in {0: 0.5}; the other layers share what is left of the budget.
    monitor_range: lowest and highest share of gated-in tokens; a prompt outside is prefilled densely, and a sequence that is
    outside after 16 steps or later reads all of its slots from then on. The row counts both. [0, 1]: never.
    """

    gate: str | None = None
    gate_layer: int | str = 15
    calibration: str | None = None
    observe: int = 128
    focus: int = 32
    head_reduce: str = "max"
    pool: int = 15
    key_fraction: float = 0.2
    num_first: int = 128
    num_sinks: int = 4
    window: int = 32
    forced: Any = field(default_factory=list)
    local_window: int = 128
    block: int = 64
    max_k: int = 2
    min_k: int = 2
    answer_full: bool = True
    layer_sparsity: Any = None
    monitor_range: Any = field(default_factory=lambda: [0.0, 1.0])

    def __post_init__(self):
        super().__post_init__()
        if self.gate_layer != "auto" and not (isinstance(self.gate_layer, int) and self.gate_layer >= 0):
            raise ValueError(f"method.gate_layer={self.gate_layer} must be a layer, counted from 0, or auto")
        if self.head_reduce not in ("max", "mean"):
            raise ValueError(f"method.head_reduce={self.head_reduce} is not one of max, mean")
        if self.block not in BLOCKS:
            raise ValueError(f"method.block={self.block} is not one of {', '.join(map(str, BLOCKS))}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"method.pool={self.pool} must be odd and at least 1 (1: no pooling)")
        if not 0 < self.key_fraction <= 1:
            raise ValueError(f"method.key_fraction={self.key_fraction} is outside (0, 1]: 0.2 is the default")
        least = {"observe": 1, "focus": 0, "local_window": 1, "num_first": 0, "num_sinks": 0, "max_k": 0, "min_k": 0}
        # the convolution of a step reads the tokens before it from the cache
        for name, lowest in (least | {"window": Gate.KERNEL}).items():
            if getattr(self, name) < lowest:
                raise ValueError(f"method.{name}={getattr(self, name)} must be at least {lowest}")
        if odd := [name for name in self.forced if name not in CLASSES[1:]]:
            raise ValueError(f"method.forced={list(self.forced)}: {odd[0]} is not one of {', '.join(CLASSES[1:])}")
        if not isinstance(self.layer_sparsity, dict | None) or not all(
            isinstance(layer, int) and isinstance(share, int | float) and 0 <= share < 1
            for layer, share in (self.layer_sparsity or {}).items()
        ):
            raise ValueError(
                f"method.layer_sparsity={self.layer_sparsity} must give layers a share in [0, 1), as in {{0: 0.5}}"
            )
        bounds = list(self.monitor_range)
        if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] <= 1:
            raise ValueError(
                f"method.monitor_range={bounds} must be two shares, 0 <= low <= high <= 1; [0, 1]: never falls back"
            )
        # class of each token id, see read_tokenizer; None: every token is "other"
        self.token_classes: bytes | None = None

    def read_tokenizer(self, tokenizer, vocab_size: int) -> None:
        self.token_classes = token_classes(tokenizer, vocab_size)

    @property
    def reads_lists(self) -> bool:
        return not self.answer_full

    # planning

    def layer_of(self, spec: Spec) -> int:
        """gate_layer with `auto` resolved."""
        layer = self.gate_layer
        if layer == "auto":
            made = calibrated(self.calibration, "sparda", spec, "method.gate_layer=auto")
            layer = max(made["sparda"]["predict_layers"])
        if layer >= spec.num_layers:
            raise ValueError(
                f"method.gate_layer={layer} is a layer that the model lacks; it has layers 0 to {spec.num_layers - 1}, "
                f"try method.gate_layer={spec.num_layers // 2}"
            )
        return layer

    def fixed_bytes(self, spec: Spec) -> dict[str, int]:
        """Bytes held once whatever the budget, by ledger kind."""
        table = len(self.token_classes or b"") if self.reads_lists else 0
        return {"gate": Gate.num_bytes(spec.num_kv_heads * spec.head_dim) + table, "monitor": Monitor.num_bytes(0)}

    def num_blocks(self, spec: Spec, kept: int) -> int:
        return -(-(kept + spec.max_new_tokens) // self.block)

    def block_bytes(self, spec: Spec) -> int:
        """Bytes of the mean key of one block of slots in one layer."""
        return 4 * spec.num_kv_heads * spec.head_dim if self.reads_lists else 0

    def sizes(self, spec: Spec) -> list[int]:
        """Slots for the prompt in each layer."""
        own = self.layer_sparsity or {}
        if wrong := [layer for layer in own if not 0 <= layer < spec.num_layers]:
            raise ValueError(f"method.layer_sparsity names layer {wrong[0]}; the model has layers 0 to {spec.num_layers - 1}")
        minimum, why = self.num_sinks + self.window + 1, f"{self.num_sinks} sinks, {self.window} recent tokens and one chosen"
        kept = {layer: int((1 - share) * spec.context_len + 1e-6) for layer, share in own.items()}
        if few := [layer for layer, size in kept.items() if size < minimum]:
            raise ValueError(
                f"method.layer_sparsity={{{few[0]}: {own[few[0]]}}} leaves {kept[few[0]]} slots, fewer than the {minimum} that "
                f"hold {why}; largest here: {int((1 - minimum / spec.context_len) * 1000) / 1000:g}"
            )
        others = [layer for layer in range(spec.num_layers) if layer not in kept]
        fixed = spec.batch_size * (sum(self.fixed_bytes(spec).values()) + Monitor.SEQUENCE_BYTES)
        fixed += spec.batch_size * (OFFSET_BYTES * (1 + len(set(kept.values()))) + FED_BYTES)
        for layer, size in kept.items():
            fixed += sum(self.held_bytes(spec, size, [layer]).values())
            fixed += spec.batch_size * self.num_blocks(spec, size) * self.block_bytes(spec)
        fixed += sum(spec.batch_size * size * INDEX_BYTES for size in set(kept.values()))
        # a mean key per block: its share is charged to each slot, and the blocks of tokens to come beside
        pooled = len(others) * self.block_bytes(spec)
        fixed += spec.batch_size * (spec.max_new_tokens // self.block + 2) * pooled
        if others:
            per_slot = INDEX_BYTES - -pooled // self.block
            kept |= dict.fromkeys(others, self.solve(spec, minimum, why, per_slot=per_slot, fixed=fixed, layers=others))
        elif (held := fixed + spec.other_bytes) > (budget := self.budget_bytes(spec)):
            raise ValueError(
                f"method.layer_sparsity gives every layer its own share and takes {held} bytes, the budget is {budget}: "
                "leave a layer out, or raise the shares"
            )
        return [kept[layer] for layer in range(spec.num_layers)]

    def plan(self, spec: Spec) -> Plan:
        self.layer_of(spec)
        if self.gate and spec.tp_size > 1 and model_file(self.gate):
            raise ValueError("method.gate was trained on all heads, which no rank has: use method.gate=null with model.tp_size")
        sizes, batch = self.sizes(spec), spec.batch_size
        if min(sizes) >= spec.context_len:
            return self.plan_slots(spec, spec.context_len, grows=True)
        own = self.layer_sparsity or {}
        common = next((size for layer, size in enumerate(sizes) if layer not in own), max(sizes))
        ledger, read = Counter(self.fixed_bytes(spec)), 0
        ledger["monitor"] += batch * Monitor.SEQUENCE_BYTES
        ledger["gate"] += batch * FED_BYTES
        steps = range(1, spec.max_new_tokens + 1)
        for size in set(sizes):
            layers = [layer for layer, held in enumerate(sizes) if held == size]
            ledger.update(self.held_bytes(spec, size, layers))
            ledger["index"] += batch * (size * INDEX_BYTES + OFFSET_BYTES)
            everything = self.read_bytes(spec, [size + step for step in steps], layers)
            if self.answer_full:
                read += everything
                continue
            pooled = batch * len(layers) * self.num_blocks(spec, size) * self.block_bytes(spec)
            ledger["pooled"] += pooled
            # as many steps as prompt tokens are taken to be gated in; the row says how many were
            listed = self.block * (-(-self.window // self.block) + 1 + self.max_k + self.min_k)
            some = self.read_bytes(spec, [min(size + step, listed) for step in steps], layers)
            read += int(self.key_fraction * everything + (1 - self.key_fraction) * some) + pooled
        others = {layer: (size, spec.max_new_tokens) for layer, size in enumerate(sizes) if size != common}
        return Plan(common, spec.max_new_tokens, dict(ledger), read, other_layers=others)

    # state

    def num_observed(self) -> int | None:
        return self.observe

    def bind(self, spec: Spec) -> None:
        self.layer, self.trained = self.layer_of(spec), False
        if self.forced and self.token_classes is None:
            raise ValueError(
                f"method.forced={list(self.forced)} needs the classes of tokens, and there is no tokenizer: call read_tokenizer"
            )
        self.size_of = self.sizes(spec)
        super().bind(spec)
        self.end_prefill(0)
        self.weights = self.class_table = None
        if self.planned.noop:
            return
        batch, device = spec.batch_size, spec.device
        self.index = {size: torch.full((batch, size), -1, dtype=torch.int32, device=device) for size in set(self.size_of)}
        self.offset = {size: torch.zeros(batch, dtype=torch.int64, device=device) for size in self.index}
        self.weights = Gate(spec.num_kv_heads * spec.head_dim).requires_grad_(False)
        if file := model_file(self.gate):
            self.weights.load(file, self.gate_facts())
            self.trained = True
        self.weights.to(device)
        self.monitor = Monitor(batch, device)
        # class of the token that a step feeds, 0 ("other") unless see_token is told; mean attention received in the prompt
        self.fed = torch.zeros(batch, dtype=torch.int64, device=device)
        self.average = torch.zeros(batch, device=device)
        if self.reads_lists and self.token_classes is not None:
            self.class_table = self.classes().to(device)

    def release(self) -> None:
        super().release()
        self.end_prefill(0)

    def make_layer(self, layer_idx: int) -> KVLayer:
        if self.planned.noop:
            return KVLayer(self, layer_idx)
        common = self.answer_full and self.size_of[layer_idx] == self.planned.kept
        return (GatedLayer if common else ListedLayer)(self, layer_idx)

    def tensors(self) -> dict[str, list[Tensor]]:
        if self.planned.noop:
            return {}
        table = [] if self.class_table is None else [self.class_table]
        return {
            "index": [*self.index.values(), *self.offset.values()],
            "gate": [*self.weights.parameters(), self.fed, self.average, *table],
            "monitor": self.monitor.tensors(),
        }

    def classes(self) -> Tensor:
        """Class of every token id, [V] int8 on the host."""
        return torch.frombuffer(bytearray(self.token_classes), dtype=torch.int8)

    def gate_facts(self) -> dict:
        """Settings that a trained gate holds for."""
        names = ("observe", "focus", "head_reduce", "pool")
        return {"gate_layer": self.layer} | {name: getattr(self, name) for name in names}

    def facts(self) -> dict:
        facts = {
            "gate_layer": self.layer,
            "gate_depth": round((self.layer + 1) / self.spec.num_layers, 3),
            "gate_file": self.gate if self.trained else None,
            "class_prior": "lexical" if self.token_classes is not None else "neutral: no tokenizer",
            "hidden_states": "values of layer 0",
        }
        if self.layer_sparsity:
            facts["kept_by_layer"] = self.size_of
        if self.gate_layer == "auto":
            made = calibrated(self.calibration, "sparda", self.spec, "method.gate_layer=auto")
            facts |= {"calibration": self.calibration, "calibration_weights": made["weights"]}
        return facts if self.planned.noop else facts | self.monitor.facts()

    def flags(self) -> list[str]:
        return [] if self.trained or self.planned.noop else ["untrained"]

    # prefill

    def begin_prefill(self, seq: int, prompt: Tensor) -> None:
        self.end_prefill(seq)
        if self.planned.noop:
            return
        length = len(prompt)
        self.monitor.start(seq, length)
        for size, offset in self.offset.items():
            offset[seq] = max(0, length - size)
        if self.token_classes is None:
            self.prompt_classes = torch.zeros(length, dtype=torch.long, device=self.spec.device)
        else:
            self.prompt_classes = self.classes()[prompt.cpu()].long().to(self.spec.device)

    def end_prefill(self, seq: int) -> None:
        self.waiting: list[tuple[KVLayer, Tensor, Tensor]] = []
        self.prompt_classes = self.sensitivity = self.key_tokens = self.regrouped = None
        self.chosen: dict[int, Tensor] | None = None

    def look(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        """Take from a layer what the gate needs; with gate_layer the tokens are ranked. Shapes as KVLayer.prefill."""
        if layer_idx == 0:
            values = v[0].transpose(0, 1).flatten(1).float()  # [T, C]
            self.sensitivity = self.sense(values, self.weights.before(values))
        if layer_idx != self.layer:
            return
        received = self.received(q, k)
        self.average[seq] = received.mean()
        logits = self.weights(self.prompt_classes, self.sensitivity, received)
        self.key_tokens, forced = self.keys_of(logits)
        low, high = self.monitor_range
        gated_in = logits >= 0
        if (low, high) != (0, 1) and not low <= float(gated_in.float().mean()) <= high:
            self.key_tokens = None
            self.monitor.fell_at[seq] = 0
        self.monitor.saw_prompt(seq, gated_in)
        scores = logits + forced * 1e3  # far above any logit
        self.chosen = {}
        for size, index in self.index.items():
            kept = min(size, len(scores))
            chosen = select(scores, kept, *self.forced_tokens(kept), self.spec.impl)
            index[seq].fill_(-1)
            index[seq, :kept] = chosen
            self.chosen[size] = chosen
        while self.waiting:
            self.store(*self.waiting.pop(), seq)

    def forced_tokens(self, kept: int) -> tuple[int, int]:
        """Sinks and recent tokens among `kept`; a prompt shorter than both has nothing to choose."""
        window = min(self.window, kept)
        return min(self.num_sinks, kept - window), window

    def sense(self, values: Tensor, earlier: Tensor) -> Tensor:
        """Sensitivity [...] of values [..., C] from the tokens before them [..., KERNEL, C], over all ranks."""
        return Gate.sensitivity(self.spec.over_ranks(self.weights.distances(values, earlier), "mean"))

    def received(self, q: Tensor, k: Tensor) -> Tensor:
        """log2 of the attention that each token of the prompt gets, relative to uniform, [T]; shapes as KVLayer.prefill."""
        length = k.shape[2]
        windows = [min(self.observe, length)]
        if 0 < self.focus < windows[0]:
            windows.append(self.focus)
        sums = [column_sums(q, k, self.spec.scale, n, self.head_reduce, self.spec.impl)[0] / n for n in windows]
        mass = reduced(sum(sums) / len(sums), self.head_reduce, 0)
        return relative_attention(pool_neighbours(self.spec.over_ranks(mass, self.head_reduce), self.pool), length)

    def keys_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are key tokens, and which of them by their class: two masks [T]."""
        length = len(logits)
        best = select(logits, max(1, int(self.key_fraction * length)), 0, 0, self.spec.impl).long()
        places = torch.arange(length, device=logits.device)
        keys = (places < self.num_first) | (places >= length - self.window)
        keys[best] = True
        forced = torch.zeros_like(keys)
        for name in self.forced:
            forced |= self.prompt_classes == CLASSES.index(name)
        return keys | forced, forced

    def store(self, layer: KVLayer, k: Tensor, v: Tensor, seq: int) -> None:
        """The chosen rows of k, v [1, Hkv, T, D] into the layer's first slots, as soon as they are known."""
        if self.chosen is None:
            self.waiting.append((layer, k, v))
        else:
            layer.fill(seq, *(compact(rows, self.chosen[layer.size], impl=self.spec.impl) for rows in (k, v)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a prompt's layer, dense until the gate is known; shapes as KVLayer.prefill."""
        length, scale = q.shape[2], self.spec.scale
        if self.key_tokens is not None and self.regrouped is None:
            with self.clock:
                self.regrouped = Regrouped(self.key_tokens, self.block, self.local_window)
        if self.regrouped is None or not self.regrouped.num_ordinary:
            self.monitor.attended(length * (length + 1) // 2, length)
            return prefill_attention(q, k, v, scale)
        groups, impl = self.regrouped, self.spec.impl
        q, k, v = (compact(x, groups.order, impl=impl) for x in (q, k, v))
        mask = groups.lists(q, k, self.max_k, self.min_k)
        self.monitor.attended((mask * groups.pairs).sum() / len(mask), length)
        out = rows_attention(q, k, v, groups.rows, groups.keys, lists_of(mask[None]), self.block, scale, impl)
        return out[:, :, groups.place]

    # decode

    def see_token(self, token: Tensor) -> None:
        if self.class_table is not None:
            self.fed.copy_(self.class_table[token])

    def begin_step(self, seen: Tensor) -> None:
        super().begin_step(seen)
        if self.planned.noop:
            return
        self.step["seen"] = seen
        for size, offset in self.offset.items():
            slot = seen - offset
            self.step |= {f"slot {size}": slot, f"lengths {size}": slot + 1}

    def open_gate(self, values: Tensor, earlier: Tensor) -> None:
        """Decide for this step from layer 0's values [B, C] of the fed token and those before it [B, KERNEL, C]."""
        gated_in = self.weights(self.fed, self.sense(values, earlier), self.average) >= 0
        self.step["open"] = self.monitor.saw_step(gated_in, self.step["seen"], *self.monitor_range)

    def slot_of(self, seen: Tensor) -> Tensor:
        return seen if self.planned.noop else seen - self.offset[self.planned.kept]

    def lengths_of(self, seen: Tensor) -> Tensor:
        return self.slot_of(seen) + 1

    def positions(self, seen: Tensor) -> Tensor:
        return super().positions(seen) if self.planned.noop else self.held(self.planned.kept, seen)

    def held(self, size: int, seen: Tensor) -> Tensor:
        """True position in each slot of the layers that keep `size` tokens of a prompt, [B, C], -1 where empty."""
        return held_positions(self.index[size][:, None], self.offset[size], size + self.planned.headroom, seen)[:, 0]


class GatedLayer(KVLayer):
    """Attends to its prompt as the gate says and keeps the chosen tokens; decodes as any layer does."""

    @property
    def size(self) -> int:
        return self.method.size_of[self.layer_idx]

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        out = self.method.attend(q, k, v)
        with self.method.clock:
            self.keep(q, k, v, seq)
        return out

    def prefill_chunk(self, q: Tensor, k: Tensor, v: Tensor, seq: int, start: int, length: int) -> Tensor:
        if start + q.shape[2] == length:
            self.method.monitor.attended(length * (length + 1) // 2, length)
        return super().prefill_chunk(q, k, v, seq, start, length)

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        self.method.look(self.layer_idx, q, k, v, seq)
        self.method.store(self, k, v, seq)

    def fill(self, seq: int, k: Tensor, v: Tensor) -> None:
        """Kept rows k, v [1, Hkv, N, D] into the first slots."""
        self.slots.store(seq, 0, k, v)

    def positions(self, seen: Tensor) -> Tensor:
        return self.method.held(self.size, seen)[:, None].expand(-1, self.method.spec.num_kv_heads, -1)


class ListedLayer(GatedLayer):
    """The same with slots of a number of its own, or (answer_full=false) reading lists of blocks where the gate is shut.

    pooled: mean key of each block of slots, [B, Hkv, NB, D].
    """

    def __init__(self, method: HySparse, layer_idx: int):
        super().__init__(method, layer_idx)
        if method.reads_lists:
            spec = method.spec
            shape = (spec.batch_size, spec.num_kv_heads, method.num_blocks(spec, self.size), spec.head_dim)
            self.pooled = torch.zeros(shape, device=spec.device)

    def fill(self, seq: int, k: Tensor, v: Tensor) -> None:
        super().fill(seq, k, v)
        if self.method.reads_lists:
            self.pooled[seq].zero_()
            means = block_means(k[0].float(), self.method.block)
            self.pooled[seq, :, : means.shape[1]] = means

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method, q = self.method, q[:, :, 0]
        slot, lengths = (method.step[f"{name} {self.size}"] for name in ("slot", "lengths"))
        lists = {}
        if method.reads_lists:
            if self.layer_idx == 0:
                method.open_gate(v[:, :, 0].flatten(1).float(), self.earlier(slot))
            self.slots.append(k[:, :, 0], v[:, :, 0], slot)
            lists = self.blocks_to_read(q, slot, lengths)
        else:
            self.slots.append(k[:, :, 0], v[:, :, 0], slot)
        return self.slots.attend(q, lengths, method.spec.scale, **lists)[0][:, :, None]

    def rows(self, x: Tensor, slots: Tensor, live: Tensor) -> Tensor:
        """Rows of x [B, Hkv, C, D] at slots [B, N], zeros where not live [B, N]: [B, Hkv, N, D] fp32."""
        shape = (*x.shape[:2], slots.shape[1], x.shape[3])
        taken = x.gather(2, slots.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(shape))
        return taken.float().masked_fill(~live[:, None, :, None], 0)

    def earlier(self, slot: Tensor) -> Tensor:
        """Values of the tokens before the one that goes to slot [B]: [B, KERNEL, C], zeros before the first."""
        slots = slot[:, None] - torch.arange(1, Gate.KERNEL + 1, device=slot.device)
        return self.rows(self.slots.v, slots, slots >= 0).transpose(1, 2).flatten(2)

    def blocks_to_read(self, q: Tensor, slot: Tensor, lengths: Tensor) -> dict:
        """Options of Slots.attend for q [B, Hq, D]: all blocks where the gate is open, else window, best and worst."""
        method, size = self.method, self.method.block
        newest = slot // size  # [B]
        inside = newest[:, None] * size + torch.arange(size, device=slot.device)
        live = inside < lengths[:, None]
        mean = self.rows(self.slots.k, inside, live).sum(2) / live.sum(1)[:, None, None]
        self.pooled.scatter_(2, newest[:, None, None, None].expand(*mean.shape[:2], 1, mean.shape[2]), mean[:, :, None])
        blocks = torch.arange(self.pooled.shape[2], device=slot.device)
        there = blocks * size < lengths[:, None]  # [B, NB]
        recent = there & (blocks >= ((lengths - method.window).clamp(min=0) // size)[:, None])
        asked = q.float().unflatten(1, (self.pooled.shape[1], -1)).mean(2)  # [B, Hkv, D]
        scores = (self.pooled @ asked[..., None])[..., 0]
        read = best_and_worst(scores, (there & ~recent)[:, None].expand_as(scores), method.max_k, method.min_k)
        read = read | (recent | there & method.step["open"][:, None])[:, None]
        index, counts = lists_of(read)
        # every head has as many
        if self.layer_idx == method.spec.num_layers - 1:
            method.monitor.read_slots(counts[:, 0] * size, lengths)
        return {"index": index, "index_lens": counts[:, 0].contiguous(), "block_size": size}

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.slots.tensors() | ({"pooled": [self.pooled]} if self.method.reads_lists else {})


def best_and_worst(scores: Tensor, candidates: Tensor, max_k: int, min_k: int) -> Tensor:
    """The max_k highest and the min_k lowest of the candidates, by scores [..., N]: a mask; all where they are too few."""
    order = scores.masked_fill(~candidates, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    # of equal scores, those that are no candidates come last
    order = order.gather(-1, candidates.gather(-1, order).int().argsort(dim=-1, descending=True, stable=True))
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order))
    count = candidates.sum(-1, keepdim=True)
    return candidates & ((rank < max_k) | (rank >= count - min_k))


def block_means(x: Tensor, block: int, live: Tensor | None = None) -> Tensor:
    """Mean of each block of rows, x [H, N, D] -> [H, ceil(N / block), D]; live [N]: rows that count (None: all)."""
    live = torch.ones(x.shape[1], dtype=torch.bool, device=x.device) if live is None else live
    missing = -x.shape[1] % block
    counts = torch.nn.functional.pad(live, (0, missing)).unflatten(0, (-1, block)).sum(1)
    rows = torch.nn.functional.pad(x.masked_fill(~live[:, None], 0), (0, 0, 0, missing))
    return rows.unflatten(1, (-1, block)).sum(2) / counts.clamp(min=1)[:, None]


class Regrouped:
    """A prompt's tokens in another order: key tokens in blocks of their own, then the others; positions stay with them.

    order [P] int32: token at each place, -1 where a block is filled up. Rows and keys have the same blocks; the first num_key
    of them hold key tokens. pairs [NB, NB]: causal pairs of tokens in each pair of blocks. fixed [NB, NB]: pairs of
    blocks that are attended whatever the scores; candidates [NO, NO]: those of ordinary tokens that scores decide on.
    """

    def __init__(self, key_tokens: Tensor, block: int, local_window: int):
        length, device = len(key_tokens), key_tokens.device
        keys, ordinary = (mask.nonzero()[:, 0] for mask in (key_tokens, ~key_tokens))
        self.block, self.num_ordinary = block, len(ordinary)
        fill = lambda x: torch.nn.functional.pad(x, (0, -len(x) % block), value=-1)  # noqa: E731
        self.order = torch.cat([fill(keys), fill(ordinary)]).int()
        self.num_key = -(-len(keys) // block)
        live = self.order >= 0
        self.rows = torch.where(live, self.order, NO_ROW)
        self.keys = torch.where(live, self.order, NO_KEY)
        self.place = torch.empty(length, dtype=torch.long, device=device)
        self.place[self.order[live].long()] = live.nonzero()[:, 0]
        self.live = live
        by_block = self.order.unflatten(0, (-1, block))
        first, last = by_block[:, 0], by_block.amax(1)  # ascending inside a block, filled up behind
        causal = first <= last[:, None]  # [NB, NB]
        is_key = torch.arange(len(first), device=device) < self.num_key
        near = last > first[:, None] - local_window
        self.fixed = causal & (is_key[:, None] | is_key | near)
        self.candidates = (causal & ~self.fixed)[self.num_key :, self.num_key :]
        # tokens of each group up to a position, so how many of a block a row may see
        upto = torch.stack([(~key_tokens).cumsum(0), key_tokens.cumsum(0)])  # [2, T]
        start = torch.arange(len(first), device=device) * block
        start = torch.where(is_key, start, start - self.num_key * block)
        filled = live.unflatten(0, (-1, block)).sum(1)
        pairs = []
        for tokens in by_block:
            seen = upto[is_key.long()[:, None], tokens.clamp(min=0).long()] - start[:, None]  # [NB, block]
            pairs.append(((seen.clamp(min=0).minimum(filled[:, None])) * (tokens >= 0)).sum(1))
        self.pairs = torch.stack(pairs)

    def lists(self, q: Tensor, k: Tensor, max_k: int, min_k: int) -> Tensor:
        """Keys' blocks that each block of rows attends to, [Hkv, NB, NB]; q [1, Hq, P, D], k [1, Hkv, P, D] are regrouped."""
        first = self.num_key * self.block
        asked = q[0].unflatten(0, (k.shape[1], -1)).float().mean(1)  # [Hkv, P, D]
        asked, known = (block_means(x[:, first:], self.block, self.live[first:]) for x in (asked, k[0].float()))
        scores = asked @ known.mT  # [Hkv, NO, NO]
        mask = self.fixed.expand(len(scores), -1, -1).clone()
        mask[:, self.num_key :, self.num_key :] |= best_and_worst(scores, self.candidates.expand_as(scores), max_k, min_k)
        return mask


class Monitor:
    """What the gate really did, counted on the device; facts() reads it after the run.

    totals: by name, over all that ran since bind. Per sequence: prompt length, steps gated in, and the step from which it reads
    everything (0: from the prompt on, -1: not).
    """

    TOTALS = ("pairs", "causal", "gated", "tokens", "gated_steps", "steps", "read", "held", "fallbacks")
    SEQUENCE_BYTES = 24

    def __init__(self, batch: int, device):
        self.totals = torch.zeros(len(self.TOTALS), dtype=torch.float64, device=device)
        self.earliest = torch.full((1,), torch.iinfo(torch.int64).max, device=device)
        self.lengths, self.gated = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
        self.fell_at = torch.full((batch,), -1, device=device)
        self.started = False

    @classmethod
    def num_bytes(cls, batch: int) -> int:
        return 8 * (len(cls.TOTALS) + 1) + batch * cls.SEQUENCE_BYTES

    def tensors(self) -> list[Tensor]:
        return [self.totals, self.earliest, self.lengths, self.gated, self.fell_at]

    def add(self, **amounts) -> None:
        for name, amount in amounts.items():
            self.totals[self.TOTALS.index(name)] += amount

    def start(self, seq: int, length: int) -> None:
        """A prompt of so many tokens takes the place of the sequence's last one."""
        if not self.started:
            # steps before the first prompt were a graph's warm-up
            self.started = True
            self.totals.zero_()
            self.earliest.fill_(torch.iinfo(torch.int64).max)
        self.lengths[seq], self.gated[seq], self.fell_at[seq] = length, 0, -1

    def attended(self, pairs: Tensor | int, length: int) -> None:
        """One layer attended to so many of its prompt's causal pairs."""
        self.add(pairs=pairs, causal=length * (length + 1) // 2)

    def saw_prompt(self, seq: int, gated_in: Tensor) -> None:
        """gated_in [T]."""
        fell = self.fell_at[seq : seq + 1] == 0
        self.add(gated=gated_in.sum(), tokens=len(gated_in), fallbacks=fell.sum())
        self.earliest.copy_(torch.where(fell, 0, self.earliest))

    def saw_step(self, gated_in: Tensor, seen: Tensor, low: float, high: float) -> Tensor:
        """Whether each sequence reads everything in this step, [B], from gated_in [B] and tokens seen before it [B]."""
        number = seen - self.lengths + 1
        # a rewound prompt decodes anew; what fell with the prompt stays so
        self.gated.copy_(torch.where(number == 1, 0, self.gated) + gated_in)
        fell_at = torch.where((number == 1) & (self.fell_at > 0), -1, self.fell_at)
        rate = self.gated / number
        falls = (fell_at < 0) & (number >= MONITOR_STEPS) & ((rate < low) | (rate > high))
        self.fell_at.copy_(torch.where(falls, number, fell_at))
        self.earliest.copy_(torch.where(falls, number, self.earliest).amin()[None].minimum(self.earliest))
        self.add(gated_steps=gated_in.sum(), steps=len(gated_in), fallbacks=falls.sum())
        return gated_in | (self.fell_at >= 0)

    def read_slots(self, read: Tensor, held: Tensor) -> None:
        """A step of the last layer named so many slots [B] of those that hold a token [B]."""
        self.add(read=read.minimum(held).sum(), held=held.sum())

    def facts(self) -> dict:
        totals = dict(zip(self.TOTALS, self.totals.tolist(), strict=True))
        share = lambda part, whole: round(totals[part] / totals[whole], 4) if totals[whole] else None  # noqa: E731
        attended = share("pairs", "causal")
        earliest = int(self.earliest)
        return {
            "prefill_sparsity": None if attended is None else round(1 - attended, 4),
            "gate_rate_prefill": share("gated", "tokens"),
            "gate_rate_decode": share("gated_steps", "steps"),
            "read_share_decode": share("read", "held"),
            "fallbacks": int(totals["fallbacks"]),
            "first_fallback_step": earliest if earliest < torch.iinfo(torch.int64).max else None,
        }
