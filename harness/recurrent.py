"""Models without a KV cache: Mamba-2 and RWKV keep a state of fixed size, which the same rows show beside every cache method.

The engine is the same to its callers. Prompts go through in chunks, so that PyTorch's reference scans do not need memory for
the whole prompt; where no fast kernel is installed the row is flagged `slow_kernels`, since its times are then no verdict.
"""

import importlib.util

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from harness.engine import Engine
from harness.ledger import Ledger
from methods.base import Method, Spec

FAMILIES = ("mamba2", "rwkv")
CHUNK = 256
RWKV_LOWEST = -1e30  # what RWKV's running maximum starts from
RWKV_STATES = 5


def is_recurrent(config) -> bool:
    """Whether this model's memory is a state of fixed size."""
    return config.model_type in FAMILIES


def check(config, method: Method, batch_size: int) -> None:
    """ValueError of one line for a method that has nothing to work on here, and for what transformers computes wrongly."""
    name = type(method).__name__
    if name != "Full" or method.kv_dtype != "auto":
        raise ValueError(f"{config.model_type} has no KV cache that {name} could compress: its state is fixed; use method=full")
    if config.model_type == "rwkv" and batch_size > 1:
        # a step adds the previous tokens [B, H] to [B, 1, H]: every sequence would see the others
        raise ValueError(f"transformers' RWKV mixes up the {batch_size} sequences of a batch; use shape.batch_size=1")


def spec_of_config(config, *, tp_size: int = 1, **fields) -> Spec:
    """Spec without KV; other_bytes is the state of the whole batch. It is not spread over ranks."""
    itemsize = fields["dtype"].itemsize
    if config.model_type == "rwkv":
        # hidden states before each mixer in the model's dtype; numerator, denominator and maximum in fp32
        per_layer = 2 * config.hidden_size * itemsize + 3 * config.attention_hidden_size * 4
    else:
        inner = int(config.expand * config.hidden_size)
        conv = (inner + 2 * config.n_groups * config.state_size) * config.conv_kernel * itemsize
        per_layer = conv + config.num_heads * config.head_dim * config.state_size * 4
    other_bytes = fields["batch_size"] * config.num_hidden_layers * per_layer
    return Spec(num_layers=0, num_q_heads=0, num_kv_heads=0, head_dim=0, scale=1.0, other_bytes=other_bytes, **fields)


def slow_kernels(config) -> bool:
    """Whether transformers runs this family through PyTorch reference code here."""
    return config.model_type == "rwkv" or not importlib.util.find_spec("mamba_ssm")


def engine_class(config) -> type[Engine]:
    """The engine that runs this model."""
    return RecurrentEngine if is_recurrent(config) else Engine


class RecurrentEngine(Engine):
    """Engine over a fixed state; arguments as Engine's. Only method full, since there is nothing to compress."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        batch_size: int,
        max_prompt_len: int,
        max_new_tokens: int,
        impl: str = "reference",
        decode_impl: str = "eager",
        step_impl: str = "module",
        prefill_chunk: int | None = None,
    ):
        check(model.config, method, batch_size)
        weight = next(model.parameters())
        spec = spec_of_config(
            model.config,
            batch_size=batch_size,
            context_len=max_prompt_len,
            max_new_tokens=max_new_tokens,
            dtype=weight.dtype,
            device=weight.device,
            impl=impl,
        )
        self._set_up(model, method, spec, decode_impl, prefill_chunk or CHUNK)
        self.state = self._new_state(batch_size)
        self.graph = self._capture() if decode_impl == "graph" else None

    @torch.inference_mode()
    def _new_state(self, batch_size: int):
        """The zero state in the form that the model takes: it is then updated in place."""
        config, device = self.model.config, self.spec.device
        if config.model_type == "rwkv":
            shapes = [config.hidden_size] * 2 + [config.attention_hidden_size] * (RWKV_STATES - 2)
            dtypes = [self.spec.dtype] * 2 + [torch.float32] * (RWKV_STATES - 2)
            state = [
                torch.zeros(batch_size, size, config.num_hidden_layers, dtype=dtype, device=device)
                for size, dtype in zip(shapes, dtypes, strict=True)
            ]
        else:
            state = DynamicCache(config=config)
            # transformers allocates in the first forward
            token = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
            self.model(input_ids=token, cache_params=state, use_cache=True, logits_to_keep=1)
        return self._reset(state)

    def _reset(self, state):
        for tensor in tensors_of(state):
            tensor.zero_()
        if isinstance(state, list):
            state[-1].fill_(RWKV_LOWEST)
        return state

    def _forward(self, input_ids: Tensor, state, num_logits: int = 1) -> Tensor:
        """Logits [B, n, V] of the last `num_logits` (0: all) of input_ids; the state goes on in place."""
        given = {"state" if isinstance(state, list) else "cache_params": state}
        return self.model(input_ids=input_ids, use_cache=True, logits_to_keep=num_logits, **given).logits

    @torch.inference_mode()
    def prefill_one(self, seq: int, prompt: Tensor, keep_all: bool = False) -> Tensor:
        state = self._new_state(1)
        parts = prompt.to(self.spec.device).split(self.prefill_chunk)
        chunks = [self._forward(part[None], state, 0 if keep_all else 1) for part in parts]
        for whole, one in zip(tensors_of(self.state), tensors_of(state), strict=True):
            whole[seq] = one[0]
        return torch.cat(chunks, 1) if keep_all else chunks[-1][:, -1]

    @torch.inference_mode()
    def _launch(self) -> None:
        logits = self._forward(self.token[:, None], self.state)[:, 0]
        self.logits.copy_(logits)
        self.token.copy_(logits.argmax(-1))
        self.seen += 1

    def stream(self, token_ids: Tensor) -> Tensor:
        raise ValueError("stream() is for KV caches; a recurrent model's prompt may be of any length as it is")

    def storages(self) -> list[torch.UntypedStorage]:
        return [tensor.untyped_storage() for tensor in tensors_of(self.state)]

    def ledger(self) -> Ledger:
        return Ledger({"state": sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(self.state))})

    @property
    def resident_bytes(self) -> int:
        return self.spec.other_bytes

    @property
    def read_bytes(self) -> int:
        return self.spec.other_bytes

    def positions(self, layer_idx: int = 0) -> Tensor:
        raise ValueError("a recurrent state holds no token by itself, so it has no positions")


def tensors_of(state) -> list[Tensor]:
    """All tensors of a state, batch first."""
    if isinstance(state, list):
        return state
    return [held[0] for layer in state.layers for held in (layer.conv_states, layer.recurrent_states)]
