"""How much fits: the largest batch, or context, that really allocates, prefills and decodes, with the method and with full.

    python -m harness.capacity model=llama3-8b-shape method=sparda sparsity=0.8 shape.context_len=32768
    python -m harness.capacity --of context model=llama3-8b-shape method=sparda sparsity=0.8 shape.batch_size=4
    python -m harness.capacity --limit-bytes 50000000 model=dummy method=sparda sparsity=0.8

The search starts at the predicted size and tries real ones around it, contexts in steps of 1024 tokens. Memory that runs out
is an answer, not an error. With --limit-bytes a GPU's allocator is capped; on a CPU, which would swap, weights and cache are
counted against the limit.
The last line of stdout is the result as JSON.
"""

import argparse
import json
import sys

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness import cell, hf, models, recurrent
from harness.config import CONF, ConfigError, choice_of, preflight
from harness.step import choose_step

DECODE_STEPS = 2
# tokens between the contexts that are tried
STEP = {"batch": 1, "context": 1024}


class Search:
    """Largest batch or context of one method on one loaded model; sizes are counted in STEPs."""

    def __init__(self, cfg, model, limit_bytes: int | None, of: str = "batch"):
        conf = OmegaConf.to_object(cfg)
        self.make_method = lambda: OmegaConf.to_object(cfg).method
        self.model, self.shape, self.of = model, conf.shape, of
        self.device = next(model.parameters()).device
        self.impl, self.decode_impl = cell.choose_impls(conf, self.device)
        self.step_impl = choose_step(model, self.decode_impl)
        self.weights = hf.weight_bytes(model)
        self.limit = limit_bytes
        self.tried: dict[int, bool] = {}
        trained = getattr(model.config, "max_position_embeddings", None)
        bounded = of == "context" and trained and not recurrent.is_recurrent(model.config)
        self.most = (trained - self.shape.num_new_tokens) // STEP[of] if bounded else None

    def sizes(self, number: int) -> dict[str, int]:
        """Arguments of the engine at this size."""
        batch_size = number if self.of == "batch" else self.shape.batch_size
        context_len = self.shape.context_len if self.of == "batch" else number * STEP["context"]
        return dict(batch_size=batch_size, max_prompt_len=context_len, max_new_tokens=self.shape.num_new_tokens)

    def predicted(self) -> int:
        """Size that the plan alone would allow, activations left out."""
        one = self.sizes(1)
        spec_of = recurrent.spec_of_config if recurrent.is_recurrent(self.model.config) else hf.spec_of_config
        weight = next(self.model.parameters())
        spec = spec_of(
            self.model.config,
            batch_size=one["batch_size"],
            # a short context may be too small for the method; bytes grow in proportion
            context_len=max(one["max_prompt_len"], self.shape.context_len),
            max_new_tokens=one["max_new_tokens"],
            dtype=weight.dtype,
            device=weight.device,
        )
        plan = self.make_method().plan(spec)
        held = (plan.resident_bytes + spec.other_bytes) * plan.num_slots / plan.kept
        steps = 1 if self.of == "batch" else spec.context_len / STEP["context"]
        room = self.limit or torch.cuda.get_device_properties(self.device).total_memory
        number = max(1, int((room - self.weights) / held * steps))
        return number if self.most is None else min(number, self.most)

    def fits(self, number: int) -> bool:
        """Allocate, prefill one sequence (prefill takes one at a time), decode the batch; False when memory runs out."""
        if number not in self.tried:
            try:
                self.tried[number] = self._run(**self.sizes(number))
            except torch.OutOfMemoryError:
                self.tried[number] = False
            # the exception is gone by now, and with it the frames that kept tensors alive
            cell.free_memory()
            size = number * STEP[self.of]
            print(f"{self.of} {size}: {'fits' if self.tried[number] else 'out of memory'}", file=sys.stderr)
        return self.tried[number]

    def _run(self, **sizes: int) -> bool:
        method = self.make_method()
        try:
            engine = recurrent.engine_class(self.model.config)(
                self.model,
                method,
                **sizes,
                impl=self.impl,
                decode_impl=self.decode_impl,
                step_impl=self.step_impl,
                prefill_chunk=self.shape.prefill_chunk,
            )
            length = sizes["max_prompt_len"]
            engine.prefill_one(0, torch.zeros(length, dtype=torch.long))
            # the other sequences stand at their first token: the same slots are held, and only valid ones are written
            engine.seen.fill_(1)
            engine.seen[0] = length
            engine.steps_left = DECODE_STEPS
            engine.decode(DECODE_STEPS)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                return True
            return self.limit is None or self.weights + engine.ledger().allocated_bytes <= self.limit
        finally:
            method.release()

    def largest(self) -> int:
        """Largest size that fits, 0 when not even one step does: doubling or halving from the prediction, then bisection."""
        low, high = 0, self.predicted()
        while self.fits(high):
            if high == self.most:
                return high * STEP[self.of]
            low, high = high, high * 2 if self.most is None else min(high * 2, self.most)
        while high - low > 1:
            # near the prediction first: activations take little of a large device
            middle = max(low + 1, high * 15 // 16) if low == 0 else (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low * STEP[self.of]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.capacity", description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-bytes", type=lambda text: int(float(text)), help="such as 200e6")
    parser.add_argument("--of", choices=STEP, default="batch", help="what grows: the batch, or the context at a batch")
    args, overrides = parser.parse_known_args(argv)
    try:
        preflight([*overrides, "shape.batch_size=1"] if args.of == "batch" else overrides)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("config", overrides)
        conf = OmegaConf.to_object(cfg)
        device = torch.device(models.pick_device(conf.model.device))
        if device.type == "cpu" and args.limit_bytes is None:
            raise ConfigError("a CPU has no memory limit of its own: give --limit-bytes=<bytes>, or use a GPU")
    except ConfigError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    if device.type == "cuda" and args.limit_bytes:
        share = args.limit_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    loaded = models.load(conf.model, conf.seed)
    given = {"context_len": conf.shape.context_len} if args.of == "batch" else {"batch_size": conf.shape.batch_size}
    result = {"model": conf.model.name} | given | {"limit_bytes": args.limit_bytes}
    cells = {choice_of(cfg.method): cfg}
    if cfg.compare:
        cells["full"] = cell.full_cell(cfg)
    for name, own in cells.items():
        result[f"{name}_{args.of}"] = Search(own, loaded.model, args.limit_bytes, args.of).largest()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
