"""How many sequences fit: the largest batch that really allocates, prefills and decodes, with the method and with full.

    python -m harness.capacity model=llama3-8b-shape method=sparda sparsity=0.8 shape.context_len=32768
    python -m harness.capacity --limit-bytes 50000000 model=dummy method=sparda sparsity=0.8

The search starts at the predicted batch and tries real ones around it. Memory that runs out is an answer, not an error. With
--limit-bytes a GPU's allocator is capped; on a CPU, which would swap, weights and cache are counted against the limit.
The last line of stdout is the result as JSON.
"""

import argparse
import json
import sys

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness import cell, hf, models
from harness.config import CONF, ConfigError, choice_of, preflight
from harness.engine import Engine
from harness.step import choose_step

DECODE_STEPS = 2


class Search:
    """Largest batch of one method on one loaded model."""

    def __init__(self, cfg, model, limit_bytes: int | None):
        conf = OmegaConf.to_object(cfg)
        self.make_method = lambda: OmegaConf.to_object(cfg).method
        self.model, self.shape = model, conf.shape
        self.device = next(model.parameters()).device
        self.impl, self.decode_impl = cell.choose_impls(conf, self.device)
        self.step_impl = choose_step(model, self.decode_impl)
        self.weights = hf.weight_bytes(model)
        self.limit = limit_bytes
        self.tried: dict[int, bool] = {}

    def predicted(self) -> int:
        """Batch that the plan alone would allow, activations left out."""
        sizes = dict(context_len=self.shape.context_len, max_new_tokens=self.shape.num_new_tokens, impl=self.impl)
        plan = self.make_method().plan(hf.make_spec(self.model, batch_size=1, **sizes))
        per_sequence = plan.resident_bytes * plan.num_slots / plan.kept
        room = self.limit or torch.cuda.get_device_properties(self.device).total_memory
        return max(1, int((room - self.weights) / per_sequence))

    def fits(self, batch_size: int) -> bool:
        """Allocate, prefill one sequence (prefill takes one at a time), decode the batch; False when memory runs out."""
        if batch_size not in self.tried:
            try:
                self.tried[batch_size] = self._run(batch_size)
            except torch.OutOfMemoryError:
                self.tried[batch_size] = False
            # the exception is gone by now, and with it the frames that kept tensors alive
            cell.free_memory()
            print(f"batch {batch_size}: {'fits' if self.tried[batch_size] else 'out of memory'}", file=sys.stderr)
        return self.tried[batch_size]

    def _run(self, batch_size: int) -> bool:
        method = self.make_method()
        try:
            engine = Engine(
                self.model,
                method,
                batch_size=batch_size,
                max_prompt_len=self.shape.context_len,
                max_new_tokens=self.shape.num_new_tokens,
                impl=self.impl,
                decode_impl=self.decode_impl,
                step_impl=self.step_impl,
                prefill_chunk=self.shape.prefill_chunk,
            )
            prompt = torch.zeros(self.shape.context_len, dtype=torch.long)
            engine.prefill_one(0, prompt)
            # the other sequences stand at their first token: the same slots are held, and only valid ones are written
            engine.seen.fill_(1)
            engine.seen[0] = self.shape.context_len
            engine.steps_left = DECODE_STEPS
            engine.decode(DECODE_STEPS)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                return True
            return self.limit is None or self.weights + engine.ledger().allocated_bytes <= self.limit
        finally:
            method.release()

    def largest(self) -> int:
        """Largest batch that fits, 0 when not even one does: doubling or halving from the prediction, then bisection."""
        low, high = 0, self.predicted()
        while self.fits(high):
            low, high = high, high * 2
        while high - low > 1:
            # near the prediction first: activations take little of a large device
            middle = max(low + 1, high * 15 // 16) if low == 0 else (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.capacity", description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-bytes", type=int)
    args, overrides = parser.parse_known_args(argv)
    try:
        preflight([*overrides, "shape.batch_size=1"])
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
    result = {"model": conf.model.name, "context_len": conf.shape.context_len, "limit_bytes": args.limit_bytes}
    cells = {choice_of(cfg.method): cfg}
    if cfg.compare:
        cells["full"] = cell.full_cell(cfg)
    for name, own in cells.items():
        result[f"{name}_batch"] = Search(own, loaded.model, args.limit_bytes).largest()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
