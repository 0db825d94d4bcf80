"""Runs one cell: warm-up, then accuracy, latency and memory from the same prefills and decoded tokens, `full` beside it.

Each side (full and the method) is warmed up alone, which also gives its memory peaks; after that the two take turns, batch by
batch, so that a drifting clock hits both. A side that fails keeps its own typed row, the other goes on.
"""

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

from harness import hf, models, timing, tracking
from harness.config import blank_row, choice_of, model_name
from harness.engine import Engine
from harness.ledger import WORKSPACE
from harness.report.card import print_card
from harness.report.progress import Progress
from harness.results import STORE, Row, write_atomic
from harness.step import choose_step
from kernels.check import choose
from methods.base import Budgeted
from methods.full import Full
from methods.slots import name_of
from tasks.base import Sample

ROOT = Path(__file__).resolve().parent.parent
MIN_REPEATS = 5
MIN_DECODE_TOKENS = 128  # fewer cannot give a time per token
WARM_UP_STEPS = 8
NOISY = 3  # p95 over median of the step times above which something else had the machine
DONE = object()
# what can change a measured value; the card, W&B and the command line cannot
MEASURING_CODE = [f"harness/{name}.py" for name in ("cell", "engine", "hf", "ledger", "models", "step", "timing")]
MEASURING_CODE += ["methods/**/*.py", "kernels/**/*.py", "tasks/**/*.py"]


class NonFinite(RuntimeError):
    """Logits turned into NaN or infinity."""


