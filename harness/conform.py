"""Does a cache method do what it says? One table of checks for any method, a user's own too, on tiny random models.

    python -m harness.conform method=window                         one method, as run.py would configure it
    python -m harness.conform method=sparda sparsity=0.5 kv_dtype=int8 method.predict_layers=[1]
    python -m harness.conform method=all                            every method in methods/

    from harness import conform
    results = conform.check(lambda: Mine(sparsity=0.8))             # a Method subclass that lives anywhere

A method states what it is and is checked against that: Budgeted or not, memory_class, flags(), a field `num_sinks` when so many
first tokens never leave, KVLayer.positions when heads or layers differ, KVLayer.rotated_at when stored keys are turned again.
A check that has nothing to look at says why. The exit code is 1 when one fails.

The docstring of a check says what it protects from and, as repository#number, a public report of a tool that had the fault.
tests/conformance/broken.py holds a broken method for every check.
"""

import dataclasses
import functools
import gc
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from harness import hf
from harness.config import CONF, ConfigError, options, preflight, register
from harness.engine import Engine
from harness.ledger import HEADROOM, UNDECLARED, WORKSPACE, Ledger
from harness.masked_dense import Recording, record, replay, rotated
from harness.models import pick_device
from harness.step import choose_step
from harness.step_watch import HostWatch, StepWatch
from kernels.check import choose
from kernels.quantize.api import MAX_INT8, ROUND, UNIT
from methods.base import Budgeted, Method, Spec
from methods.slots import DTYPES, name_of

VOCAB = 300
KEYS = ("method", "sparsity", "kv_budget", "kv_dtype")
# the smallest of these that a method can be planned for is used; a few steps behind each lies a multiple of 128
LAYERS = (3, 4, 6, 8, 12, 16, 24, 32)
LENGTHS = (92, 248, 376, 760, 1528)
STEPS, SHORT_STEPS = 40, 24
LONG_STEPS, LEDGER_EVERY = 200, 64
WATCHED_STEPS = 9
# how much worse than the same forward in the model's dtype a step may be; both are compared with fp64
SLACK = 16


class Fault(Exception):
    """The method does not do what it says; one line of what was seen."""


class NotApplicable(Exception):
    """The check has nothing to look at in this method; the reason."""


@dataclass(frozen=True)
class Result:
    """One line of the table. outcome: pass, fail or not applicable; seen: what was measured, or the reason."""

    check: str
    outcome: str
    seen: str


