"""How far the engine is from plain transformers: SDPA and a DynamicCache against `full`, the same model, prompts and batch.

    python -m harness.versus_hf model=llama3-8b-shape shape.context_len=32768 shape.batch_size=8

The two take turns. Transformers runs as its users run it: the whole batch at once, kernels launched one by one. Both must give
the same logits, or no time is shown. The last line of stdout is the result as JSON.
"""

import json
import statistics
import sys

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from transformers import DynamicCache

from harness import cell, models, timing
from harness.config import CONF, ConfigError, preflight
from harness.recurrent import engine_class
from harness.step import choose_step
from methods.full import Full

REPEATS = 3
MOST_DIFFERENT = 0.05  # norm of the difference of the prompt's logits over their norm; 16-bit rounding gives about 0.01


class Plain:
    """transformers alone, with the attention that it chooses for SDPA."""

    def __init__(self, model):
        self.model = model

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        self.cache = None  # the old one goes before the new one comes
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids)

    @torch.inference_mode()
    def decode(self, token: Tensor, num_tokens: int, clock: timing.Clock) -> None:
        clock.mark()
        for _ in range(num_tokens):
            token = self._forward(token[:, None]).argmax(-1)
            clock.mark()

    def _forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def compare(conf) -> dict:
    """Medians of both, in milliseconds."""
    loaded = models.load(conf.model, conf.seed)
    model, shape = loaded.model, conf.shape
    device = next(model.parameters()).device
    model.config._attn_implementation = "sdpa"
    impl, decode_impl = cell.choose_impls(conf, device)
    engine = engine_class(model.config)(
        model,
        Full(),
        batch_size=shape.batch_size,
        max_prompt_len=shape.context_len,
        max_new_tokens=shape.num_new_tokens,
        impl=impl,
        decode_impl=decode_impl,
        step_impl=choose_step(model, decode_impl),
    )
    plain = Plain(model)
    ids = torch.randint(0, model.config.vocab_size, (shape.batch_size, shape.context_len), device=device)
    prefill_ms, step_ms = {"kvgauge": [], "transformers": []}, {"kvgauge": [], "transformers": []}
    for turn in range(REPEATS + 1):
        logits = {}
        for name, side in (("kvgauge", engine), ("transformers", plain)):
            clock, steps = timing.Clock(device), timing.Clock(device)
            clock.mark()
            logits[name] = side.prefill(ids).float()
            clock.mark()
            if side is engine:
                engine.decode(shape.num_new_tokens, steps)
            else:
                plain.decode(logits[name].argmax(-1), shape.num_new_tokens, steps)
            # the first turn is warm-up
            if turn:
                prefill_ms[name] += clock.durations_ms()
                step_ms[name] += steps.durations_ms()
        plain.cache = None
    difference = float((logits["kvgauge"] - logits["transformers"]).norm() / logits["transformers"].norm())
    result = {"model": conf.model.name, "context_len": shape.context_len, "batch_size": shape.batch_size}
    result |= {"device_name": timing.device_name(device), "decode_impl": decode_impl, "logits_difference": difference}
    for what, times in (("prefill_ms", prefill_ms), ("tpot_ms", step_ms)):
        medians = {name: statistics.median(values) for name, values in times.items()}
        result |= {f"{what}_{name}": value for name, value in medians.items()}
        result[f"{what}_ratio"] = medians["transformers"] / medians["kvgauge"]
    return result


def main(argv: list[str]) -> int:
    try:
        preflight([*argv, "method=full"])
        with initialize_config_dir(str(CONF), version_base="1.3"):
            conf = OmegaConf.to_object(compose("config", [*argv, "method=full"]))
    except ConfigError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    result = compare(conf)
    if not result["logits_difference"] <= MOST_DIFFERENT:
        print(f"error: the logits differ by {result['logits_difference']:.1%}: no times are shown", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