def check(cfg: DictConfig) -> None:
    """Plan a cell without loading weights; ValueError with one line when it cannot run."""
    conf = OmegaConf.to_object(cfg)
    config = models.read_config(conf.model)
    device = torch.device(models.pick_device(conf.model.device))
    dtype = models.pick_dtype(conf.model.dtype, device.type)
    shape = conf.shape
    limit = getattr(config, "max_position_embeddings", None)
    name, new = "shape.num_new_tokens", shape.num_new_tokens
    if conf.task.mode == "score":
        name, new = "task.num_scored", conf.task.num_scored
    elif getattr(conf.task, "max_answer_tokens", 0) > new:
        name, new = "task.max_answer_tokens", conf.task.max_answer_tokens
    if limit and shape.context_len + new > limit:
        raise ValueError(
            f"shape.context_len={shape.context_len} + {name}={new} is {shape.context_len + new} tokens, the model allows "
            f"{limit}; longest here: shape.context_len={max(limit - new, 0)}"
        )
    spec = hf.spec_of_config(
        config,
        batch_size=shape.batch_size,
        context_len=shape.context_len,
        max_new_tokens=new,
        dtype=dtype,
        device=device,
    )
    conf.method.plan(spec)
    choose_impls(conf, device)


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
        side = Side(cfg, loaded, peak_load, reproduce)
        full, note = None, None
        if cfg.compare and side.name != "full":
            full_cfg = full_cell(cfg)
            full = Side(full_cfg, loaded, peak_load, command_of_full(reproduce))
            if stored := find_row(full.row) if full.task.mode != "score" else None:
                full.row, note = (
                    stored,
                    f"full: reused from {STORE / (stored.config_hash + '.json')}, {stored.started_at}",
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
        turns = {side: side.run(group[0]) for side in group}
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
        self.device = next(loaded.model.parameters()).device
        self.name = choice_of(cfg.method)
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
        self.row.versions = versions() | {"weights": loaded.source}
        self.row.code_hash = code_hash()
        self.row.git_commit = git_commit()
        self.row.memory_class = self.method.memory_class
        self.ttft_ms: list[float] = []
        self.prefill_ms: list[float] = []
        self.compress_ms: list[float] = []
        self.step_ms: list[float] = []
        self.num_timed = 0
        self.scores: list[float] = []
        self.output_lens: list[int] = []
        self.logprobs: list[float] = []
        self.agreement: list[Tensor] = []
        self.kl: list[Tensor] = []
        self.full_logits: Tensor | None = None

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
        stored = self.method.stored_dtype(spec)
        row.kv_dtype = stored
        row.kv_full_bytes = spec.full_bytes(name_of(spec.dtype))
        row.kv_resident_bytes, row.kv_allocated_bytes = ledger.resident_bytes, ledger.allocated_bytes
        row.kv_predicted_bytes, row.kv_ledger = plan.resident_bytes, ledger.kinds
        row.kv_kept_ratio = ledger.resident_bytes / row.kv_full_bytes
        row.kv_sparsity = 1 - ledger.resident_bytes / spec.full_bytes(stored)
        row.kv_read_bytes_per_step = plan.read_bytes
        if abs(ledger.resident_bytes - plan.resident_bytes) > 0.01 * plan.resident_bytes:
            raise RuntimeError(f"{self.name} holds {ledger.resident_bytes} bytes, it predicted {plan.resident_bytes}")
        if isinstance(self.method, Budgeted):
            if plan.noop:
                row.flags.append("noop")
            elif ledger.resident_bytes > self.method.budget_bytes(spec):
                raise RuntimeError(
                    f"{self.name} holds {ledger.resident_bytes} bytes after prefill, "
                    f"its budget is {self.method.budget_bytes(spec)}"
                )
        self.phase = "decode"
        timing.reset_peak(self.device)
        engine.decode(min(WARM_UP_STEPS, self.max_new_tokens))
        row.peak_decode_bytes = timing.peak_bytes(self.device)
        if (after := engine.ledger()).allocated_bytes - after.kinds.get(WORKSPACE, 0) > ledger.allocated_bytes:
            raise RuntimeError(
                f"{self.name} grew from {ledger.allocated_bytes} to {after.allocated_bytes} bytes while it decoded"
            )
        row.ceiling_gb_per_s = timing.copy_bandwidth(self.device) / 1e9
        bytes_per_step = hf.weight_bytes_read(self.model, self.shape.batch_size) + plan.read_bytes
        row.bound_ms_per_step = bytes_per_step / (row.ceiling_gb_per_s * 1e9) * 1000
        row.decode_impl, row.step_impl, row.kernel_impl = self.decode_impl, self.step_impl, self.impl
        if stored == "int8" and self.impl != "reference":
            # the fused kernel (kernels/decode_attention_quant) is not behind Slots yet: the row must not claim its speed
            row.kernel_impl += ", int8 dequantised by torch"
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
        longest_forced = max(len(sample.forced_ids) for sample in drawn)
        answer = 0 if self.task.mode == "score" else max(self.shape.num_new_tokens, *(s.max_answer_tokens for s in drawn))
        self.max_new_tokens = longest_forced + answer

    def build(self) -> Engine:
        return Engine(
            self.model,
            self.method,
            batch_size=self.shape.batch_size,
            # a hidden question counts: hidden and visible rows of one sparsity then hold the same bytes
            max_prompt_len=self.shape.context_len,
            max_new_tokens=self.max_new_tokens,
            impl=self.impl,
            decode_impl=self.decode_impl,
            step_impl=self.step_impl,
        )

    def run(self, reference: "Side") -> Iterator[None]:
        """One batch per turn. `reference` is the full side that took its turn just before (or this side itself)."""
        self.phase = "prefill"
        engine = self.build()
        for turn in range(self.num_rounds):
            self.one_round(engine, turn, reference)
            yield

    def one_round(self, engine: Engine, turn: int, reference: "Side") -> None:
        batch = self.batches[turn % len(self.batches)]
        timed = turn < self.shape.repeats
        self.phase = "prefill"
        engine.compress_clock.total_ms()
        clock = timing.Clock(self.device)
        ids, lengths = pad([sample.prompt_ids for sample in batch])
        ids = ids.to(self.device)
        prefill_ms = None
        if turn and len(self.batches) == 1 and self.task.mode != "score":
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
        forced, forced_lens = pad([sample.forced_ids for sample in batch])
        fresh = range(turn * len(batch), min((turn + 1) * len(batch), self.num_drawn))
        if self.task.mode == "score":
            logprobs, logits = engine.score(forced, steps, keep_logits=True)
            if turn < len(self.batches):
                self.compare_logits(logits[: len(fresh)], reference)
                self.keep_scored(batch[: len(fresh)], logprobs, forced_lens)
            waited = 0.0
        else:
            num_tokens = self.shape.num_new_tokens if timed else max(sample.max_answer_tokens for sample in batch)
            tokens = engine.decode(forced.shape[1] + num_tokens, steps, forced, forced_lens)
            if turn < len(self.batches) and self.task.mode == "generate":
                self.keep_answers(batch[: len(fresh)], tokens.tolist(), forced_lens)
            waited = sum(steps.durations_ms()[: forced.shape[1]])
        if not engine.finite():
            raise NonFinite(f"{self.name}: the logits are not finite after decoding")
        if timed:
            # a question that is fed after compression delays the first token of the answer
            if prefill_ms is not None:
                self.ttft_ms.append(prefill_ms + waited)
                self.prefill_ms.append(prefill_ms)
            self.num_timed += 1
            question = 0 if self.task.mode == "score" else forced.shape[1]
            self.step_ms += steps.durations_ms()[question:]

    def compare_logits(self, logits: Tensor, reference: "Side") -> None:
        """Fidelity to full on the same forced tokens, logits [B, n, V]."""
        self.full_logits = logits if reference is self else None
        if reference is self or reference.full_logits is None:
            return
        own, full = logits.log_softmax(-1), reference.full_logits.log_softmax(-1)
        self.agreement.append((own.argmax(-1) == full.argmax(-1)).float().mean())
        self.kl.append((full.exp() * (full - own)).sum(-1).mean())

    def keep_scored(self, batch: list[Sample], logprobs: Tensor, lengths: list[int]) -> None:
        for sample, line, length in zip(batch, logprobs.tolist(), lengths, strict=False):
            if not all(math.isfinite(value) for value in line[:length]):
                raise NonFinite(f"{self.name}: a log-probability is not finite")
            self.logprobs += line[:length]
            self.samples.append({"id": sample.id, "nll_nats": -sum(line[:length]) / length, "num_tokens": length} | sample.meta)

    def keep_answers(self, batch: list[Sample], tokens: list[list[int]], forced_lens: list[int]) -> None:
        for sample, line, start in zip(batch, tokens, forced_lens, strict=False):
            answer = line[start : start + sample.max_answer_tokens]
            if self.tokenizer.eos_token_id in answer:
                answer = answer[: answer.index(self.tokenizer.eos_token_id)]
            output = self.tokenizer.decode(answer)
            score = self.task.score(sample, output)
            self.scores.append(score)
            self.output_lens.append(len(answer))
            expected = {"answers": sample.answers, "output": output, "score": score, "output_len": len(answer)}
            self.samples.append({"id": sample.id} | expected | sample.meta)

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
        if self.scores:
            row.accuracy, row.num_samples = statistics.fmean(self.scores), len(self.scores)
            row.output_len_mean = statistics.fmean(self.output_lens)
            if len(self.scores) > 1:
                row.accuracy_stderr = statistics.stdev(self.scores) / len(self.scores) ** 0.5
        if self.logprobs:
            row.perplexity = float(torch.tensor(self.logprobs, dtype=torch.float64).mean().neg().exp())
            row.num_samples = len(self.samples)
        if self.kl:
            row.top1_agreement, row.kl_nats = (
                float(torch.stack(self.agreement).mean()),
                float(torch.stack(self.kl).mean()),
            )
        row.method_facts = self.method.facts()
        row.flags += [flag for flag in self.method.flags() if flag not in row.flags]
        row.status = "ok"

    def save(self, out_dir: Path | None) -> None:
        """Row and samples into out_dir, and finished rows into the store."""
        folders = [] if out_dir is None else [(out_dir / "row.json", out_dir / "samples.jsonl")]
        if self.row.status == "ok":
            stem = STORE / self.row.config_hash
            folders.append((stem.with_suffix(".json"), stem.with_suffix(".samples.jsonl")))
        lines = "".join(json.dumps(sample) + "\n" for sample in self.samples)
        for row_file, samples_file in folders:
            try:
                write_atomic(samples_file, lines)
                write_atomic(row_file, self.row.to_json())
            except OSError as err:
                # without its own folder there is no row; the store is only a convenience
                if row_file.parent != STORE:
                    raise
                print(f"warning: {row_file} cannot be written ({err}): full will be measured again", file=sys.stderr)
        if self.traceback and out_dir:
            write_atomic(out_dir / "traceback.txt", self.traceback)


def pad(lines: list[list[int]]) -> tuple[Tensor, list[int]]:
    """Right-padded [B, T] and the lengths."""
    lengths = [len(line) for line in lines]
    width = max(lengths)
    return torch.tensor([line + [0] * (width - len(line)) for line in lines], dtype=torch.long), lengths


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def find_row(like: Row) -> Row | None:
    """The stored row of the same cell, measured by the same code on the same device and versions; None when there is none."""
    path = STORE / f"{like.config_hash}.json"
    if not path.exists():
        return None
    try:
        row = Row.read(path)
    except ValueError as err:
        print(f"note: {err}; measuring full again", file=sys.stderr)
        return None
    same = all(getattr(row, name) == getattr(like, name) for name in ("code_hash", "device_name", "versions"))
    return row if same and row.status == "ok" else None


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
