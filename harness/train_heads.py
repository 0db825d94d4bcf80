"""Trains the small optional parts of methods: the model stays frozen, full attention is the teacher.

    python -m harness.train_heads model=smollm2-135m-32k method=sparda shape.context_len=1024,4096 task.num_samples=64
    python -m harness.train_heads --steps 200 model=dummy method=sparda shape=smoke

Arguments are those of run.py; several values of shape.context_len or task.haystack (default for niah: text,facts) are trained
on together. Samples come from seeds that run.py does not use unless asked; every fourth is held out, and what the trained part
reaches on them stands beside what the untrained one does. Nothing is written when training does not help. The file lies where
the method looks for it (harness/assets.py). The last line of stdout is a summary as JSON.
"""

import argparse
import json
import shlex
import sys

import torch
from omegaconf import OmegaConf

from harness import assets, hf, models
from harness.calibrate import cells_of, fingerprint
from harness.config import ConfigError, choice_of
from harness.trainers.flash_lite import train_flash_lite
from harness.trainers.hysparse import train_hysparse
from harness.trainers.sparda import train_sparda
from kernels.check import choose

SEED_OFFSET = 2_000_000  # training never sees what run.py and harness.calibrate draw with their usual seeds

# method -> its trainer; another trained part is one more function
TRAINERS = {"sparda": train_sparda, "hysparse": train_hysparse, "flash_lite": train_flash_lite}


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
        drawn = own.task.samples(loaded.tokenizer, own.shape.context_len, own.seed + SEED_OFFSET)
        samples += [(spec, sample) for sample in drawn]
    file, summary, part = TRAINERS[name](conf.method, loaded, samples, steps)
    summary = {"method": name, "model": conf.model.name, **summary, "file": None}
    if part is None:
        print("note: training helped on no held-out sample: nothing written", file=sys.stderr)
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
    print(f"{summary['measure']}, held-out samples")
    for setting, untrained in summary["untrained"].items():
        print(f"  {setting}: untrained {untrained}, trained {summary['trained'][setting]}")
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
