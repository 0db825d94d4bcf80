"""One decode step of a Llama-family model from its own weights, in about ten kernels a layer instead of forty.

The Hugging Face module keeps its parameters: q, k, v (and gate, up) become views of one joined matrix, so nothing is held twice
and prefill, which runs the module itself, sees the same numbers. Operations and roundings are those of the module.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from harness import hf
from kernels.add_rms_norm import add_rms_norm
from kernels.rope_append import rope_append
from kernels.swiglu import swiglu
from methods.base import KVLayer, Method
from methods.slots import Slots

FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def can_fuse(model: nn.Module) -> bool:
    """Whether FusedStep knows this model's layers."""
    config = model.config
    return config.model_type in FUSED_FAMILIES and config.hidden_act == "silu" and set(hf.layer_types(config)) == {hf.FULL}


def choose_step(model: nn.Module, decode_impl: str) -> str:
    """step_impl of an engine: eager is what a user of transformers would see, the module kernel by kernel.

    Weights that are spread over ranks stay with the module, whose layers know how to add up.
    """
    return "fused" if decode_impl == "graph" and can_fuse(model) and not model.tp_size else "module"


class ModuleStep:
    """The step as the Hugging Face module runs it, for any supported model."""

    def __init__(self, model: nn.Module, layers: list[KVLayer]):
        self.model, self.cache = model, hf.make_cache(layers, hf.Phase())

    def __call__(self, token: Tensor, seen: Tensor) -> Tensor:
        """Logits [B, V] of token [B] at positions seen [B]."""
        with hf.kv_attention(self.model):
            return hf.forward(self.model, token[:, None], seen[:, None], self.cache)[:, 0]


class FusedStep:
    """The same step with joined projections and fused ops."""

    def __init__(self, model: nn.Module, method: Method):
        self.method, self.spec = method, method.spec
        decoder = model.get_decoder()
        self.layers = decoder.layers
        self.table, self.norm, self.head = decoder.embed_tokens.weight, decoder.norm, model.get_output_embeddings()
        self.rotary = decoder.rotary_emb
        self.joined = []
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
            self.joined.append((qkv, join([mlp.gate_proj, mlp.up_proj])))
        spec = self.spec
        shape = (spec.batch_size, spec.num_kv_heads, 1, spec.head_dim)
        # rows on their way into slots that are not plain: quantised ones, or layers with a decode of their own
        self.row_k, self.row_v = (torch.zeros(shape, dtype=spec.dtype, device=spec.device) for _ in "kv")
        self.first = torch.zeros(spec.batch_size, dtype=torch.long, device=spec.device)

    def __call__(self, token: Tensor, seen: Tensor) -> Tensor:
        """Logits [B, V] of token [B] at positions seen [B]."""
        impl = self.spec.impl
        delta, residual = embedding(token, self.table), None
        cos, sin = (x[:, 0] for x in self.rotary(delta, position_ids=seen[:, None]))
        for number, (layer, (qkv, gate_up)) in enumerate(zip(self.layers, self.joined, strict=True)):
            before, after = layer.input_layernorm, layer.post_attention_layernorm
            normed, residual = add_rms_norm(delta, residual, before.weight, before.variance_epsilon, impl)
            out = self.attend(self.method.layers[number], layer.self_attn, linear(normed, *qkv), cos, sin)
            delta = layer.self_attn.o_proj(out)
            normed, residual = add_rms_norm(delta, residual, after.weight, after.variance_epsilon, impl)
            delta = layer.mlp.down_proj(swiglu(linear(normed, *gate_up), impl))
        normed, _ = add_rms_norm(delta, residual, self.norm.weight, self.norm.variance_epsilon, impl)
        return self.head(normed)

    def attend(self, layer: KVLayer, attention: nn.Module, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate, append and attend: qkv [B, (Hq + 2 Hkv) D] -> [B, Hq D]."""
        options = {"impl": self.spec.impl}
        if hasattr(attention, "q_norm"):
            eps = attention.q_norm.variance_epsilon
            options |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight, "eps": eps}
        step, slots = self.method.step, layer.slots
        if type(layer).decode is KVLayer.decode and type(slots) is Slots and slots.k.dtype == qkv.dtype:
            q = rope_append(qkv, cos, sin, slots.k, slots.v, step["slot"], **options)
            out, _ = slots.attend(q, step["lengths"], self.spec.scale)
        else:
            q = rope_append(qkv, cos, sin, self.row_k, self.row_v, self.first, **options)
            out = layer.decode(q[:, :, None], self.row_k, self.row_v)[:, :, 0]
        return out.reshape(len(qkv), -1)


def join(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of N, K] and bias of all linears as one; the modules' own parameters become views of them."""
    weight = joined([module.weight for module in linears])
    start = 0
    for module in linears:
        module.weight = nn.Parameter(weight[start : start + module.out_features], requires_grad=False)
        start += module.out_features
    return weight, None if linears[0].bias is None else torch.cat([module.bias for module in linears])


def joined(parts: list[Tensor]) -> Tensor:
    """Parts one below the other; the storage that they already share when an earlier engine has joined them."""
    first = parts[0]
    storage, rows = first.untyped_storage(), sum(len(part) for part in parts)
    shared = all(part.untyped_storage().data_ptr() == storage.data_ptr() for part in parts)
    if shared and storage.nbytes() == rows * first.shape[1] * first.element_size():
        return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1), 0)
    return torch.cat([part.detach() for part in parts])
