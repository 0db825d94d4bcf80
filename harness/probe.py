"""Look into every layer of a dense forward: what calibration and training of heads measure with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from harness import hf
from kernels.prefill_attention import prefill_attention

# layer_idx, q [1, Hq, T, D], k and v [1, Hkv, T, D] after RoPE
Look = Callable[[int, Tensor, Tensor, Tensor], None]


class Probe:
    """Stands where a KVLayer would: attends densely, shows what it sees, keeps nothing."""

    def __init__(self, layer_idx: int, scale: float, look: Look):
        self.layer_idx, self.scale, self.look = layer_idx, scale, look

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, seq: int) -> Tensor:
        self.look(self.layer_idx, q, k, v)
        return prefill_attention(q, k, v, self.scale)


@torch.inference_mode()
def look_into(model: nn.Module, input_ids: Tensor, scale: float, look: Look) -> Tensor:
    """Dense forward of input_ids [T] that calls `look` in every layer; logits [1, V] of the last token."""
    probes = [Probe(i, scale, look) for i in range(model.config.get_text_config().num_hidden_layers)]
    cache = hf.make_cache(probes, hf.Phase(seq=0))
    device = next(model.parameters()).device
    positions = torch.arange(len(input_ids), device=device)[None]
    with hf.kv_attention(model):
        return hf.forward(model, input_ids.to(device)[None], positions, cache)[:, -1]
