"""Trains the small optional parts of methods: the model stays frozen, full attention is the teacher.

    python -m harness.train_heads model=smollm2-135m-32k method=sparda shape.context_len=1024,4096 task.num_samples=64
    python -m harness.train_heads --steps 200 model=dummy method=sparda shape=smoke

Arguments are those of run.py; several values of shape.context_len or task.haystack (default for niah: text,facts) are trained
on together. Samples come from seeds that run.py does not use unless asked; every fourth is held out, and the held-out recall of
the trained part stands beside that of the untrained one. Nothing is written when training does not help. The file lies where
the method looks for it (harness/assets.py). The last line of stdout is a summary as JSON.
"""

import argparse
import copy
import json
import shlex
import sys
from dataclasses import dataclass

import torch
from omegaconf import OmegaConf
from torch import Tensor

from harness import assets, hf, models
from harness.calibrate import SPARSITIES, attention_to, cells_of, deep_layers, fingerprint, kept_by, mean, rest_of
from harness.config import ConfigError, choice_of
from harness.probe import look_into
from kernels.check import choose
from kernels.column_sums import column_sums
from methods.base import Spec
from methods.scoring import SelectorMLP, fused_scores
from methods.sparda import SparDA
from tasks.base import Sample

SEED_OFFSET = 1_000_000  # training never sees what run.py draws with its usual seeds
HELD_OUT = 4  # every fourth sample
LEARNING_RATE = 3e-3
CHECK_EVERY = 25


@dataclass
class Lesson:
    """One sample for the SparDA selector: mass [P, Hkv, T] as prefill gives it, and what deep layers need [T], summing to 1."""

    mass: Tensor
    need: Tensor


