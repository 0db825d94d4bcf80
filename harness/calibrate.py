"""Which layers can choose the KV that all others need, measured on this model: one json and one picture.

    python -m harness.calibrate model=smollm2-135m-32k shape.context_len=1024,2048
    python -m harness.calibrate model.path=<folder> task=niah task.haystack=facts task.num_samples=6
    python -m harness.calibrate model=dummy shape=smoke method.pool=7        method.*: sparda's own scoring, as in run.py

Full attention over every sample and its true answer. A prompt key is needed when some head of a deep layer (the second half)
gives it at least NEEDED of its attention at some token of the answer; sinks and the recent window are kept anyway and do not
count. For each layer: recall, the share of that attention which falls on what the layer's own top-k would keep, per haystack,
context length and sparsity; the share of needed tokens kept; the IoU of its top-k with the deep layers' top-k; which share
of 128-blocks holds 95 % and 99 % of the attention mass (the rest could be skipped); and per KV head the error of the output at
4 bits (kv_sensitivity; `python -m harness.sensitivity` turns it into bits under a budget).

predict_layers: the layer of best mean recall over all of that, and a second one if it adds at least GAIN; among layers that
come within GAIN of the best the shallowest, because layers up to the deepest predictor wait dense. Several values of
task.haystack (default for niah: text,facts) or shape.context_len are measured together, and the layers must serve them all.
Written where method.predict_layers=auto reads it (harness/assets.py). The last line of stdout is a summary as JSON.
"""

import hashlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from harness import assets, hf, models
from harness.cell import git_commit, versions
from harness.config import ConfigError, choice_of, compose_cells, model_name
from harness.probe import look_into
from harness.results import write_atomic
from harness.sensitivity import output_error
from kernels.check import choose
from kernels.column_sums import column_sums
from kernels.select import select
from methods.base import Spec
from methods.calibration import shape_of
from methods.scoring import fused_scores
from methods.slots import BLOCK as KV_BLOCK
from methods.slots import GROUPS
from methods.sparda import SparDA
from tasks.base import Sample

FILE = "calibration.json"
NEEDED = 0.1
GAIN = 0.01
MOST_LAYERS = 2
SPARSITIES = (0.5, 0.7, 0.8, 0.9)
IOU_SPARSITY = 0.8
BLOCK = 128
BLOCK_MASSES = (0.95, 0.99)
SEED_OFFSET = 1_000_000  # calibration never sees what run.py draws with its usual seeds
SETTINGS = ("observe", "pool", "head_reduce", "fuse", "segment", "num_sinks", "window")
CRITERION = (
    f"at most {MOST_LAYERS} layers, greedily, by mean attention-weighted recall over haystacks, context lengths and "
    f"sparsities {SPARSITIES}; a further layer must add {GAIN}, the shallowest within {GAIN} of the best wins"
)


@dataclass
class Seen:
    """One sample in every layer, T prompt keys: scores as sparda pools them [L, T], need [L, T], shares of blocks [L, 2].

    errors: of each KV head's output at 4 bits (harness.sensitivity), [L, Hkv]; None where T holds no sealed block.
    """

    mass: Tensor
    scores: Tensor
    need: Tensor
    blocks: Tensor
    errors: Tensor | None
    answer: tuple[int, int] | None  # first and one past the last prompt token of the answer


