"""What decode steps must give, computed another way: a dense forward in fp64 over exactly the positions that the slots claim.

`record` runs an engine and notes, per layer and step, which positions the slots claim and what lies in them. `replay` runs the
whole text at once through a copy of the Hugging Face model in another dtype, with an attention that knows nothing of slots.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from harness.engine import Engine
from methods.base import KVLayer
from methods.slots import DTYPES

ATTENTION = "kvgauge_masked_dense"


@dataclass
class Trace:
    """One layer of a recording; lists have one entry per sequence (prompt_) or per step."""

    own_prefill: bool  # the layer attends to its prompt in a way of its own
    rotates: bool  # the layer rotates stored keys again
    prompt_k: list[Tensor] = field(default_factory=list)  # [Hkv, T, D]
    prompt_v: list[Tensor] = field(default_factory=list)
    prompt_out: list[Tensor] = field(default_factory=list)  # [Hq, T, D]
    new_k: list[Tensor] = field(default_factory=list)  # [B, Hkv, D]
    new_v: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # position per slot [B, Hkv, C]: after the prompt and after each step
    rotated_at: list[Tensor] = field(default_factory=list)  # [B, Hkv, C]
    read: list[Tensor | None] = field(
        default_factory=list
    )  # slots that a list named [B, Hkv or 1, C]; None: all that are filled
    k: list[Tensor] = field(default_factory=list)  # rows in the slots as attention sees them [B, Hkv, C, D]
    v: list[Tensor] = field(default_factory=list)

    def history(self, seq: int) -> tuple[Tensor, Tensor]:
        """True K and V of a sequence by position, [Hkv, T + n, D]."""
        new_k, new_v = (torch.stack([step[seq] for step in steps], 1) for steps in (self.new_k, self.new_v))
        return torch.cat([self.prompt_k[seq], new_k], 1), torch.cat([self.prompt_v[seq], new_v], 1)

    def in_steps(self, seq: int) -> Tensor:
        """Position of each slot while a step ran, [n, Hkv, C]: a slot given up at its end still took part in it."""
        held = self.of_steps("held", seq)
        return torch.where(held[1:] >= 0, held[1:], held[:-1])

    def turns(self, seq: int) -> Tensor:
        """Positions by which keys are rotated further than their own, [n, Hkv, C]."""
        return self.of_steps("rotated_at", seq) - self.of_steps("held", seq)[1:]

    def of_steps(self, name: str, seq: int) -> Tensor:
        """One of the per-step lists for a sequence, [n, ...]."""
        return torch.stack([step[seq] for step in getattr(self, name)])


@dataclass
class Recording:
    engine: Engine
    prompts: list[Tensor]  # [T] each
    forced: Tensor  # [B, n]
    logits: Tensor  # [n + 1, B, V]: after the prompt and after each step
    layers: list[Trace]


@torch.inference_mode()
def record(engine: Engine, prompts: list[Tensor], forced: Tensor) -> Recording:
    """Prefill prompts [T], feed forced [B, n] token by token; the engine keeps the spies and is of no other use."""
    layers = engine.method.layers
    traces = [_spy(layer) for layer in layers]
    logits = [engine.prefill(nn.utils.rnn.pad_sequence(prompts, batch_first=True), [len(prompt) for prompt in prompts])]
    for number, trace in enumerate(traces):
        trace.held.append(engine.positions(number).clone())
    for step in range(forced.shape[1]):
        for trace in traces:
            trace.read.append(None)
        engine.score(forced[:, step : step + 1])
        logits.append(engine.logits.clone())
        for number, (trace, layer) in enumerate(zip(traces, layers, strict=True)):
            trace.held.append(engine.positions(number).clone())
            trace.rotated_at.append(layer.rotated_at(engine.seen).clone())
            k, v = layer.slots.rows(engine.method.step["lengths"])
            trace.k.append(k.clone())
            trace.v.append(v.clone())
    return Recording(engine, prompts, forced, torch.stack(logits), traces)


def _spy(layer: KVLayer) -> Trace:
    """Lets the layer note what goes in and out."""
    own_prefill, rotates = (getattr(type(layer), n) is not getattr(KVLayer, n) for n in ("prefill", "rotated_at"))
    trace = Trace(own_prefill, rotates)
    prefill, decode, attend = layer.prefill, layer.decode, layer.slots.attend

    def noted_prefill(q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        trace.prompt_k.append(k[0].clone())
        trace.prompt_v.append(v[0].clone())
        out = prefill(q, k, v, seq)
        trace.prompt_out.append(out[0].clone())
        return out

    def noted_decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        trace.new_k.append(k[:, :, 0].clone())
        trace.new_v.append(v[:, :, 0].clone())
        return decode(q, k, v)

    def noted_attend(q: Tensor, lengths: Tensor, scale: float, **options) -> tuple[Tensor, Tensor]:
        if (index := options.get("index")) is not None:
            num_slots = layer.positions(lengths).shape[2]
            block = torch.arange(num_slots, device=q.device) // options.get("block_size", 1)
            counts = torch.ones(index.shape[2], dtype=torch.bool, device=q.device)
            if (lens := options.get("index_lens")) is not None:
                counts = torch.arange(index.shape[2], device=q.device) < lens[:, None, None]
            named = ((index[..., None] == block) & counts[..., None]).any(2)  # [B, Hkv or 1, C]
            trace.read[-1] = named if trace.read[-1] is None else trace.read[-1] | named
        return attend(q, lengths, scale, **options)

    layer.prefill, layer.decode, layer.slots.attend = noted_prefill, noted_decode, noted_attend
    return trace


@torch.inference_mode()
def replay(model: nn.Module, recording: Recording, seq: int, dtype: torch.dtype) -> Tensor:
    """Logits [n + 1, V] of a sequence: after its prompt and after each step.

    The prompt attends densely, or as recorded where layers have a prefill of their own. A step's query attends to the true keys
    and values of the positions that are claimed (rotated to where the method says they stand), or, where storage is quantised,
    to the stored rows.
    """
    dense = _copy_for_replay(model, dtype)
    spec = recording.engine.spec
    stored = DTYPES.get(recording.engine.method.stored_dtype(spec)) != spec.dtype
    inv_freq = dense.get_decoder().rotary_emb.inv_freq.to(dtype)
    for layer, trace in zip(dense.get_decoder().layers, recording.layers, strict=True):
        layer.self_attn.replay = _attention_of(trace, seq, stored, inv_freq, layer.self_attn.scaling)
    text = torch.cat([recording.prompts[seq], recording.forced[seq]])
    return dense(text[None], use_cache=False).logits[0, len(recording.prompts[seq]) - 1 :]


@functools.cache
def _copy_for_replay(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    dense = copy.deepcopy(model).to(dtype)
    dense.config._attn_implementation = ATTENTION
    return dense


def _attention_of(trace: Trace, seq: int, stored: bool, inv_freq: Tensor, scale: float) -> Callable:
    """Attention of one layer over a whole text: q [Hq, N, D], k, v [Hkv, N, D] -> [Hq, N, D]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = trace.in_steps(seq)  # [n, Hkv, C]
        num_steps, num_heads, _ = held.shape
        length = q.shape[1] - num_steps
        q = q.unflatten(0, (num_heads, -1))  # [Hkv, G, N, D]
        if trace.own_prefill:
            prompt = trace.prompt_out[seq].to(q.dtype)
        else:
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = torch.einsum("hgqd,hkd->hgqk", q[:, :, :length], k[:, :length]) * scale
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            prompt = torch.einsum("hgqk,hkd->hgqd", weights, v[:, :length]).flatten(0, 1)
        if stored:
            keys, values = (trace.of_steps(name, seq).to(q.dtype) for name in "kv")  # [n, Hkv, C, D]
        else:
            heads = torch.arange(num_heads, device=q.device)[:, None]
            keys, values = (x[heads, held.clamp(0, q.shape[2] - 1)] for x in (k, v))
            keys = rotated(keys, trace.turns(seq), inv_freq)
        unused = held < 0
        for step, read in enumerate(trace.read):
            if read is not None:
                unused[step] |= ~read[seq]
        scores = torch.einsum("hgnd,nhcd->nhgc", q[:, :, length:], keys) * scale
        weights = scores.masked_fill(unused[:, :, None], -torch.inf).softmax(-1)
        # a row that nothing claims may hold NaN
        values = values.masked_fill(unused[..., None], 0)
        steps = torch.einsum("nhgc,nhcd->hgnd", weights, values).flatten(0, 1)
        return torch.cat([prompt, steps], 1)

    return attend


def rotated(x: Tensor, by: Tensor, inv_freq: Tensor) -> Tensor:
    """Rows x [..., D] turned by so many positions `by` [...], RoPE in the half-split layout."""
    angle = by[..., None] * inv_freq
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


def _replay_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    return module.replay(query[0], key[0], value[0]).transpose(0, 1)[None].contiguous(), None


# without a mask function of this name the model builds no mask
AttentionInterface.register(ATTENTION, _replay_attention)