def train_sparda(
    method: SparDA, loaded, samples: list[tuple[Spec, Sample]], steps: int
) -> tuple[str, dict, SelectorMLP | None]:
    """The selector MLP: its scores shall rank keys as the attention of deep layers at the answer does.

    Returns:
        file name, summary, and the trained part (None when the held-out recall did not rise).
    """
    lessons = [lesson for spec, sample in samples if (lesson := sparda_lesson(method, loaded, spec, sample)) is not None]
    if len(lessons) < HELD_OUT:
        raise ConfigError(f"{len(lessons)} of {len(samples)} samples need any token of their prompt: use more or longer ones")
    train = [lesson for i, lesson in enumerate(lessons) if i % HELD_OUT]
    held_out = lessons[::HELD_OUT]
    device = lessons[0].mass.device
    mlp = SelectorMLP(len(method.predictors), lessons[0].mass.shape[1], method.pool).to(device)

    def fused(lesson: Lesson) -> Tensor:
        return fused_scores(lesson.mass, method.head_reduce, method.fuse, method.pool, method.segment)

    def held_out_recall() -> dict[str, float]:
        with torch.no_grad():
            scores = [mlp(fused(lesson), lesson.mass).cpu() for lesson in held_out]
        kept = {s: [kept_by(line, s, method) for line in scores] for s in SPARSITIES}
        return {
            str(s): mean(
                None if mask is None else float(lesson.need.cpu()[mask].sum())
                for mask, lesson in zip(masks, held_out, strict=True)
            )
            for s, masks in kept.items()
        }

    def total(recall: dict[str, float]) -> float:
        return mean(recall.values()) or 0.0

    before = best = held_out_recall()
    best_state = None
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        lesson = train[step % len(train)]
        log_scores = fused(lesson).clamp(min=1e-9).log() + mlp.correction(lesson.mass)
        loss = -(lesson.need * log_scores.log_softmax(-1)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mlp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            now = held_out_recall()
            print(
                f"step {step + 1}: loss {loss.item():.3f} nats, held-out recall {total(now):.4f}", file=sys.stderr, flush=True
            )
            if total(now) > total(best):
                best, best_state = now, copy.deepcopy(mlp.state_dict())
    summary = {"samples": len(lessons), "recall_pool": before, "recall_mlp": best, "facts": method.selector_facts()}
    if best_state is None:
        return "sparda_mlp.safetensors", summary, None
    mlp.load_state_dict(best_state)
    return "sparda_mlp.safetensors", summary, mlp


def sparda_lesson(method: SparDA, loaded, spec: Spec, sample: Sample) -> Lesson | None:
    """What predictor layers see of a prompt and what deep layers need of it; None where they need nothing."""
    rest = rest_of(sample, loaded.tokenizer)
    if not rest:
        raise ConfigError("this task has no answers that need the prompt: use task=niah or task=perplexity")
    length = len(sample.prompt_ids)
    queries = length if method.observe == "all" else min(method.observe, length)
    deep, mass, need = deep_layers(spec.num_layers), [], []

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer_idx in method.predictors:
            sums = column_sums(q[:, :, :length], k[:, :, :length], spec.scale, queries, method.head_reduce, spec.impl)
            mass.append(sums[0] / queries)
        if layer_idx in deep:
            need.append(attention_to(q[0, :, length:], k[0], spec.scale)[..., :length].amax((0, 1)))

    look_into(loaded.model, torch.tensor(sample.prompt_ids + rest), spec.scale, look)
    # clones, because what inference mode made cannot be trained on
    needed = torch.stack(need).amax(0).clone()
    needed[: method.num_sinks], needed[length - method.window :] = 0, 0
    total = needed.sum()
    return Lesson(torch.stack(mass).clone(), needed / total) if total > 0 else None


# method -> its trainer; another trained part is one more function
TRAINERS = {"sparda": train_sparda}


def train(overrides: list[str], steps: int) -> dict:
    """Compose, train, write; the summary. ConfigError or ValueError of one line for a mistake."""
    cells = cells_of(overrides)
    confs = [OmegaConf.to_object(cfg) for cfg in cells]
    names = {choice_of(cfg.method) for cfg in cells}
    if len(names) > 1 or len({repr(conf.model) for conf in confs}) > 1:
        raise ConfigError("one model and one method at a time")
    name = names.pop()
    if name not in TRAINERS:
        raise ConfigError(f"method={name} has no part to train; valid: {', '.join(TRAINERS)}")
    conf = confs[0]
    loaded = models.load(conf.model, conf.seed)
    device = next(loaded.model.parameters()).device
    samples = []
    for own in confs:
        spec = hf.make_spec(
            loaded.model,
            batch_size=1,
            context_len=own.shape.context_len,
            max_new_tokens=1,
            impl=choose(own.impl, device),
        )
        conf.method.predictors = conf.method.layers_for(spec)
        drawn = own.task.samples(loaded.tokenizer, own.shape.context_len, own.seed + SEED_OFFSET)
        samples += [(spec, sample) for sample in drawn]
    file, summary, part = TRAINERS[name](conf.method, loaded, samples, steps)
    summary = {"method": name, "model": conf.model.name, **summary, "file": None}
    if part is None:
        print("note: training did not raise the held-out recall: nothing written", file=sys.stderr)
        return summary
    target = assets.to_write(conf.model.name, conf.model.path, file)
    made = {"reproduce": shlex.join(["python", "-m", "harness.train_heads", "--steps", str(steps), *overrides])}
    made |= {"weights": loaded.source, "fingerprint": fingerprint(loaded.model), "torch": torch.__version__}
    part.save(target, summary["facts"] | made)
    return summary | {"file": str(target)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.train_heads", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="samples seen, one after the other (default 1000)")
    args, overrides = parser.parse_known_args(argv)
    try:
        if args.steps < 1:
            raise ConfigError(f"--steps {args.steps} must be at least 1")
        summary = train(overrides, args.steps)
    except (ValueError, OSError) as err:
        print(f"error: {' '.join(str(err).split())}", file=sys.stderr)
        return 2
    print("held-out recall of what deep layers need")
    for sparsity, pool in summary["recall_pool"].items():
        print(f"  sparsity {sparsity}: pool {pool}, mlp {summary['recall_mlp'][sparsity]}")
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