def observe(model: nn.Module, spec: Spec, knobs: SparDA, prompt: list[int], rest: list[int]) -> Seen:
    """Dense forward over a prompt and the tokens that truly follow it; what each layer's attention says."""
    length = len(prompt)
    queries = length if knobs.observe == "all" else min(knobs.observe, length)
    # int4 seals blocks in groups that some head widths lack
    sealed = length >= 2 * KV_BLOCK and spec.head_dim % GROUPS[-1] == 0
    mass, scores, need, blocks, errors = [], [], [], [], []

    def look(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        before = q[:, :, :length], k[:, :, :length]
        own = column_sums(*before, spec.scale, queries, knobs.head_reduce, spec.impl)[0] / queries  # [Hkv, T]
        mass.append(own.amax(0).cpu())
        scores.append(fused_scores(own[None], knobs.head_reduce, knobs.fuse, knobs.pool, knobs.segment).cpu())
        need.append(attention_to(q[0, :, length:], k[0], spec.scale)[..., :length].amax((0, 1)).cpu())
        blocks.append(block_shares(*(x[0] for x in before), spec.scale))
        if sealed:
            errors.append(output_error(*before, v[:, :, :length], spec.scale, spec.impl).cpu())

    look_into(model, torch.tensor(prompt + rest), spec.scale, look)
    errors = torch.stack(errors) if sealed else None
    return Seen(torch.stack(mass), torch.stack(scores), torch.stack(need), torch.tensor(blocks), errors, None)


def attention_to(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal attention of the last N queries q [Hq, N, D] to all keys k [Hkv, T, D]: [Hq, N, T] fp32."""
    num_queries, length = q.shape[1], k.shape[1]
    logits = q.unflatten(0, (len(k), -1)).float() @ k[:, None].float().mT * scale
    positions = torch.arange(length, device=k.device)
    future = positions > positions[length - num_queries :, None]
    return logits.masked_fill(future, -torch.inf).softmax(-1).flatten(0, 1)


def block_shares(q: Tensor, k: Tensor, scale: float) -> list[float]:
    """Share of a layer's causal blocks that holds BLOCK_MASSES of each block row's attention; q [Hq, T, D], k [Hkv, T, D]."""
    used, total = [0] * len(BLOCK_MASSES), 0
    for start in range(0, q.shape[1], BLOCK):
        end = min(start + BLOCK, q.shape[1])
        weights = attention_to(q[:, start:end], k[:, :end], scale).mean(1)  # [Hq, end]
        rows = nn.functional.pad(weights, (0, -end % BLOCK)).unflatten(1, (-1, BLOCK)).sum(-1)  # [Hq, blocks]
        reached = rows.sort(dim=1, descending=True).values.cumsum(1)
        for place, mass in enumerate(BLOCK_MASSES):
            used[place] += int((reached < mass).sum()) + len(rows)
        total += rows.numel()
    return [min(1.0, count / total) for count in used]


def deep_layers(num_layers: int) -> list[int]:
    """Layers whose needs count."""
    return list(range(num_layers // 2, num_layers))


def kept_by(scores: Tensor, sparsity: float, knobs: SparDA) -> Tensor | None:
    """Mask [T] of what sparda keeps by these scores [T]; None where the forced tokens alone fill the budget."""
    kept = int((1 - sparsity) * len(scores) + 1e-6)
    if kept <= knobs.num_sinks + knobs.window:
        return None
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[select(scores, kept, knobs.num_sinks, knobs.window).long()] = True
    return mask


def needed_by_deep(seen: Seen, knobs: SparDA) -> Tensor:
    """Most attention that a head of a deep layer gives each key while it answers, [T]; 0 below NEEDED and where kept anyway."""
    need = seen.need[deep_layers(len(seen.need))].amax(0)
    need[: knobs.num_sinks] = 0
    need[len(need) - knobs.window :] = 0
    return need.where(need >= NEEDED, torch.zeros(()))


def recall(seen: Seen, layers: list[int], sparsity: float, knobs: SparDA, weighted: bool = True) -> float | None:
    """Share of the needed attention (or of the needed tokens) that these layers would keep; None where nothing is needed."""
    need = needed_by_deep(seen, knobs)
    scores = seen.scores[layers].amax(0) if knobs.fuse == "max" else seen.scores[layers].mean(0)
    mask = kept_by(scores, sparsity, knobs)
    if mask is None or not need.any():
        return None
    need = need if weighted else (need > 0).float()
    return float(need[mask].sum() / need.sum())


def iou(seen: Seen, layer: int, knobs: SparDA) -> float | None:
    """Intersection over union of what a layer and the deep layers together would choose of the prompt."""
    own = kept_by(seen.scores[layer], IOU_SPARSITY, knobs)
    deep = kept_by(seen.scores[deep_layers(len(seen.scores))].amax(0), IOU_SPARSITY, knobs)
    if own is None:
        return None
    # what everyone keeps would make strangers look alike
    own, deep = (mask[knobs.num_sinks : len(mask) - knobs.window] for mask in (own, deep))
    return float((own & deep).sum() / (own | deep).sum())


def mean(values) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


def choose_layers(groups: list[list[Seen]], knobs: SparDA) -> list[dict]:
    """Greedy choice, step by step: [{layers, recall}]. Every group of samples (haystack and length) counts alike."""

    def value(layers: list[int]) -> float | None:
        return mean(mean(recall(seen, layers, s, knobs) for seen in group for s in SPARSITIES) for group in groups)

    steps: list[dict] = []
    num_layers = len(groups[0][0].scores)
    while len(steps) < min(MOST_LAYERS, num_layers):
        chosen = steps[-1]["layers"] if steps else []
        candidates = {layer: value(sorted([*chosen, layer])) for layer in range(num_layers) if layer not in chosen}
        if any(found is None for found in candidates.values()):
            raise ConfigError(
                "no prompt token is needed by any deep layer here: use more samples or a longer shape.context_len"
            )
        best = max(candidates.values())
        if steps and best < steps[-1]["recall"] + GAIN:
            break
        layer = min(layer for layer, found in candidates.items() if found >= best - GAIN)
        if steps and candidates[layer] < steps[-1]["recall"] + GAIN:
            layer = max(candidates, key=candidates.get)
        steps.append({"layers": sorted([*chosen, layer]), "recall": candidates[layer]})
    return steps


def fingerprint(model: nn.Module) -> str:
    """12 hex digits of the weights: names, shapes and 64 values of each, as bf16, so that every dtype and device agrees."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        flat = tensor.detach().flatten()
        picked = flat[torch.linspace(0, len(flat) - 1, min(64, len(flat)), dtype=torch.float64).long().to(flat.device)]
        digest.update(
            f"{name}{tuple(tensor.shape)}".encode() + picked.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
        )
    return digest.hexdigest()[:12]


def rest_of(sample: Sample, tokenizer) -> list[int]:
    """Tokens that truly follow the prompt: a hidden question, a text that goes on, the answer."""
    answer = tokenizer.encode(f" {sample.answers[0]}", add_special_tokens=False) if sample.answers else []
    return [*sample.forced_ids, *answer]


def find_answer(sample: Sample, tokenizer) -> tuple[int, int] | None:
    """Where the prompt holds the answer."""
    for text in [form for answer in sample.answers[:1] for form in (f" {answer}", answer)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(len(sample.prompt_ids) - len(ids), -1, -1):
            if sample.prompt_ids[start : start + len(ids)] == ids:
                return start, start + len(ids)
    return None


def layer_rows(group: list[Seen], knobs: SparDA) -> list[dict]:
    """What the json says of each layer in one group."""

    def over(measure: Callable, *args) -> float | None:
        return mean(measure(seen, *args) for seen in group)

    return [
        {
            "layer": layer,
            "recall": {str(s): over(recall, [layer], s, knobs) for s in SPARSITIES},
            "tokens_kept": {str(s): over(recall, [layer], s, knobs, False) for s in SPARSITIES},
            "iou": over(iou, layer, knobs),
            "blocks": {f"{m:g}": mean(float(seen.blocks[layer, i]) for seen in group) for i, m in enumerate(BLOCK_MASSES)},
        }
        for layer in range(len(group[0].scores))
    ]


def draw(groups: dict[str, Seen], path: Path) -> bool:
    """Heat map of one sample per group: layers down, prompt tokens across, brightest where the last queries look; the answer is
    marked in red below each. False where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return False
    width, cell, margin, gap = 1024, 10, 60, 48
    num_layers = len(next(iter(groups.values())).mass)
    picture = Image.new("RGB", (width + margin + 16, len(groups) * (num_layers * cell + gap) + 8), "white")
    pen = ImageDraw.Draw(picture)
    for row, (title, seen) in enumerate(groups.items()):
        top = row * (num_layers * cell + gap) + 24
        length = seen.mass.shape[1]
        # the best of the tokens that share a pixel, from 1e-4 (dark) to 1 (bright) of a query's attention
        columns = nn.functional.adaptive_max_pool1d(seen.mass[None].float(), min(width, length))[0]
        light = (columns.clamp(min=1e-4).log10() / 4 + 1).clamp(0, 1)
        ramp = torch.stack([light**0.6, light**1.5, 0.35 + 0.3 * light - 0.6 * light**4], -1).clamp(0, 1)
        pixels = (ramp * 255).byte().numpy()
        heat = Image.fromarray(pixels).resize((width, num_layers * cell), Image.Resampling.NEAREST)
        picture.paste(heat, (margin, top))
        pen.text(
            (margin, top - 16), f"{title}: attention of the last queries, by layer and prompt token (0 to {length})", "black"
        )
        for layer in range(0, num_layers, max(1, num_layers // 6)):
            pen.text((4, top + layer * cell - 1), f"layer {layer}", "black")
        if seen.answer:
            left, right = (margin + place * width // length for place in seen.answer)
            bottom = top + num_layers * cell
            pen.rectangle([left, bottom + 1, max(right, left + 2), bottom + 7], "red")
            pen.text((left, bottom + 8), "answer", "red")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, optimize=True)
    return True


def cells_of(overrides: list[str]) -> list:
    """The cells to measure: those of the overrides, with both haystacks of niah where none is chosen."""
    if not any(line.lstrip("+").startswith("task.haystack=") for line in overrides):
        cells = compose_cells(overrides)
        if not all(choice_of(cfg.task) == "niah" for cfg in cells):
            return cells
        if any(cfg.task.num_facts > 1 for cfg in cells):
            return cells
        overrides = [*overrides, "task.haystack=text,facts"]
    return compose_cells(overrides)


def calibrate(overrides: list[str]) -> dict:
    """Measure, choose, write; the summary. ConfigError or ValueError of one line for a mistake."""
    cells = cells_of(overrides)
    confs = [OmegaConf.to_object(cfg) for cfg in cells]
    if len({repr(conf.model) for conf in confs}) > 1:
        raise ConfigError("one model at a time: give a single model=...")
    if len({choice_of(cfg.method) for cfg in cells} | {"sparda"}) > 1:
        raise ConfigError(
            "only method=sparda is calibrated here; its knobs (method.pool, method.observe, ...) say how keys score"
        )
    conf, knobs = confs[0], confs[0].method
    loaded = models.load(conf.model, conf.seed)
    device = next(loaded.model.parameters()).device
    groups: dict[str, list[Seen]] = {}
    runs: list[dict] = []
    for cfg, own in zip(cells, confs, strict=True):
        task, length = own.task, own.shape.context_len
        spec = hf.make_spec(loaded.model, batch_size=1, context_len=length, max_new_tokens=1, impl=choose(own.impl, device))
        if length <= knobs.num_sinks + knobs.window + 1:
            raise ConfigError(f"shape.context_len={length} is no longer than what sparda keeps anyway: use a longer one")
        if length > loaded.max_context:
            raise ConfigError(f"shape.context_len={length} is more than the {loaded.max_context} tokens that the model allows")
        title = " ".join([choice_of(cfg.task), *([task.haystack] if hasattr(task, "haystack") else []), str(length)])
        group = groups.setdefault(title, [])
        for sample in task.samples(loaded.tokenizer, length, own.seed + SEED_OFFSET):
            rest = rest_of(sample, loaded.tokenizer)
            if not rest:
                raise ConfigError(
                    f"task={choice_of(cfg.task)} has no answers that need the prompt: use task=niah or task=perplexity"
                )
            group.append(observe(loaded.model, spec, knobs, sample.prompt_ids, rest))
            group[-1].answer = find_answer(sample, loaded.tokenizer)
            print(f"{title}: {len(group)} of {task.num_samples}", file=sys.stderr, flush=True)
        runs.append(
            {
                "seed": own.seed + SEED_OFFSET,
                "task": OmegaConf.to_container(cfg.task, resolve=True) | {"name": choice_of(cfg.task)},
                "context_len": length,
                "num_samples": len(group),
                "num_needed": mean(float((needed_by_deep(seen, knobs) > 0).sum()) for seen in group),
                "layers": layer_rows(group, knobs),
            }
        )
    steps = choose_layers(list(groups.values()), knobs)
    layers = steps[-1]["layers"]
    own_file = (conf.model.name, conf.model.path, FILE)
    found = {
        "model": model_name(conf.model),
        "weights": loaded.source,
        "fingerprint": fingerprint(loaded.model),
        "shape": shape_of(spec),
        "sparda": {
            "predict_layers": layers,
            "predictor_depth": round((layers[-1] + 1) / spec.num_layers, 3),
            "recall": steps[-1]["recall"],
            "steps": steps,
            "recall_by_group": {
                title: {str(s): mean(recall(seen, layers, s, knobs) for seen in group) for s in SPARSITIES}
                for title, group in groups.items()
            },
            "criterion": CRITERION,
            "settings": {name: getattr(knobs, name) for name in SETTINGS},
        },
        "deep_layers": deep_layers(spec.num_layers),
        "runs": runs,
        "kv_sensitivity": sensitivity([seen for group in groups.values() for seen in group]),
        "versions": versions(),
        "git_commit": git_commit(),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "reproduce": shlex.join(["python", "-m", "harness.calibrate", *overrides]),
    }
    old = assets.ROOT / assets.find(*own_file)
    target = assets.to_write(*own_file)
    write_atomic(target, json.dumps(keep_other_parts(found, old), indent=1, allow_nan=False) + "\n")
    picture = target.with_suffix(".png")
    if not draw({title: group[0] for title, group in groups.items()}, picture):
        print("note: no picture, Pillow is not installed: pip install pillow", file=sys.stderr)
        picture = None
    print_report(found)
    return {
        "calibration": str(target),
        "picture": picture and str(picture),
        "predict_layers": layers,
        "recall": steps[-1]["recall"],
    }


def sensitivity(samples: list[Seen]) -> list[list[float]] | None:
    """Mean relative error of each KV head's output at 4 bits, [L][Hkv]; None where no sample is long enough."""
    errors = [seen.errors for seen in samples if seen.errors is not None]
    return [[round(error, 5) for error in layer] for layer in torch.stack(errors).mean(0).tolist()] if errors else None


def keep_other_parts(found: dict, old: Path) -> dict:
    """What other programs measured on the same weights stays in the file."""
    try:
        before = json.loads(old.read_text())
    except (OSError, ValueError):
        return found
    if before.get("fingerprint") != found["fingerprint"]:
        return found
    return before | {key: value for key, value in found.items() if value is not None}


def print_report(found: dict) -> None:
    """One line per layer: recall at 0.8 in each group."""
    titles = [f"{run['task'].get('haystack', run['task']['name'])} {run['context_len']}" for run in found["runs"]]
    print("recall of what deep layers need, sparsity 0.8 (IoU of top-k with theirs)")
    print("layer  " + "  ".join(f"{title:>14}" for title in titles))
    for layer in range(found["shape"]["num_layers"]):
        rows = [run["layers"][layer] for run in found["runs"]]
        shown = [f"{show(row['recall']['0.8'])} ({show(row['iou'])})" for row in rows]
        mark = "*" if layer in found["sparda"]["predict_layers"] else " "
        print(f"{layer:>4} {mark} " + "  ".join(f"{text:>14}" for text in shown))
    chosen = found["sparda"]
    depth = f"{chosen['predictor_depth']:.0%} of the layers wait dense"
    print(f"predict_layers={chosen['predict_layers']}, recall {chosen['recall']:.3f}; {depth}")


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        print(json.dumps(calibrate(argv)))
    except (ValueError, OSError) as err:
        print(f"error: {' '.join(str(err).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