class Subject:
    """A method under test, the smallest model and prompt that it can be planned for, and what several checks look at."""

    def __init__(self, make: Callable[[], Method], device: str | torch.device | None = None):
        self.make = make
        self.device = torch.device(pick_device("auto") if device is None else device)
        self.impl = choose("auto", self.device)
        on_cuda = self.device.type == "cuda"
        self.head_dim = 64 if on_cuda else 32
        # Triton's kernels of quantised caches want a 16-bit model
        plain = self.method().kv_dtype in ("auto", *DTYPES)
        self.dtype = torch.bfloat16 if on_cuda and not plain else torch.float32
        self.num_layers, self.context_len = self._smallest()
        self.kept = self.method().plan(self.spec()).kept
        self.kv_dtype = self.method().stored_dtype(self.spec())
        self.format = self.method().formats(self.spec())[-1].name  # int4 may be stored as int4_token

    def _smallest(self) -> tuple[int, int]:
        """Layers and context length: the first that the knobs allow and whose budget drops something, else the first allowed.

        Raises ValueError, the method's own last refusal, when none are allowed.
        """
        refusal, covered = None, None
        for self.num_layers in LAYERS:
            for self.context_len in LENGTHS:
                size = self.num_layers, self.context_len
                try:
                    plan = self.method().plan(self.spec())
                except ValueError as err:
                    refusal = err
                    continue
                if not (plan.noop and isinstance(self.make(), Budgeted)):
                    return size
                covered = covered or size
        if covered is None:
            raise refusal
        return covered

    def method(self, **knobs) -> Method:
        """A fresh instance; knobs differ from those under test."""
        return dataclasses.replace(self.make(), **knobs)

    def spec(self, batch_size: int = 1, new: int = STEPS) -> Spec:
        config = _config(self.num_layers, 6, 2, self.head_dim)
        sizes = dict(batch_size=batch_size, context_len=self.context_len, max_new_tokens=new)
        return hf.spec_of_config(config, dtype=self.dtype, device=self.device, impl=self.impl, **sizes)

    def model(self, num_q_heads: int = 6, num_kv_heads: int = 2) -> LlamaForCausalLM:
        return _model(self.num_layers, num_q_heads, num_kv_heads, self.head_dim, self.device, self.dtype)

    def engine(self, batch_size: int = 1, new: int = STEPS, model=None, knobs: dict | None = None, **options) -> Engine:
        """An engine with a fresh method; options as Engine's."""
        sizes = dict(batch_size=batch_size, max_prompt_len=self.context_len, max_new_tokens=new)
        return Engine(model or self.model(), self.method(**(knobs or {})), impl=self.impl, **sizes, **options)

    def tokens(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def record(self, lengths: list[int], steps: int = STEPS, **engine) -> Recording:
        """Random prompts of these lengths through the method and `steps` random tokens after them."""
        prompts = [self.tokens(length, seed=number) for number, length in enumerate(lengths)]
        return record(self.engine(len(lengths), steps, **engine), prompts, self.tokens(len(lengths), steps, seed=99))

    @functools.cached_property
    def full_prompt(self) -> Recording:
        """Two prompts that the budget does not cover."""
        return self.record([self.context_len, max(self.kept, self.context_len * 2 // 3)])

    @functools.cached_property
    def short_prompt(self) -> Recording:
        """A prompt five tokens shorter than what is kept, so that the steps after it fill the budget and go beyond."""
        return self.record([max(2, self.kept - 5)], SHORT_STEPS)

    @functools.cached_property
    def one_token(self) -> Recording:
        return self.record([1], SHORT_STEPS)

    @functools.cached_property
    def watched_steps(self) -> list[StepWatch]:
        """Steps of a ragged batch, in which short prompts fill their slots."""
        lengths = [self.context_len, max(1, self.kept - 6), 1]
        engine = self.engine(len(lengths))
        engine.prefill(self.tokens(len(lengths), self.context_len), lengths)
        engine.decode(2)
        watches = []
        for _ in range(WATCHED_STEPS):
            watch = StepWatch()
            # decode() itself may look at the tokens, a step may not
            with HostWatch(watch), watch:
                engine._step()
            watches.append(watch)
        return watches

    @functools.cached_property
    def long_run(self) -> "LongRun":
        return LongRun(self)

    @functools.cached_property
    def drops(self) -> bool:
        """Whether any layer claims fewer tokens than it has seen."""
        return any(bool(((held >= 0).sum(-1) < seen[:, None]).any()) for _, _, seen, held in held_steps(self.full_prompt))

    @property
    def bytes_read(self) -> float:
        """Bytes of the slots that attention reads for the first token after two full prompts, as seen."""
        spec = self.full_prompt.engine.spec
        heads = 0
        for trace in self.full_prompt.layers:
            # both prompts as long as the first
            filled = trace.held[1][0] >= 0
            heads += int((filled if trace.read[0] is None else filled & trace.read[0][0]).sum())
        return 2 * heads * spec.slot_bytes(self.kv_dtype) / spec.num_kv_heads

    @property
    def exact(self) -> bool:
        """Whether rows are stored as the model computes them."""
        return DTYPES.get(self.kv_dtype) == self.dtype

    def need_budget(self) -> None:
        if not isinstance(self.make(), Budgeted):
            raise NotApplicable("has no budget")

    @functools.cached_property
    def largest_sparsity(self) -> float:
        """What the refusal of an impossible sparsity names; Fault when nothing is refused or named."""
        try:
            plan = self.method(sparsity=1 - 1e-9, kv_budget=None).plan(self.spec())
        except ValueError as err:
            named = re.search(r"largest sparsity here: (0\.\d+)", str(err))
            if not named:
                raise Fault(f"the refusal names no largest sparsity: {str(err).splitlines()[0]}") from None
            sparsity = float(named[1])
        else:
            raise Fault(f"sparsity=1 is accepted and keeps {plan.kept} tokens")
        try:
            kept = self.method(sparsity=sparsity, kv_budget=None).plan(self.spec()).kept
        except ValueError as err:
            raise Fault(f"the largest sparsity that is named, {sparsity:g}, is refused too: {err}") from None
        if kept < 1:
            raise Fault(f"sparsity={sparsity:g} is accepted and keeps nothing")
        return sparsity

    @property
    def same_kv_budget(self) -> float:
        """kv_budget of about the bytes that the knobs under test allow."""
        method, spec = self.method(), self.spec()
        return min(1.0, (method.budget_bytes(spec) + 1) / spec.full_bytes("bf16"))


@functools.cache
def _config(num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> LlamaConfig:
    # weights are wide enough that attention is far from uniform: a lost token shows
    return LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=72, intermediate_size=96, num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads, head_dim=head_dim, vocab_size=VOCAB, max_position_embeddings=4096,
        initializer_range=0.125,
    )  # fmt: skip


@functools.cache
def _model(num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device, dtype) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config(num_layers, num_q_heads, num_kv_heads, head_dim))
    return model.to(device, dtype).eval().requires_grad_(False)


class LongRun:
    """Two sequences, decoded for LONG_STEPS in the end: what is held, by tokens decoded, and what grows."""

    def __init__(self, subject: Subject):
        self.engine = subject.engine(2, LONG_STEPS + 8)
        self.engine.prefill(subject.tokens(2, subject.context_len))
        self.method, self.spec, self.device = self.engine.method, self.engine.spec, subject.device
        self.ledgers: dict[int, Ledger] = {}
        self.decoded = 0
        self.step_to(0)
        self.step_to(4)

    def step_to(self, count: int) -> None:
        """Decode until `count` tokens have been decoded, and look."""
        for _ in range(self.decoded, count):
            # decode() would refuse what the checks are to describe
            self.engine._step()
        self.decoded = count
        self.ledgers[count] = self.engine.ledger()

    @functools.cached_property
    def all_ledgers(self) -> dict[int, Ledger]:
        """Ledgers by tokens decoded, up to the end."""
        gc.freeze()  # only what is made from here on is searched
        try:
            self.step_to(8)
            before, live = self.addresses(), live_bytes(self.device)
            for stop in (*range(LEDGER_EVERY, LONG_STEPS, LEDGER_EVERY), LONG_STEPS + 8):
                self.step_to(stop)
            self.grown, self.moved = live_bytes(self.device) - live, before != self.addresses()
        finally:
            gc.unfreeze()
        return self.ledgers

    def declared(self) -> list[tuple[str, Tensor]]:
        owners = (self.method, *self.method.layers)
        return [(kind, x) for owner in owners for kind, tensors in owner.tensors().items() for x in tensors]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for _, tensor in self.declared()]


def live_bytes(device: torch.device) -> int:
    """Bytes of tensors made since gc.freeze(), each storage once; on CUDA the allocator's count of all."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # type(): isinstance would ask lazy proxies for their class, and some load a library then
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor) and item.device.type == "cpu"]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if not x.is_sparse}.values())


def dense_error(recording: Recording, seq: int) -> str:
    """Compare a recording's logits with the masked dense forward; the errors in words, or Fault."""
    model = recording.engine.model
    exact = replay(model, recording, seq, torch.float64)
    dtype = recording.logits.dtype
    same = (replay(model, recording, seq, dtype) - exact).abs().max().item()
    errors = (recording.logits[:, seq] - exact).abs().amax(-1)
    limit = SLACK * max(same, torch.finfo(dtype).eps * exact.abs().max().item())
    if not bool((errors <= limit).all()):
        step = int((~(errors <= limit)).nonzero()[0])
        when = f"step {step}" if step else "the prompt"
        raise Fault(f"logits after {when} are {errors[step]:.2g} off the masked dense forward; rounding alone: {same:.1g}")
    return f"{errors.max():.1g} off fp64, rounding alone {same:.1g}"


def held_steps(recording: Recording):
    """(layer, step, seen [B], positions [B, Hkv, C]) after the prompt (step 0) and after every step."""
    lengths = torch.tensor([len(prompt) for prompt in recording.prompts])
    for number, trace in enumerate(recording.layers):
        for step, held in enumerate(trace.held):
            yield number, step, lengths + step, held.cpu()


def membership(held: Tensor, total: int) -> Tensor:
    """Which of the positions 0 .. total - 1 are in held [..., C]: [..., total] bool."""
    hit = torch.zeros(*held.shape[:-1], total + 1, dtype=torch.bool)
    return hit.scatter(-1, torch.where((held >= 0) & (held < total), held, total), True)[..., :total]


def order_and_sinks(subject: Subject) -> str:
    """After ten evictions sinks and the newest token are there, order holds, nothing evicted is back (kvpress#173, #264)."""
    recording = subject.full_prompt
    if not subject.drops:
        raise NotApplicable("keeps every token")
    method = recording.engine.method
    sinks = getattr(method, "num_sinks", 0)
    evicted, most_turns, before = 0, 0, {}
    for layer, step, seen, held in held_steps(recording):
        # an empty slot counts as the filled one before it
        last_filled = torch.where(held >= 0, torch.arange(held.shape[-1]), 0).cummax(-1).values
        filled = held.gather(-1, last_filled)
        turns = int((filled[..., 1:] < filled[..., :-1]).sum(-1).max())
        most_turns = max(most_turns, turns)
        # what overwrites the worst slot loses the order later, but nothing may come out of a prompt unsorted
        if step == 0 and turns > 1:
            raise Fault(f"layer {layer}: after the prompt positions turn back {turns} times along the slots, a ring does once")
        there = membership(held, int(seen.max()))
        if not there[..., :sinks].all():
            lost = int((~there[..., :sinks]).nonzero()[0, -1])
            raise Fault(
                f"layer {layer}: sink {lost} of {sinks} is gone {f'after {step} steps' if step else 'after the prompt'}"
            )
        if step:
            newest = seen[:, None, None].expand(*held.shape[:2], 1) - 1
            if not there.gather(-1, newest).all():
                raise Fault(f"layer {layer}: the newest token is not held after step {step}")
            back = there[..., : before[layer].shape[-1]] & ~before[layer]
            back &= torch.arange(back.shape[-1]) != newest
            if back.any():
                raise Fault(f"layer {layer}: position {int(back.nonzero()[0, -1])} was evicted, step {step} claims it again")
        before[layer] = there
        evicted = max(evicted, int((seen[:, None] - (held >= 0).sum(-1)).max()))
    if evicted < 10:
        raise NotApplicable(f"only {evicted} tokens are evicted at this budget, the check wants ten")
    order = "in order" if most_turns <= 1 else "in order after the prompt, later any slot is overwritten"
    return f"{evicted} evicted, {order}, {f'{sinks} sinks stay' if sinks else 'no sinks declared'}"


def unique_positions(subject: Subject) -> str:
    """A token is held once, and none that has not come yet: cache length for position (VeloxQuant-MLX#137, keys_values#140)."""
    count = 0
    for recording in (subject.full_prompt, subject.short_prompt, subject.one_token):
        for layer, step, seen, held in held_steps(recording):
            limit = seen[:, None, None]
            if bool((held >= limit).any()) or bool((held < -1).any()):
                wrong = held[(held >= limit) | (held < -1)][0]
                raise Fault(f"layer {layer}, step {step}: a slot claims position {int(wrong)} of {int(seen.max())} tokens seen")
            ordered = held.sort(-1).values
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if twice.any():
                raise Fault(f"layer {layer}, step {step}: position {int(ordered[..., 1:][twice][0])} is claimed by two slots")
            count += held.numel()
    return f"{count} claims, each position once and seen"


def true_positions(subject: Subject) -> str:
    """A slot holds key and value of the position it claims, the key rotated as said (H2O#32, VeloxQuant-MLX#137, #171)."""
    worst = 0.0
    for recording in (subject.full_prompt, subject.short_prompt, subject.one_token):
        inv_freq = recording.engine.model.get_decoder().rotary_emb.inv_freq.double()
        for number, trace in enumerate(recording.layers):
            for seq in range(len(recording.prompts)):
                held, turn = trace.of_steps("held", seq)[1:], trace.turns(seq)  # [n, Hkv, C]
                heads = torch.arange(held.shape[1], device=held.device)[:, None]
                for name, rows in zip("kv", trace.history(seq), strict=True):
                    true = rows.double()[heads, held.clamp(0, rows.shape[1] - 1)]  # [n, Hkv, C, D]
                    bound = storage_error(subject.format, name, true, rows.double())
                    if name == "k" and trace.rotates:
                        true = rotated(true, turn, inv_freq)
                        # angles are fp32: position x 2^-24 off, at three rotations
                        angle = 3 * (held.abs() + turn.abs() + 4) * 2**-24
                        bound = storage_error(subject.format, name, true, rows.double())
                        bound = bound + true.abs().amax(-1, keepdim=True) * angle[..., None]
                    off = (trace.of_steps(name, seq).double() - true).abs() - bound
                    off = off.masked_fill((held < 0)[..., None], 0)
                    if not bool((off <= 0).all()):
                        step, head, slot = (~(off <= 0)).any(-1).nonzero()[0].tolist()
                        claim, excess = int(held[step, head, slot]), off[step, head, slot].max()
                        raise Fault(
                            f"layer {number}, head {head}, step {step + 1}: slot {slot} claims position {claim}, "
                            f"but its {name} is {excess:.2g} further from that token's than {subject.format} allows"
                        )
                    worst = max(worst, float(((off + bound) / bound.clamp(min=1e-30)).where(held[..., None] >= 0, 0).max()))
    return "equal to the bit" if worst == 0 else f"largest error {worst:.2f} of what {subject.format} allows"


def storage_error(kv_format: str, name: str, rows: Tensor, history: Tensor) -> Tensor:
    """Largest error of stored rows [..., Hkv, C, D] by the format's own step; history [Hkv, N, D] are all rows of the part.

    int8: half of the step of kernels/quantize; fp8 e4m3: 3 mantissa bits, least step 2^-9 of largest / 448; int4: half
    of range / 15, over the channel for K of int4 and over the row otherwise, and the rounding of its zero and result to fp16.
    """
    largest = rows.abs().amax(-1, keepdim=True)
    match kv_format:
        case "fp32" | "fp16" | "bf16":
            digits = {"fp32": None, "fp16": 11, "bf16": 8}[kv_format]
            return torch.zeros_like(rows) if digits is None else rows.abs() * 2.0**-digits + 2.0**-25
        case "int8":
            # the step before and after it becomes fp16, and the fp32 arithmetic of a code
            step = (largest * ((1 + ROUND) / MAX_INT8) + UNIT) * (1 + 2**-11) + UNIT / 2
            return (step / 2 + largest * 2**-21).expand_as(rows)
        case "fp8":
            return torch.maximum(rows.abs() * 2**-4, largest / 448 * 2**-10) * (1 + 2**-7) + 2**-22
        case "int4" | "int4_token" | "mixed":
            by_channel = name == "k" and kv_format != "int4_token"
            part, dim = (history, -2) if by_channel else (rows, -1)
            span = part.amax(dim, keepdim=True) - part.amin(dim, keepdim=True)
            zero = part.abs().amax(dim, keepdim=True) + 5 * span
            return (span / 30 * (1 + 2**-7) + zero * 2**-11 + 2**-22).expand_as(rows)
    raise NotApplicable(f"no error bound is known for the format {kv_format}: add it to storage_error")


def kernel_is_masked_dense(subject: Subject) -> str:
    """Logits of every step equal dense attention in fp64 over the claimed positions (flash-attention#60, SnapKV#24)."""
    seen = [dense_error(subject.full_prompt, seq) for seq in range(2)]
    return f"{STEPS} steps, {subject.num_layers} layers: {seen[0]}"


def gqa(subject: Subject) -> str:
    """Groups of 1, 3, 4 and 8 query heads: right, and KV heads are stored, never query heads (H2O#32, KVCache-Factory#49)."""
    for num_q_heads, num_kv_heads in ((4, 4), (6, 2), (8, 2), (8, 1)):
        group = num_q_heads // num_kv_heads
        model = subject.model(num_q_heads, num_kv_heads)
        again = model is not subject.model()
        recording = subject.record([subject.context_len, subject.kept], 8, model=model) if again else subject.full_prompt
        try:
            dense_error(recording, 0)
            dense_error(recording, 1)
        except Fault as fault:
            raise Fault(f"group {group}: {fault}") from None
        held = recording.layers[0].held[0]
        if held.shape[1] != num_kv_heads:
            raise Fault(f"group {group}: positions of {held.shape[1]} heads, the model has {num_kv_heads} KV heads")
        rows = {x.shape[1] for trace in recording.layers for x in (trace.k[0], trace.v[0])}
        if rows != {num_kv_heads}:
            raise Fault(f"group {group}: {max(rows)} heads are stored, the model has {num_kv_heads} KV heads")
    return "groups 1, 3, 4, 8 are masked dense; one row per KV head"


def short_prompt(subject: Subject) -> str:
    """A prompt shorter than the budget: nothing is lost until the budget is full (H2O#11, kvpress#134, #61)."""
    return nothing_is_lost(subject, subject.short_prompt)


def one_token_prompt(subject: Subject) -> str:
    """A prompt of one token is kept, and the steps after it fill the slots (kvpress#134, #61: asserts on short input)."""
    return nothing_is_lost(subject, subject.one_token)


def nothing_is_lost(subject: Subject, recording: Recording) -> str:
    """Every token takes part while fewer have come than fit, and the logits are right then and later."""
    for layer, step, seen, held in held_steps(recording):
        if step:
            # a slot given up at the end of a step took part in it
            held = recording.layers[layer].in_steps(0)[None, step - 1].cpu()
        missing = ~membership(held, int(seen.max()))
        if seen.max() <= subject.kept and missing.any():
            lost = int(missing.nonzero()[0, -1])
            raise Fault(f"layer {layer}, step {step}: position {lost} of {int(seen)} is lost although {subject.kept} fit")
    return f"prompt of {len(recording.prompts[0])}, {subject.kept} fit: {dense_error(recording, 0)}"


def smallest_budget(subject: Subject) -> str:
    """At the smallest budget that is accepted nothing remote is left to choose: no empty cache, no NaN (kvpress#264, #227)."""
    subject.need_budget()
    sparsity = subject.largest_sparsity
    engine = subject.engine(4, 8, knobs={"sparsity": sparsity, "kv_budget": None})
    kept = engine.method.planned.kept
    lengths = [min(max(1, kept + more), subject.context_len) for more in (-1, 0, 1)] + [subject.context_len]
    prompts = [subject.tokens(length, seed=number) for number, length in enumerate(lengths)]
    recording = record(engine, prompts, subject.tokens(4, 8, seed=99))
    for seq, length in enumerate(lengths):
        if not recording.logits[:, seq].isfinite().all():
            raise Fault(f"sparsity={sparsity:g} keeps {kept} of {length} tokens: logits are not finite")
        try:
            seen = dense_error(recording, seq)
        except Fault as fault:
            raise Fault(f"sparsity={sparsity:g} keeps {kept} of {length} tokens: {fault}") from None
    return f"sparsity={sparsity:g} keeps {kept} of {subject.context_len}: {seen}"


def refusal(subject: Subject) -> str:
    """A budget below the minimum is refused in one line that names the largest sparsity; that one works (kvpress#264)."""
    subject.need_budget()
    sparsity = subject.largest_sparsity
    with_more = min(sparsity + 0.01, 1 - 1e-9)
    for knobs in ({"sparsity": with_more, "kv_budget": None}, {"kv_budget": 1e-6}):
        try:
            plan = subject.method(**knobs).plan(subject.spec())
        except ValueError as err:
            if len(str(err).splitlines()) != 1:
                raise Fault(f"the refusal of {knobs} has {len(str(err).splitlines())} lines") from None
            continue
        raise Fault(f"{knobs} is accepted and keeps {plan.kept} tokens")
    return f"sparsity={sparsity:g} is the largest and works, {with_more:g} is refused"


def bytes_are_predicted(subject: Subject) -> str:
    """Bytes by kind equal the prediction to the byte, after the prompt and every 64 tokens (SnapKV#24, VeloxQuant-MLX#165)."""
    run = subject.long_run
    for tokens, ledger in run.all_ledgers.items():
        held, said = ledger.kinds, run.method.planned.ledger
        kinds = [kind for kind in held | said if kind not in (HEADROOM, WORKSPACE)]
        odd = [kind for kind in kinds if held.get(kind, 0) != said.get(kind, 0)]
        if odd:
            words = ", ".join(f"{kind} {held.get(kind, 0)} held, {said.get(kind, 0)} predicted" for kind in odd)
            raise Fault(f"after {tokens} tokens: {words}")
    return f"{run.method.planned.resident_bytes} bytes, at {', '.join(map(str, run.all_ledgers))} tokens"


def budget_is_met(subject: Subject) -> str:
    """What is held stays within the budget, and memory_class says what becomes of the rest (ThinK#5, kvpress#102)."""
    run = subject.long_run
    full = run.spec.full_bytes(subject.kv_dtype)
    held = max(ledger.resident_bytes for ledger in run.ledgers.values())
    memory_class, stamp = run.method.memory_class, run.method.stamp()
    if not isinstance(run.method, Budgeted):
        dense_dtype = subject.kv_dtype if subject.kv_dtype in DTYPES else name_of(subject.dtype)
        dense, longest = run.spec.full_bytes(dense_dtype), dataclasses.replace(run.spec, context_len=LENGTHS[-1])
        if (stamp == "freed") != (held < dense) or memory_class == "none" and held > dense:
            raise Fault(f"the row says memory_class={stamp}, but {held} bytes are held and the dense cache has {dense}")
        # a tail may outweigh a prompt as short as this, not a long one
        if memory_class != stamp and subject.method().plan(longest).resident_bytes >= longest.full_bytes(dense_dtype):
            raise Fault(f"memory_class={memory_class}, but prompts of {LENGTHS[-1]} tokens take as much as the dense cache")
        return f"no budget; the row says memory_class={stamp}: {held / dense:.3f} of the dense cache"
    if memory_class == "none":
        if "simulated" not in run.method.flags():
            raise Fault("memory_class=none with a budget: nothing is freed or saved, and flags() does not say simulated")
        return f"simulated, as flagged: {held / full:.3f} of the dense cache is held, the budget is one of slots"
    shares = []
    what = "read per step" if memory_class == "reads_less" else "held"
    for knobs in ({}, {"kv_budget": subject.same_kv_budget}):
        method = subject.method(**knobs)
        if method.kv_budget is None:
            limit = (1 - method.sparsity) * full
        else:
            limit = method.kv_budget * run.spec.full_bytes("bf16")
        if memory_class == "reads_less":
            # in the first step, which already has one token more
            limit += run.spec.batch_size * run.spec.num_layers * run.spec.slot_bytes(subject.kv_dtype)
            held = method.plan(dataclasses.replace(run.spec, max_new_tokens=1)).read_bytes
            if not knobs:
                held = max(held, subject.bytes_read)
        elif knobs:
            engine = subject.engine(2, LONG_STEPS + 8, knobs=knobs)
            engine.prefill(subject.tokens(2, subject.context_len))
            held = engine.ledger().resident_bytes
        if held > limit + 1e-3:
            raise Fault(f"{'kv_budget' if knobs else 'sparsity'} allows {limit:.0f} bytes, {held:.0f} are {what}")
        shares.append(held / limit)
    return f"{shares[0]:.3f} of the bytes that sparsity allows are {what}, {shares[1]:.3f} with kv_budget"


def nothing_undeclared(subject: Subject) -> str:
    """Every tensor that the method can reach is declared in tensors(): no forgotten dense copy (SnapKV#24, mlx-lm#1587)."""
    run = subject.long_run
    sizes = {tokens: ledger.kinds.get(UNDECLARED, 0) for tokens, ledger in run.ledgers.items()}
    if any(sizes.values()):
        raise Fault(f"undeclared bytes by tokens decoded: {sizes}")
    return ", ".join(f"{kind} {size}" for kind, size in run.ledgers[0].kinds.items())


def no_views(subject: Subject) -> str:
    """No declared tensor is a view that keeps a larger storage alive (ThinK#5: a slice of the dense cache frees nothing)."""
    declared = subject.long_run.declared()
    for kind, tensor in declared:
        size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if size != storage:
            raise Fault(f"{kind} {tuple(tensor.shape)} of {size} bytes lies in a storage of {storage}")
    return f"{len(declared)} tensors, each as large as its storage"


def no_growth(subject: Subject) -> str:
    """200 steps allocate nothing and move nothing: a graph holds addresses (keys_values#140, a window that grows)."""
    run = subject.long_run
    if run.all_ledgers and run.grown:
        raise Fault(f"{run.grown} more bytes are alive after {LONG_STEPS} steps")
    if run.moved:
        raise Fault(f"tensors lie at other addresses after {LONG_STEPS} steps: a replayed graph would write to the old ones")
    return f"{LONG_STEPS} steps: same bytes alive, same addresses"


def keep_all_is_dense(subject: Subject) -> str:
    """With sparsity 0 the logits are Hugging Face's own, and the plan says noop (H2O#11, KVCache-Factory#46)."""
    knobs = {"sparsity": 0.0, "kv_budget": None} if isinstance(subject.make(), Budgeted) else {}
    if not subject.exact:
        raise NotApplicable(f"stores {subject.kv_dtype}: its logits are not the dense ones")
    engine = subject.engine(1, 16, knobs=knobs)
    if not engine.method.planned.noop:
        raise Fault("sparsity=0 does not set Plan.noop: the row would not say that this is the full cache")
    ids, forced = subject.tokens(1, subject.context_len), subject.tokens(1, 16, seed=99)
    logits = [engine.prefill(ids)]
    for step in range(16):
        engine.score(forced[:, step : step + 1])
        logits.append(engine.logits.clone())
    with torch.no_grad():
        dense = subject.model()(torch.cat([ids, forced], 1)).logits[0, -17:]
    error = (torch.cat(logits) - dense).abs().max().item()
    limit = SLACK * torch.finfo(subject.dtype).eps * dense.abs().max().item() * subject.num_layers
    if not error <= limit:
        raise Fault(f"logits are {error:.2g} off the dense model's")
    return f"17 logits, {error:.1g} off"


def ragged_batch(subject: Subject) -> str:
    """Eight prompts of different lengths give the tokens that each gives alone; padding is nowhere (KIVI#18, kvpress#25)."""
    longest = subject.context_len
    lengths = [longest, 1, longest * 3 // 4, subject.kept, 2, longest - 1, max(1, subject.kept // 2), longest]
    ids = subject.tokens(8, longest)
    forced = subject.tokens(8, 12, seed=99)
    exact = subject.dtype == torch.float32

    def outcome(engine: Engine, prompts: Tensor, lengths: list[int], forced: Tensor) -> Tensor:
        # rounding to 16 bit depends on the batch and turns near ties round: there logits are compared
        engine.prefill(prompts, lengths)
        return engine.decode(12) if exact else engine.score(forced, keep_logits=True)[1]

    engine = subject.engine(8, 12)
    together = outcome(engine, ids, lengths, forced)
    for seq, length in enumerate(lengths):
        ids[seq, length:] = 7
    if not torch.equal(outcome(engine, ids, lengths, forced), together):
        raise Fault("other tokens in the padding change what comes out")
    single = subject.engine(1, 12)
    kept = single.method.planned.kept, engine.method.planned.kept
    if kept[0] != kept[1]:
        raise Fault(f"a prompt keeps {kept[0]} tokens alone and {kept[1]} in a batch of 8")
    limit = 0 if exact else SLACK * torch.finfo(subject.dtype).eps * together.abs().max().item()
    for seq in (0, 1, 2, 3, 6):
        length = lengths[seq]
        alone = outcome(single, ids[seq : seq + 1], [length], forced[seq : seq + 1])[0]
        differs = ((alone - together[seq]).abs() > limit).flatten(1).any(1) if not exact else alone != together[seq]
        if differs.any():
            raise Fault(f"prompt of {length}: step {int(differs.nonzero()[0])} differs between batch 1 and batch 8")
    return f"lengths {', '.join(map(str, lengths))}: 12 {'tokens' if exact else 'logits'} each"


def graph_is_eager(subject: Subject) -> str:
    """A replayed CUDA graph gives the tokens, logits and positions of eager launches (vllm#42058: launches cost)."""
    if subject.device.type != "cuda":
        raise NotApplicable("needs a CUDA device; same_ops_each_step looks for what a graph would freeze")
    ids, lengths = subject.tokens(4, subject.context_len), [subject.context_len, 1, subject.kept, subject.context_len - 1]
    results = []
    step_impl = choose_step(subject.model(), "graph")
    for decode_impl in ("eager", "graph"):
        engine = subject.engine(4, STEPS, decode_impl=decode_impl, step_impl=step_impl)
        for _ in range(2):
            engine.prefill(ids, lengths)
            tokens = engine.decode(STEPS)
        results.append((tokens, engine.logits.clone(), *(engine.positions(n).clone() for n in range(subject.num_layers))))
    names = ("tokens", "logits", *(f"positions of layer {n}" for n in range(subject.num_layers)))
    for name, eager, graph in zip(names, *results, strict=True):
        if not torch.equal(eager, graph):
            raise Fault(f"{name} differ")
    return f"{STEPS} steps over used slots, step_impl={step_impl}: equal to the bit"


def no_host_sync(subject: Subject) -> str:
    """No step makes the host wait: no item(), no nonzero, no boolean index (vllm#48786, sglang#30815: waits cost)."""
    watches = subject.watched_steps
    if waits := [wait for watch in watches for wait in watch.waits]:
        raise Fault(f"{len(waits)} in {WATCHED_STEPS} steps, the first: {waits[0]}")
    where = "ops watched"
    if subject.device.type == "cuda":
        engine = subject.engine(2)
        engine.prefill(subject.tokens(2, subject.context_len))
        engine.decode(2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                engine._step()
        except RuntimeError as err:
            raise Fault(f"CUDA: {str(err).splitlines()[0]}") from None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        where = "ops watched, and CUDA's own sync check in 8 more"
    twins = sum(watch.in_twins for watch in watches)
    return f"{WATCHED_STEPS} steps, {where}" + (f"; {twins} waits in PyTorch twins that no GPU runs" if twins else "")


def same_ops_each_step(subject: Subject) -> str:
    """Every step has the same ops, shapes and numbers: a position counted in Python freezes in a graph (VeloxQuant-MLX#137)."""
    first, *others = subject.watched_steps
    for number, watch in enumerate(others, 1):
        for was, is_ in zip(first.ops, watch.ops, strict=False):
            if was != is_:
                raise Fault(f"step {number} differs from step 0: {is_} instead of {was}")
        if len(first.ops) != len(watch.ops):
            raise Fault(f"step 0 launches {len(first.ops)} ops, step {number} {len(watch.ops)}")
    return f"{len(first.ops)} ops, alike in {WATCHED_STEPS} steps"


def second_prompt(subject: Subject) -> str:
    """A second prompt in the same engine sees nothing of the first, and a rewound one decodes again (lm-eval#2140, KIVI#18)."""
    ids = subject.tokens(1, max(2, subject.context_len * 3 // 4), seed=5)
    used, fresh = subject.engine(1), subject.engine(1)
    used.prefill(subject.tokens(1, subject.context_len))
    used.decode(20)
    results = []
    for engine in (used, fresh):
        engine.prefill(ids)
        tokens = engine.decode(16)
        results.append((tokens, *(engine.positions(number) for number in range(subject.num_layers))))
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        if not torch.equal(one, other):
            raise Fault(f"{f'positions of layer {number - 1}' if number else 'tokens'} differ from those of a fresh engine")
    same, held = "16 tokens and all positions as in a fresh engine", used.ledger().resident_bytes
    try:
        used.rewind()
    except ValueError as err:
        return f"{same}; {err}"
    used.decode(8)
    if not used.finite() or used.ledger().resident_bytes != held:
        raise Fault("after rewind() the same steps give NaN or hold other bytes")
    return f"{same}; rewound, same bytes"


def unused_slots_do_not_leak(subject: Subject) -> str:
    """What lies in slots that are not filled, NaN too, reaches no logits (kvpress#264: empty rows, NaN and no error)."""
    lengths = [max(1, subject.kept - 5), 1, subject.context_len]
    ids, forced = subject.tokens(3, subject.context_len), subject.tokens(3, 16, seed=99)
    results = []
    for poison in (False, True):
        engine = subject.engine(3)
        if poison:
            for layer in engine.method.layers:
                for tensors in layer.slots.tensors().values():
                    for tensor in tensors:
                        if tensor.is_floating_point():
                            tensor.fill_(float("nan"))
                        elif tensor.dtype == torch.uint8:  # codes
                            tensor.fill_(255)
        engine.prefill(ids, lengths)
        results.append(engine.score(forced, keep_logits=True)[1])
    if not results[1].isfinite().all():
        raise Fault(f"NaN in unused slots reaches the logits of step {int((~results[1].isfinite()).nonzero()[0, 1])}")
    if not torch.equal(*results):
        raise Fault("what lies in unused slots changes the logits")
    return "NaN in every slot before the prompt: the same 16 logits"


CHECKS: tuple[Callable[[Subject], str], ...] = (
    order_and_sinks,
    unique_positions,
    true_positions,
    kernel_is_masked_dense,
    keep_all_is_dense,
    gqa,
    ragged_batch,
    short_prompt,
    one_token_prompt,
    smallest_budget,
    refusal,
    bytes_are_predicted,
    budget_is_met,
    nothing_undeclared,
    no_views,
    no_growth,
    second_prompt,
    unused_slots_do_not_leak,
    no_host_sync,
    same_ops_each_step,
    graph_is_eager,
)


def run_check(subject: Subject, function: Callable[[Subject], str]) -> Result:
    """One line of the table; an exception of the method is a failure too."""
    try:
        return Result(function.__name__, "pass", function(subject))
    except NotApplicable as reason:
        return Result(function.__name__, "not applicable", str(reason))
    except Fault as fault:
        return Result(function.__name__, "fail", str(fault))
    except Exception as err:
        frame = traceback.extract_tb(err.__traceback__)[-1]
        what = " ".join(str(err).split()) or "no message"
        return Result(function.__name__, "fail", f"{type(err).__name__} at {Path(frame.filename).name}:{frame.lineno}: {what}")


def check(make: Callable[[], Method], device: str | None = None) -> list[Result]:
    """All checks on a method.

    Args:
        make: gives a new instance at each call: the class itself, or a function that sets knobs. Knobs are changed by
            dataclasses.replace, so they must be fields.
        device: None: a GPU where there is one.
    Raises:
        ValueError: the method cannot be planned for any of LAYERS and LENGTHS; its own last refusal.
    """
    subject = Subject(make, device)
    return [run_check(subject, function) for function in CHECKS]


def table(results: list[Result]) -> str:
    """Checks, outcomes and what was seen, in columns."""
    widths = [max(len(getattr(result, name)) for result in results) for name in ("check", "outcome")]
    return "\n".join(f"{r.check:<{widths[0]}}  {r.outcome:<{widths[1]}}  {r.seen}" for r in results)


def main(argv: list[str]) -> int:
    """Print the tables; 0 fine, 1 a check fails, 2 a mistake in the arguments."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    every = "method=all" in argv
    outcomes = []
    try:
        if not any(word.startswith("method=") for word in argv):
            raise ConfigError("give a method, as in method=window, or method=all for every one")
        if odd := next((word for word in argv if word.startswith("-")), None):
            raise ConfigError(f"unknown option {odd}: values are given without dashes, as in method=window sparsity=0.8")
        names = method_names() if every else [None]
        for name in names:
            words = [f"method={name}" if word == "method=all" else word for word in argv]
            try:
                outcomes += report(words)
            except ValueError as err:
                if not every:
                    raise
                print(f"{name}: not applicable: {err}\n")
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return int("fail" in outcomes)


def method_names() -> list[str]:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return options("method")


def report(argv: list[str]) -> list[str]:
    """Print the table of the method that these overrides configure; its outcomes. ConfigError for a mistake."""
    # the dummy model takes the place of the default one, whose weights nothing here needs
    preflight([*argv, "model=dummy"])
    for word in argv:
        if word.partition("=")[0].split(".")[0] not in KEYS:
            raise ConfigError(
                f"{word}: the checks use tiny models of their own and take only {', '.join(KEYS)} and method.<knob>"
            )
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", argv)
    subject = Subject(lambda: OmegaConf.to_object(cfg).method)
    name = next(word.partition("=")[2] for word in argv if word.startswith("method="))
    print(
        f"{name}, kv_dtype {subject.kv_dtype}, keeps {subject.kept} of {subject.context_len} tokens; random Llama of "
        f"{subject.num_layers} layers in fp32 on {subject.device}, kernels {subject.impl}"
    )
    results = [run_check(subject, function) for function in CHECKS]
    print(table(results))
    outcomes = [result.outcome for result in results]
    print(", ".join(f"{outcomes.count(word)} {word}" for word in ("pass", "fail", "not applicable")) + "\n")
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
