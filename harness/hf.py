"""All that depends on the transformers version: the attention function, the cache object, and what a model's shapes are.

The model stays the Hugging Face module. Its attention calls `cache.update(k, v)` and then our attention function with the
returned key; the key carries the KVLayer it belongs to, so no global state and no patched module stands between the two.
"""

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, CacheLayerMixin, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

import methods
from harness.nearest import did_you_mean
from harness.sliding import Sliding
from methods.base import KVLayer, Method, Spec

ATTENTION = "kvgauge"
FULL, SLIDING = "full_attention", "sliding_attention"
ONE_AT_A_TIME = "attach: generate() must go one token at a time; assisted decoding is not supported"
# set by model families whose attention is more than softmax(q k): silently dropping one would change the model
UNSUPPORTED_KWARGS = ("softcap", "s_aux", "head_mask", "position_bias")


@dataclass
class Phase:
    """Which phase the next forward is in: the sequence that is prefilled, or None for a decode step of all.

    start, length: set when the prompt comes in chunks: the position of the next one's first token, tokens in all.
    """

    seq: int | None = None
    start: int = 0
    length: int | None = None


class CacheLayer(CacheLayerMixin):
    """Hands a KVLayer through transformers' cache: update() returns the new keys with the layer attached."""

    def __init__(self, layer: KVLayer, phase: Phase):
        super().__init__()
        self.layer, self.phase = layer, phase
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        key_states.kv_layer = self
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phase = self.phase
        if phase.seq is None:
            return self.layer.decode(q, k, v)
        if phase.length is None:
            return self.layer.prefill(q, k, v, phase.seq)
        return self.layer.prefill_chunk(q, k, v, phase.seq, phase.start, phase.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always passed in; a count here would need a host sync

    def get_max_length(self) -> int:
        return -1


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Attention function registered as "kvgauge": q [B, Hq, T, D], k, v [B, Hkv, T, D] -> [B, T, Hq, D]."""
    if extra := [name for name in UNSUPPORTED_KWARGS if kwargs.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} uses {', '.join(extra)} in its attention, which is not supported yet")
    out = key.kv_layer.attend(query, key, value)
    return out.transpose(1, 2).contiguous(), None


# no mask function is registered under this name, so the model builds no mask: causality is the cache layers' own business
AttentionInterface.register(ATTENTION, attention)


@contextmanager
def kv_attention(model: nn.Module) -> Iterator[None]:
    """Within it the model attends through our layers; outside it is as the user loaded it."""
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before


def make_cache(layers: list[KVLayer], phase: Phase) -> Cache:
    """transformers' Cache over one KVLayer per layer of the model."""
    return Cache(layers=[CacheLayer(layer, phase) for layer in layers])


def forward(model: nn.Module, input_ids: Tensor, position_ids: Tensor, cache: Cache, num_logits: int = 1) -> Tensor:
    """Logits of the last `num_logits` tokens, [B, num_logits, V]; input_ids and position_ids [B, T]."""
    return model(
        input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True, logits_to_keep=num_logits
    ).logits


def make_spec(model: nn.Module, *, batch_size: int, context_len: int, max_new_tokens: int, impl: str) -> Spec:
    """Spec of a loaded model."""
    weight = next(model.parameters())
    scale = next(m.scaling for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling"))
    rotary = model.get_decoder().rotary_emb
    # hybrid models rotate each kind of layer at its own base; methods serve the full ones
    kind = {"layer_type": FULL} if "layer_type" in inspect.signature(rotary.forward).parameters else {}

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(torch.empty(1, dtype=torch.float32, device=positions.device), position_ids=positions, **kind)
        return cos.float(), sin.float()

    return spec_of_config(
        model.config,
        scale=scale,
        batch_size=batch_size,
        context_len=context_len,
        max_new_tokens=max_new_tokens,
        dtype=weight.dtype,
        device=weight.device,
        rotary=cos_sin,
        impl=impl,
        tp_size=model.tp_size or 1,
    )


def spec_of_config(config, *, scale: float | None = None, tp_size: int = 1, **fields) -> Spec:
    """Spec from a model's configuration alone, without weights: what the pre-flight plans with. Heads are those of one rank."""
    num_q_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_q_heads
    spec = Spec(
        num_layers=config.num_hidden_layers,
        num_q_heads=num_q_heads // tp_size,
        num_kv_heads=(getattr(config, "num_key_value_heads", None) or num_q_heads) // tp_size,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        tp_size=tp_size,
        **fields,
    )
    if not (num_sliding := layer_types(config).count(SLIDING)):
        return spec
    other = Sliding(window=config.sliding_window).plan(replace(spec, num_layers=num_sliding))
    return replace(spec, num_layers=spec.num_layers - num_sliding, other_bytes=other.resident_bytes)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """FULL or SLIDING for each layer; a window that covers the longest context of the model is none."""
    types = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    window, limit = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    no_window = window is None or (limit and window >= limit)
    return [FULL if no_window and kind == SLIDING else kind for kind in types]


def make_sliding(config: PreTrainedConfig, spec: Spec) -> Sliding | None:
    """Bound cache of the model's sliding layers, None where it has none; `spec` is the method's."""
    if not (num_sliding := layer_types(config).count(SLIDING)):
        return None
    sliding = Sliding(window=config.sliding_window)
    sliding.bind(replace(spec, num_layers=num_sliding, other_bytes=0))
    return sliding


def layers_of(config: PreTrainedConfig, method: Method, sliding: Method | None) -> list[KVLayer]:
    """The KVLayer of each layer of the model, in its order."""
    own = {FULL: iter(method.layers), SLIDING: iter(sliding.layers if sliding else ())}
    return [next(own[kind]) for kind in layer_types(config)]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers on this rank, each storage once."""
    tensors = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def weight_bytes_read(model: nn.Module, batch_size: int) -> int:
    """Weight bytes that one decode step must read: all but the embedding table, of which it reads B rows (unless tied)."""
    table = local(model.get_input_embeddings().weight)
    head = model.get_output_embeddings()
    tied = head is not None and local(head.weight).data_ptr() == table.data_ptr()
    skipped = 0 if tied else (table.shape[0] - batch_size) * table.shape[1] * table.element_size()
    return weight_bytes(model) - max(0, skipped)


@contextmanager
def attach(model: nn.Module, method: str | Method, *, max_new_tokens: int = 512, **knobs) -> Iterator[None]:
    """Within it `model.generate()` runs through a method's physical cache; on exit the model is as before.

    with attach(model, "sparda", sparsity=0.8):
        model.generate(input_ids, attention_mask=mask, max_new_tokens=64)

    Args:
        method: a name from methods/ with its knobs, or an instance without. The budget refers to the longest prompt of a call.
        max_new_tokens: room for new tokens in methods that append; more raise ValueError.
    Prompts may be left-padded: each keeps its true positions, and padding enters no cache. No beams.
    """
    # the engine stands on this module
    from harness.config import discover
    from harness.engine import Engine

    if isinstance(method, Method):
        make = lambda: copy.deepcopy(method)  # noqa: E731
        if knobs:
            raise ValueError(f"attach: {', '.join(knobs)} belong into the method's own constructor")
    else:
        known = discover(methods, Method)
        if method not in known:
            hint = did_you_mean(method, known)
            raise ValueError(f"attach: unknown method {method!r}{hint}; valid: {', '.join(sorted(known))}")
        make = lambda: known[method](**knobs)  # noqa: E731
    make()  # a wrong knob is an error here, not in the middle of generate()
    on_cuda = next(model.parameters()).device.type == "cuda"
    running: dict = {}

    original = model.forward

    # generate() reads the signature to know what it may pass
    @functools.wraps(original)
    def forward(input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        given = kwargs.get("cache", past_key_values)
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("attach: the prompt must be input_ids")
        if input_ids.shape[1] > 1 and kwargs.get("logits_to_keep") != 1:
            raise ValueError(ONE_AT_A_TIME)
        if running.get("cache") is not given or given is None:
            # a new call of generate() brings a new cache object
            running.clear()
            lengths = [input_ids.shape[1]] * len(input_ids) if attention_mask is None else attention_mask.sum(1).tolist()
            engine = Engine(
                model,
                make(),
                batch_size=len(input_ids),
                max_prompt_len=max(lengths),
                max_new_tokens=max_new_tokens,
                impl="triton" if on_cuda else "reference",
            )
            own_prompts = [row[len(row) - length :] for row, length in zip(input_ids, lengths, strict=True)]
            with plain_forward():
                engine.prefill(nn.utils.rnn.pad_sequence(own_prompts, batch_first=True), lengths)
            given.reorder_cache = refuse_beams
            running.update(cache=given, engine=engine, width=input_ids.shape[1])
        else:
            engine = running["engine"]
            running["width"] += 1
            if attention_mask is not None and attention_mask.shape[1] != running["width"]:
                raise ValueError(ONE_AT_A_TIME)
            with plain_forward():
                engine.score(input_ids[:, -1:])
        return CausalLMOutputWithPast(logits=engine.logits[:, None].clone(), past_key_values=given)

    @contextmanager
    def plain_forward():
        """The engine runs the model itself."""
        model.forward = original
        try:
            yield
        finally:
            model.forward = forward

    def refuse_beams(beam_idx):
        raise ValueError("attach: beam search is not supported; use num_beams=1")

    model.forward = forward
    try:
        yield
    finally:
        # the class's own forward shows again
        del model.forward
