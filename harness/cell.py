"""Runs one cell: warm-up, then accuracy, latency and memory from the same prefills and decoded tokens, `full` beside it.

Each side (full and the method) is warmed up alone, which also gives its memory peaks; after that the two take turns, batch by
batch, so that a drifting clock hits both. A side that fails keeps its own typed row, the other goes on.
"""

import dataclasses
import functools
import gc
import hashlib
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from harness import hf, models, recurrent, store, timing, tracking
from harness.config import blank_row, choice_of, model_name
from harness.engine import Engine
from harness.recurrent import is_recurrent
from harness.report.card import print_card
from harness.report.progress import Progress
from harness.results import Row, write_atomic
from harness.samples import SampleLog
from harness.stats import compare, mean_and_stderr
from harness.step import choose_step
from kernels.check import choose
from methods.base import Budgeted, Plan
from methods.full import Full
from methods.slots import name_of
from tasks.base import FREE, Sample, breakdown

ROOT = Path(__file__).resolve().parent.parent
MIN_REPEATS = 5
MIN_DECODE_TOKENS = 128  # fewer cannot give a time per token
WARM_UP_STEPS = 8
NOISY = 3  # p95 over median of the step times above which something else had the machine
DONE = object()
# what can change a measured value; the card, W&B and the command line cannot
MEASURED_IN = ("cell", "engine", "hf", "ledger", "lm", "lm_cell", "models", "recurrent", "sliding", "step", "timing")
MEASURING_CODE = [f"harness/{name}.py" for name in MEASURED_IN]
MEASURING_CODE += ["methods/**/*.py", "kernels/**/*.py", "tasks/**/*.py", "assets/*/calibration.json", "assets/*/*.safetensors"]


class NonFinite(RuntimeError):
    """Logits turned into NaN or infinity."""


def check(cfg: DictConfig) -> Plan:
    """The method's plan of a cell, without loading weights; ValueError with one line when it cannot run."""
    conf = OmegaConf.to_object(cfg)
    config = models.read_config(conf.model)
    device = torch.device(models.pick_device(conf.model.device))
    dtype = models.pick_dtype(conf.model.dtype, device.type)
    shape = conf.shape
    limit = longest_context(config, conf.method)
    if conf.task.mode == "lm_eval":
        # prompt lengths are only known with the tokenizer: what cannot be planned for the longest possible one never can
        conf.task.check(shape)
        shape = dataclasses.replace(shape, context_len=(limit or 1 << 20) - 1, num_new_tokens=1)
    name, new = "shape.num_new_tokens", shape.num_new_tokens
    if conf.task.mode == "score":
        name, new = "task.num_scored", conf.task.num_scored
        if getattr(conf.task, "greedy", False) and not conf.compare:
            raise ValueError("task=fidelity compares with full: leave compare=true, or use task=perplexity")
    elif getattr(conf.task, "max_answer_tokens", 0) > new:
        name, new = "task.max_answer_tokens", conf.task.max_answer_tokens
    if conf.task.num_turns > 1:
        # later questions come on top, once they are known: see Side.prepare
        name, new = f"{conf.task.num_turns} turns", new + (conf.task.num_turns - 1) * conf.task.max_answer_tokens
    if limit and shape.context_len + new > limit:
        raise ValueError(
            f"shape.context_len={shape.context_len} + {name}={new} is {shape.context_len + new} tokens, the model allows "
            f"{limit}; longest here: shape.context_len={max(limit - new, 0)}"
        )
    if is_recurrent(config):
        recurrent.check(config, conf.method, shape.batch_size)
    spec_of_config = (recurrent if is_recurrent(config) else hf).spec_of_config
    spec = spec_of_config(
        config,
        batch_size=shape.batch_size,
        context_len=shape.context_len,
        max_new_tokens=new,
        dtype=dtype,
        device=device,
        tp_size=conf.model.tp_size,
    )
    plan = conf.method.plan(spec)
    choose_impls(conf, device)
    return plan


def identify(row: Row, cfg: DictConfig) -> Row:
    """Fill in what a stored row must share with this one to stand for it; known before any weights are loaded."""
    conf = OmegaConf.to_object(cfg)
    source = models.weights_source(conf.model, conf.seed)
    row.device_name = timing.device_name(torch.device(models.pick_device(conf.model.device)))
    row.versions = versions() | ({"weights": source} if source else {}) | conf.task.versions()
    row.code_hash, row.git_commit = code_hash(), git_commit()
    return row


