"""Which KV heads need 8 bits: the error of attention's output when a head is stored in 4, on running text.

    python -m harness.sensitivity model=smollm2-135m-32k kv_budget=0.4 shape.context_len=2048 --out head_bits.json
    python run.py method=int4 method.head_bits=head_bits.json

Each prompt is prefilled as usual. In every layer the last 128 queries then attend twice: to K and V as they are, and to what
int4 stores of them, older blocks in 4 bits and the newest exact, as a decoded token meets them. The output's relative error
is a head's sensitivity; the most sensitive heads get 8 bits, as many as kv_budget (a share of the bf16 cache) pays for.
The last line of stdout is what was written, as JSON.
"""

import argparse
import json
import sys
from dataclasses import dataclass

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from harness import cell, hf, models
from harness.config import CONF, ConfigError, model_name, preflight
from harness.engine import Engine
from harness.results import write_atomic
from kernels.quantize import BLOCK, allocate, dequantize, quantize
from methods.base import KVLayer, Method, Plan, Spec
from methods.slots import format_of
from tasks.perplexity import Perplexity


@dataclass
class Probe(Method):
    """Keeps nothing; its layers note the error of each prompt."""

    def plan(self, spec: Spec) -> Plan:
        format_of("int4", spec.head_dim)
        return self.plan_slots(spec, kept=1, grows=True)

    def make_layer(self, layer_idx: int) -> KVLayer:
        return ProbeLayer(self, layer_idx)


class ProbeLayer(KVLayer):
    def __init__(self, method: Probe, layer_idx: int):
        super().__init__(method, layer_idx)
        self.errors: list[Tensor] = []

    def keep(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> None:
        self.errors.append(output_error(q, k, v, self.method.spec.scale, self.method.spec.impl))


def output_error(q: Tensor, k: Tensor, v: Tensor, scale: float, impl: str = "reference") -> Tensor:
    """Relative RMS error of the last BLOCK queries' output at 4 bits, per KV head: [Hkv] fp32.

    Args:
        q: [1, Hq, T, D]; k, v: [1, Hkv, T, D]; T at least 2 BLOCK. What comes after the last whole block is left out.
    """
    length = k.shape[2] // BLOCK * BLOCK
    old = length - BLOCK
    q, k, v = q[0, :, old:length], k[0, :, :length], v[0, :, :length]
    kv = allocate(format_of("int4", k.shape[2]), 1, len(k), old, k.shape[2], torch.float16, k.device)
    quantize(kv, 0, 0, k[None, :, :old], v[None, :, :old], impl)
    stored = (x[0] for x in dequantize(kv, torch.tensor([old], device=k.device)))
    own = [torch.cat([rows, x[:, old:].float()], 1) for rows, x in zip(stored, (k, v), strict=True)]
    future = torch.ones(BLOCK, length, dtype=torch.bool, device=k.device).triu(old + 1)
    errors = []
    # a head at a time: scores of all of them would be large
    for head, queries in enumerate(q.view(len(k), -1, BLOCK, q.shape[2]).float()):
        exact, coded = (
            (queries @ keys[head].float().T * scale).masked_fill(future, -torch.inf).softmax(-1) @ values[head].float()
            for keys, values in ((k, v), own)
        )
        errors.append((coded - exact).norm() / exact.norm())
    return torch.stack(errors)


def measure(model: nn.Module, prompts: list[list[int]], impl: str = "reference") -> Tensor:
    """Mean of output_error over prompts of one length, [L, Hkv] on the CPU."""
    length = len(prompts[0])
    if length < 2 * BLOCK:
        raise ValueError(f"shape.context_len={length} holds no sealed and no newest block: at least {2 * BLOCK} tokens")
    engine = Engine(model, Probe(), batch_size=1, max_prompt_len=length, max_new_tokens=1, impl=impl)
    for prompt in prompts:
        engine.prefill(torch.tensor([prompt]))
    return torch.stack([torch.stack(layer.errors).mean(0) for layer in engine.method.layers]).cpu()


def head_bits(errors: Tensor, spec: Spec, kv_budget: float) -> list[list[int]]:
    """8 for the heads of largest error [L, Hkv], as many as kv_budget x the bf16 full cache's bytes of `spec` pay for, else 4.

    Raises:
        ValueError: 4 bits everywhere are more than the budget.
    """

    def held(layer: tuple[int, ...]) -> int:
        format = format_of("int4", spec.head_dim, head_bits=layer)
        return sum(format.held_bytes(spec.batch_size, spec.num_kv_heads, spec.context_len, spec.head_dim).values())

    lowest = (4,) * spec.num_kv_heads
    least, bf16 = spec.num_layers * held(lowest), spec.full_bytes("bf16")
    # the slack keeps a budget that is a round share from losing a head to binary rounding
    spare = int(kv_budget * bf16 + 1e-6) - least
    if spare < 0:
        raise ValueError(
            f"kv_budget={kv_budget:g} is less than 4 bits everywhere, 16-bit tail included; smallest here: "
            f"{least / bf16 + 5e-4:.3f}"
        )
    step = held((8, *lowest[1:])) - held(lowest)
    num = min(errors.numel(), spare // step) if step else errors.numel()
    bits = torch.full_like(errors, 4, dtype=torch.long)
    bits.view(-1)[errors.flatten().argsort(descending=True, stable=True)[:num]] = 8
    return bits.tolist()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.sensitivity", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="head_bits.json")
    parser.add_argument("--texts", type=int, default=2, help="prompts of shape.context_len tokens")
    args, overrides = parser.parse_known_args(argv)
    try:
        # kv_budget is ours here: no method reads it
        preflight(["method=int4", *(word for word in overrides if not word.startswith("kv_budget="))])
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("config", ["method=int4", *overrides])
        conf = OmegaConf.to_object(cfg)
        if conf.kv_budget is None:
            raise ConfigError("give the share of the bf16 cache that all heads may take, as in kv_budget=0.4")
        loaded = models.load(conf.model, conf.seed)
        impl, _ = cell.choose_impls(conf, next(loaded.model.parameters()).device)
        shape = conf.shape
        samples = Perplexity(num_samples=args.texts, num_scored=1).samples(loaded.tokenizer, shape.context_len, conf.seed)
        sizes = dict(context_len=shape.context_len, max_new_tokens=shape.num_new_tokens, impl=impl)
        spec = hf.make_spec(loaded.model, batch_size=shape.batch_size, **sizes)
        lowest = torch.zeros(spec.num_layers, spec.num_kv_heads)
        head_bits(lowest, spec, conf.kv_budget)  # a budget that is too small is an error before the work
        errors = measure(loaded.model, [sample.prompt_ids for sample in samples], impl)
        bits = head_bits(errors, spec, conf.kv_budget)
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    result = {
        "model": model_name(conf.model),
        "context_len": shape.context_len,
        "num_texts": args.texts,
        "seed": conf.seed,
        "kv_budget": conf.kv_budget,
        "bits": bits,
        "errors": [[round(error, 5) for error in layer] for layer in errors.tolist()],
    }
    write_atomic(args.out, json.dumps(result))
    ranked = errors.flatten().argsort(descending=True)[:5].tolist()
    worst = ", ".join(f"layer {i // spec.num_kv_heads} head {i % spec.num_kv_heads}: {errors.flatten()[i]:.1%}" for i in ranked)
    num = sum(layer.count(8) for layer in bits)
    print(f"{num} of {errors.numel()} KV heads get 8 bits; error of the output at 4 bits, largest: {worst}")
    print(f"python run.py method=int4 method.head_bits={args.out}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