def longest_context(config, method) -> int | None:
    """Most tokens of prompt and answers together; None without a limit."""
    # a recurrent model goes on for ever; a method that streams never lets two tokens look at each other from further away than
    # its cache is long
    return None if is_recurrent(config) or method.streams else getattr(config, "max_position_embeddings", None)


def choose_impls(conf, device: torch.device) -> tuple[str, str]:
    """Kernels and decode loop for impl and decode_impl; auto: Triton in a CUDA graph on a GPU, reference and eager on a CPU."""
    on_cuda = device.type == "cuda"
    if conf.decode_impl == "graph" and not on_cuda:
        raise ValueError(f"decode_impl=graph needs a CUDA device, the model is on {device.type}; use decode_impl=auto")
    decode_impl = ("graph" if on_cuda else "eager") if conf.decode_impl == "auto" else conf.decode_impl
    return choose(conf.impl, device), decode_impl


def run_cell(cfg: DictConfig, out_dir: Path, reproduce: str) -> Row:
    """Measure the cell, write row.json, samples.jsonl and config.yaml into out_dir, print the card, log to W&B.

    Args:
        cfg: the composed cell; reproduce: the command that gives this row again.
    Returns:
        the row; a failure inside is a status, not an exception.
    """
    out_dir = Path(out_dir)
    # a row of an earlier run in the same folder must not pass for this one's
    (out_dir / "row.json").unlink(missing_ok=True)
    conf = OmegaConf.to_object(cfg)
    free_memory()
    with Progress() as progress:
        progress.say(f"loading {model_name(conf.model)}")
        device = torch.device(models.pick_device(conf.model.device))
        timing.reset_peak(device)
        loaded = models.load(conf.model, conf.seed)
        for tensor in loaded.model.parameters():
            tensor.sum()  # weights on a CPU are memory-mapped: resident once they have been read
        peak_load = timing.peak_bytes(device)
        make_side = Side
        if conf.task.mode == "lm_eval":
            # imported late: lm-eval takes seconds
            from harness.lm_cell import LmEvalSide as make_side
        side = make_side(cfg, loaded, peak_load, reproduce)
        full, note = None, None
        if cfg.compare and side.name != "full":
            full_cfg = full_cell(cfg)
            full = make_side(full_cfg, loaded, peak_load, command_of_full(reproduce))
            if stored := store.find(full.row) if full.task.mode != "score" else None:
                full.row, note = (
                    stored,
                    f"full: reused from {store.row_path(stored.config_hash)}, {stored.started_at}",
                )
        sides = [side] if full is None or note else [full, side]
        measure(sides, progress)
        if note:
            side.row.flags.append("not_interleaved")
    baseline = side if side.name == "full" else full
    if baseline and baseline.row.accuracy is not None and baseline.row.accuracy < baseline.task.floor:
        for row in (baseline.row, side.row):
            if "baseline_broken" not in row.flags:
                row.flags.append("baseline_broken")
    if full and side.row.status == "ok" == full.row.status:
        side.compare_with(full)
        if "baseline_broken" in side.row.flags:
            side.row.verdict = None
    if models.rank():
        # all ranks measure the same, the first one reports it
        return side.row
    for finished in sides:
        finished.save(out_dir if finished is side else None)
    write_atomic(out_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    print_card(side.row, full.row if full else None, note)
    tracking.log_run(cfg, side.row, side.samples, out_dir, conf.logger)
    return side.row


def full_cell(cfg: DictConfig) -> DictConfig:
    """The cell that the method is compared with: the dense cache in the model's own dtype, all else equal."""
    full = cfg.copy()
    with open_dict(full):
        full.method = OmegaConf.structured(Full())
    full.kv_dtype = "auto"
    return full


def command_of_full(reproduce: str) -> str:
    """The command that gives full's row, from the command of the method's."""
    own = ("method=", "method.", "sparsity=", "kv_budget=", "kv_dtype=")
    return shlex.join([word for word in shlex.split(reproduce) if not word.startswith(own)] + ["method=full"])


def measure(sides: list["Side"], progress: Progress) -> None:
    """Warm up each side alone, then let them take turns batch by batch (one after the other where both caches do not fit)."""
    for side in sides:
        progress.say(f"{side.name}: warm-up")
        side.guard(side.warm_up)
    alive = [side for side in sides if side.row.status == "running"]
    groups = [alive] if fit_together(alive) else [[side] for side in alive]
    if len(groups) > 1:
        for side in alive:
            side.row.flags.append("not_interleaved")
    progress.start(sum(side.num_rounds for side in alive))
    for group in groups:
        turns = {side: side.run(group) for side in group}
        while turns:
            for side in list(turns):
                progress.advance(side.name)
                if not side.guard(next, turns[side], DONE):
                    del turns[side]
    for side in alive:
        if side.row.status == "running":
            side.guard(side.summarise)
        side.method.release()


def free_memory() -> None:
    """Layers and methods hold each other: the last cell's slots go only when cycles are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fit_together(sides: list["Side"]) -> bool:
    """Whether all sides' caches and activations fit on the device at once, judged by the peaks of their warm-ups."""
    if not sides or sides[0].device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(sides[0].device).total_memory
    weights = sides[0].row.weights_bytes
    return weights + sum(side.row.peak_prefill_bytes - weights for side in sides) < 0.9 * total


class Side:
    """One method's half of a cell: its engine, its samples and its row."""

    def __init__(self, cfg: DictConfig, loaded, peak_load: int | None, reproduce: str):
        conf = OmegaConf.to_object(cfg)
        self.method, self.task, self.shape = conf.method, conf.task, conf.shape
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.method.read_tokenizer(loaded.tokenizer, loaded.model.config.get_text_config().vocab_size)
        self.stop_ids = stop_ids(loaded.model, loaded.tokenizer)
        self.device = next(loaded.model.parameters()).device
        self.name = choice_of(cfg.method)
        self.recurrent = is_recurrent(loaded.model.config)
        self.impl, self.decode_impl = choose_impls(conf, self.device)
        self.step_impl = choose_step(loaded.model, self.decode_impl)
        self.seed = conf.seed
        self.samples: list[dict] = []
        self.traceback: str | None = None
        self.row = blank_row(cfg, reproduce)
        self.row.status = "running"
        self.row.peak_load_bytes = peak_load
        self.row.weights_bytes = hf.weight_bytes(loaded.model)
        self.row.device_name = timing.device_name(self.device)
        self.row.versions = versions() | {"weights": loaded.source} | self.task.versions()
        self.row.code_hash = code_hash()
        self.row.git_commit = git_commit()
        self.row.memory_class = "fixed_state" if self.recurrent else self.method.memory_class
        if self.recurrent and recurrent.slow_kernels(loaded.model.config):
            self.row.flags.append("slow_kernels")
        self.ttft_ms: list[float] = []
        self.prefill_ms: list[float] = []
        self.compress_ms: list[float] = []
        self.step_ms: list[float] = []
        self.num_timed = 0
        # logits of full for the forced tokens of this turn, and its own greedy continuation with theirs
        self.full_logits: Tensor | None = None
        self.greedy: tuple[Tensor, Tensor] | None = None
        self.log = SampleLog(
            store.row_path(self.row.config_hash).with_suffix(".samples.jsonl"),
            {name: getattr(self.row, name) for name in ("code_hash", "device_name", "versions")},
        )
        self.recorded: dict[str, dict] = {}

    def guard(self, step, *args) -> bool:
        """Run one step; an exception becomes the row's status. Returns whether it went well."""
        try:
            return step(*args) is not DONE
        except torch.cuda.OutOfMemoryError as err:
            self.fail(f"oom_{self.phase}", err)
        except NonFinite as err:
            self.fail("nan", err)
        except ValueError as err:
            self.fail("invalid", err)
        # whatever one side raises, the other side and the row's file must survive it
        except Exception as err:
            out_of_memory = isinstance(err, MemoryError) or "can't allocate memory" in str(err)
            self.fail(f"oom_{self.phase}" if out_of_memory else "failed", err)
        return False

    def fail(self, status: str, err: Exception) -> None:
        text = str(err) if isinstance(err, RuntimeError | ValueError) else repr(err)
        self.row.status, self.row.error = status, " ".join(text.split())[:500]
        self.traceback = traceback.format_exc()
        self.method.release()
        free_memory()

    def warm_up(self) -> None:
        """Samples, engine, one discarded prefill and a few steps, alone in memory: gives peaks and the ledger."""
        self.phase = "prefill"
        self.prepare()
        timing.reset_peak(self.device)
        engine = self.build()
        ids, lengths = pad([sample.prompt_ids for sample in self.batches[0]])
        engine.prefill(ids, lengths)
        row, spec = self.row, engine.spec
        row.peak_prefill_bytes = timing.peak_bytes(self.device)
        ledger, plan = engine.ledger(), self.method.planned
        if not self.recurrent:
            row.memory_class = self.method.stamp()
        row.kv_dtype = self.method.stored_dtype(spec)
        row.kv_full_bytes = spec.full_bytes(name_of(spec.dtype))
        row.kv_resident_bytes, row.kv_allocated_bytes = ledger.resident_bytes, ledger.allocated_bytes
        row.kv_predicted_bytes, row.kv_ledger = engine.resident_bytes, ledger.kinds
        row.kv_kept_ratio = ledger.resident_bytes / row.kv_full_bytes
        row.kv_sparsity = 1 - ledger.resident_bytes / self.method.full_bytes(spec)
        row.kv_read_bytes_per_step = engine.read_bytes
        if abs(ledger.resident_bytes - engine.resident_bytes) > 0.01 * engine.resident_bytes:
            raise RuntimeError(f"{self.name} holds {ledger.resident_bytes} bytes, it predicted {engine.resident_bytes}")
        if isinstance(self.method, Budgeted) and plan.noop:
            row.flags.append("noop")
        self.phase = "decode"
        timing.reset_peak(self.device)
        engine.decode(min(WARM_UP_STEPS, self.max_new_tokens))
        row.peak_decode_bytes = timing.peak_bytes(self.device)
        engine.check_bytes()  # a run may be shorter than the engine's own interval
        row.ceiling_gb_per_s = timing.copy_bandwidth(self.device) / 1e9
        bytes_per_step = hf.weight_bytes_read(self.model, self.shape.batch_size) + engine.read_bytes
        row.bound_ms_per_step = bytes_per_step / (row.ceiling_gb_per_s * 1e9) * 1000
        row.decode_impl, row.step_impl, row.kernel_impl = self.decode_impl, self.step_impl, self.impl
        del engine
        self.method.release()
        free_memory()

    def prepare(self) -> None:
        """Draw the samples and group them into batches; the last batch is filled up with earlier ones, unscored."""
        drawn = self.task.samples(self.tokenizer, self.shape.context_len, self.seed)
        size = self.shape.batch_size
        filled = drawn + [drawn[i % len(drawn)] for i in range(-len(drawn) % size)]
        self.num_drawn = len(drawn)
        self.batches = [filled[i : i + size] for i in range(0, len(filled), size)]
        self.num_rounds = max(len(self.batches), self.shape.repeats)
        self.recall(drawn)
        longest_script = max(len(sample.script()[0]) for sample in drawn)
        answer = 0 if self.task.mode == "score" else max(self.shape.num_new_tokens, *(s.max_answer_tokens for s in drawn))
        self.max_new_tokens = longest_script + answer
        limit = longest_context(self.model.config, self.method)
        over = max(len(sample.prompt_ids) + len(sample.script()[0]) for sample in drawn) + answer - (limit or math.inf)
        if over > 0:
            raise ValueError(
                f"shape.context_len={self.shape.context_len} and the later turns are {over} tokens more than the model allows; "
                f"longest here: shape.context_len={max(self.shape.context_len - over, 0)}"
            )

    def recall(self, drawn: list[Sample]) -> None:
        """Samples that an earlier run of this cell has finished."""
        logged = self.log.read()
        known = [sample for sample in drawn if logged.get(sample.id, {}).get("prompt_sha") == sample.meta.get("prompt_sha")]
        self.recorded = {sample.id: logged[sample.id] for sample in known if sample.id in logged}

    def is_recorded(self, turn: int) -> bool:
        """Whether every sample of a batch is in the log."""
        return turn < len(self.batches) and all(sample.id in self.recorded for sample in self.batches[turn])

    def build(self) -> Engine:
        return recurrent.engine_class(self.model.config)(
            self.model,
            self.method,
            batch_size=self.shape.batch_size,
            # a hidden question counts: hidden and visible rows of one sparsity then hold the same bytes
            max_prompt_len=self.shape.context_len,
            max_new_tokens=self.max_new_tokens,
            impl=self.impl,
            decode_impl=self.decode_impl,
            step_impl=self.step_impl,
            prefill_chunk=self.shape.prefill_chunk,
        )

    def run(self, group: list["Side"]) -> Iterator[None]:
        """One batch per turn. group[0] is the full side that took its turn just before (or this side itself).

        Batches whose samples an earlier run has logged are taken from there, except the first, which are timed.
        """
        self.phase = "prefill"
        engine = self.build()
        # scoring compares logits, so all sides must be in the same batch
        together = group if self.task.mode == "score" else [self]
        for turn in range(self.num_rounds):
            if turn >= self.shape.repeats and all(side.is_recorded(turn) for side in together):
                self.resume(turn)
            else:
                self.one_round(engine, turn, group[0])
            yield

    def resume(self, turn: int) -> None:
        """A batch's samples from the log."""
        for number in self.fresh(turn):
            self.samples.append(self.recorded[self.batches[turn][number].id])
            self.row.num_resumed = (self.row.num_resumed or 0) + 1

    def fresh(self, turn: int) -> range:
        """Which of a batch's samples count: neither repeats nor those that fill up the last batch."""
        size = self.shape.batch_size
        return range(max(0, min(size, self.num_drawn - turn * size)))

    def keep(self, line: dict) -> None:
        """A finished sample into the row and, at once, into the log."""
        line |= {"status": "ok"}
        self.samples.append(line)
        if self.recorded.get(line["id"]) != line:
            self.log.append(line)

    def one_round(self, engine: Engine, turn: int, reference: "Side") -> None:
        batch = self.batches[turn % len(self.batches)]
        timed = turn < self.shape.repeats
        self.phase = "prefill"
        engine.compress_clock.total_ms()
        clock = timing.Clock(self.device)
        ids, lengths = pad([sample.prompt_ids for sample in batch])
        ids = ids.to(self.device)
        prefill_ms = None
        if turn and len(self.batches) == 1 and self.task.mode != "score" and engine.can_rewind():
            engine.rewind()  # the only batch is in the cache: the decode is timed again, without paying for its prefill
        else:
            clock.mark()
            engine.prefill(ids, lengths)
            clock.mark()
            prefill_ms = clock.durations_ms()[0]
            self.prefilled_tokens = sum(lengths)
            self.compress_ms.append(engine.compress_clock.total_ms())
        self.phase = "decode"
        steps = timing.Clock(self.device)
        fresh = self.fresh(turn)
        fed, waited = set(), 0.0  # steps that are fed and not decoded; the time of those before the first answer
        if self.task.mode == "score":
            forced, forced_lens = pad([sample.forced_ids for sample in batch])
            greedy = getattr(self.task, "greedy", False) and turn < len(self.batches)
            start = engine.snapshot() if greedy else None
            logprobs, logits = engine.score(forced, steps, keep_logits=True)
            if turn < len(self.batches):
                fidelity = self.fidelity(logits, reference, forced_lens)
                if greedy:
                    fidelity = self.add_acceptance(fidelity, engine, start, reference, forced.shape[1])
                self.keep_scored(batch[: len(fresh)], logprobs, forced_lens, fidelity)
        else:
            script, _ = pad([sample.script()[0] for sample in batch], FREE)
            # a timed answer is no shorter than one that is only scored
            num_tokens = max(timed * self.shape.num_new_tokens, *(sample.max_answer_tokens for sample in batch))
            tokens = engine.decode(script.shape[1] + num_tokens, steps, script)
            if turn < len(self.batches) and self.task.mode == "generate":
                self.keep_answers(batch[: len(fresh)], tokens[: len(fresh)].tolist())
            fed = set((script != FREE).any(0).nonzero().flatten().tolist())
            waited = sum(steps.durations_ms()[: max(len(sample.forced_ids) for sample in batch)])
        if not engine.finite():
            raise NonFinite(f"{self.name}: the logits are not finite after decoding")
        if timed:
            # a question that is fed after compression delays the first token of the answer
            if prefill_ms is not None:
                self.ttft_ms.append(prefill_ms + waited)
                self.prefill_ms.append(prefill_ms)
            self.num_timed += 1
            self.step_ms += [ms for step, ms in enumerate(steps.durations_ms()) if step not in fed]

    def fidelity(self, logits: Tensor, reference: "Side", lengths: list[int]) -> list[dict]:
        """Per sample, how near logits [B, n, V] are to full's on the same forced tokens; empty dicts where this is full."""
        self.full_logits = logits if reference is self else None
        if reference is self or reference.full_logits is None:
            return [{} for _ in lengths]
        own, full = logits.log_softmax(-1), reference.full_logits.log_softmax(-1)
        agrees = (own.argmax(-1) == full.argmax(-1)).double()
        kl = (full.exp() * (full - own)).sum(-1).double()
        # the first token is predicted by the dense prefill, whatever the cache keeps
        counted = [slice(min(1, length - 1), length) for length in lengths]
        return [
            {"top1_agreement": float(agrees[i, part].mean()), "kl_nats": float(kl[i, part].mean())}
            for i, part in enumerate(counted)
        ]

    def add_acceptance(self, found: list[dict], engine: Engine, start, reference: "Side", num_tokens: int) -> list[dict]:
        """Fidelity on full's own greedy continuation: the share of it that the method as a draft would have proposed."""
        engine.restore(start)
        if reference is self:
            tokens = engine.decode(num_tokens)
            engine.restore(start)
            self.greedy = tokens, engine.score(tokens, keep_logits=True)[1]
            return found
        if reference.greedy is None:
            return found
        tokens, full = reference.greedy
        own = engine.score(tokens, keep_logits=True)[1]
        agrees = (own.argmax(-1) == full.argmax(-1)).double()[:, min(1, num_tokens - 1) :].mean(-1)
        return [line | {"acceptance_rate": float(rate)} for line, rate in zip(found, agrees, strict=True)]

    def keep_scored(self, batch: list[Sample], logprobs: Tensor, lengths: list[int], fidelity: list[dict]) -> None:
        for sample, line, length, near in zip(batch, logprobs.tolist(), lengths, fidelity, strict=False):
            if not all(math.isfinite(value) for value in line[:length]):
                raise NonFinite(f"{self.name}: a log-probability is not finite")
            loss = {"nll_nats": -sum(line[:length]) / length, "num_tokens": length}
            self.keep({"id": sample.id} | loss | near | sample.meta)

    def keep_answers(self, batch: list[Sample], tokens: list[list[int]]) -> None:
        for sample, line in zip(batch, tokens, strict=True):
            turns = []
            for turn, start in zip(sample.turns, sample.script()[1], strict=True):
                answer = line[start : start + turn.max_answer_tokens]
                length = next((i for i, token in enumerate(answer) if token in self.stop_ids), len(answer))
                output = self.tokenizer.decode(answer[:length])
                said = {"answers": turn.answers, "output": output, "score": self.task.score(turn, output), "output_len": length}
                if parts := self.task.parts(turn, output):
                    said["parts"] = parts
                turns.append(said)
            scores = [said["score"] for said in turns]
            groups = breakdown(sample, scores) + [part for said in turns for part in said.get("parts", {}).items()]
            if len(turns) > 1:
                # one turn lies flat in the line; several stand in a list, with their means beside it
                mean_len = statistics.fmean(said["output_len"] for said in turns)
                said = {"score": statistics.fmean(scores), "output_len": mean_len, "turns": turns}
            self.keep({"id": sample.id} | said | {"by": [list(group) for group in groups]} | sample.meta)

    def summarise(self) -> None:
        """Samples and times into the row."""
        row, batch_size = self.row, self.shape.batch_size
        row.ttft_ms = statistics.median(self.ttft_ms)
        row.compress_ms = statistics.median(self.compress_ms)
        row.prefill_tokens_per_s = self.prefilled_tokens / statistics.median(self.prefill_ms) * 1000
        row.num_prefills, row.num_repeats = len(self.ttft_ms), self.num_timed
        row.tpot_ms_p50, row.tpot_ms_p95 = percentile(self.step_ms, 0.5), percentile(self.step_ms, 0.95)
        row.decode_tokens_per_s = batch_size * 1000 / statistics.fmean(self.step_ms)
        row.bound_ratio = row.tpot_ms_p50 / row.bound_ms_per_step
        row.achieved_gb_per_s = row.ceiling_gb_per_s / row.bound_ratio
        if len(self.step_ms) / row.num_repeats < MIN_DECODE_TOKENS:
            row.flags.append("short_decode")
        if row.num_prefills < MIN_REPEATS:
            row.flags.append("few_prefills")
        if row.tpot_ms_p95 > NOISY * row.tpot_ms_p50:
            row.flags.append("noisy")
        self.summarise_samples()
        row.method_facts = self.method.stored_facts() | self.method.facts()
        row.flags += [flag for flag in self.method.flags() if flag not in row.flags]
        if row.method_facts.get("calibration_weights", row.versions["weights"]) != row.versions["weights"]:
            row.flags.append("foreign_calibration")
        row.status = "ok"

    def summarise_samples(self) -> None:
        """Accuracy, perplexity and fidelity into the row."""
        row = self.row
        column = lambda name: [line[name] for line in self.samples if line.get(name) is not None]  # noqa: E731
        if self.samples:
            row.num_samples, row.num_resumed = len(self.samples), row.num_resumed or 0
        if scores := column("score"):
            row.accuracy, row.accuracy_stderr = mean_and_stderr(scores)
        by_group: dict[str, list[float]] = {}
        for name, score in (pair for line in self.samples for pair in line.get("by", ())):
            by_group.setdefault(name, []).append(score)
        row.accuracy_by = {name: statistics.fmean(by_group[name]) for name in sorted(by_group)}
        if losses := column("nll_nats"):
            counts = column("num_tokens")
            row.perplexity = math.exp(sum(map(math.prod, zip(losses, counts, strict=True))) / sum(counts))
        for name, key in (
            ("output_len_mean", "output_len"),
            *((name, name) for name in ("top1_agreement", "kl_nats", "acceptance_rate")),
        ):
            if values := column(key):
                setattr(row, name, statistics.fmean(values))

    def compare_with(self, full: "Side") -> None:
        """Paired statistics against full's samples into the row; a reused full row has them in its log."""
        theirs = full.samples or list(full.log.read().values())
        shas = {line["id"]: line.get("prompt_sha") for line in theirs}
        own = [line for line in self.samples if shas.get(line["id"], ()) == line.get("prompt_sha")]
        row = self.row
        scores, full_scores = (
            {line["id"]: line["score"] for line in lines if line.get("score") is not None} for lines in (own, theirs)
        )
        if found := compare(scores, full_scores, self.seed):
            row.accuracy_diff, row.accuracy_diff_low, row.accuracy_diff_high = found.diff, found.low, found.high
            row.num_pairs, row.verdict = found.num_pairs, found.verdict
        lengths = {line["id"]: line["output_len"] for line in theirs if line.get("output_len") is not None}
        changes = [line["output_len"] - lengths[line["id"]] for line in own if line["id"] in lengths]
        if changes:
            row.output_len_diff = statistics.fmean(changes)

    def save(self, out_dir: Path | None) -> None:
        """Row and samples into out_dir, and finished rows into the store."""
        lines = "".join(json.dumps(sample) + "\n" for sample in self.samples)
        files = [] if out_dir is None else [(out_dir / "samples.jsonl", lines), (out_dir / "row.json", self.row.to_json())]
        if self.row.status == "ok":
            # its samples are in the log beside it already
            files.append((store.row_path(self.row.config_hash), self.row.to_json()))
        for path, text in files:
            try:
                write_atomic(path, text)
            except OSError as err:
                # without its own folder there is no row; the store is only a convenience
                if path.parent != store.STORE:
                    raise
                print(f"warning: {path} cannot be written ({err}): full will be measured again", file=sys.stderr)
        if self.traceback and out_dir:
            write_atomic(out_dir / "traceback.txt", self.traceback)


def pad(lines: list[list[int]], value: int = 0) -> tuple[Tensor, list[int]]:
    """Right-padded [B, T] and the lengths."""
    lengths = [len(line) for line in lines]
    width = max(lengths)
    return torch.tensor([line + [value] * (width - len(line)) for line in lines], dtype=torch.long), lengths


def stop_ids(model, tokenizer) -> set[int]:
    """All ids that end an answer: chat models name more of them in their generation config than the tokenizer does."""
    named = model.generation_config.eos_token_id
    named = set(named if isinstance(named, list) else [named])
    # a config that does not know the tokenizer's own, as of random weights, names bytes of text
    return (named if tokenizer.eos_token_id in named else {tokenizer.eos_token_id}) - {None}


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


@functools.cache
def code_hash() -> str:
    """12 hex digits over the source of everything that can change a measured value."""
    digest = hashlib.sha256()
    for pattern in MEASURING_CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def git_commit() -> str | None:
    """Commit of the checkout, with + when files differ from it; None outside git."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit[:12] + ("+" if changed else "")


def versions() -> dict[str, str]:
    """Versions that can change a number."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": version("transformers")}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "triton": version("triton")}
    return found
