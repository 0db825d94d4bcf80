"""The engine: prefill, decode and score through one physical cache. Accuracy, latency and memory all come from here.

engine = Engine(model, method, batch_size=2, max_prompt_len=1024, max_new_tokens=128)
logits = engine.prefill(input_ids, lengths)     # [B, V]
tokens = engine.decode(128)                     # [B, 128], greedy
logprobs = engine.score(token_ids)              # [B, n], teacher-forced through the same compressed cache
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from harness import hf
from harness.ledger import WORKSPACE, Ledger, held_storages, measure
from harness.step import FusedStep, ModuleStep
from harness.timing import Clock, Stopwatch
from methods.base import Budgeted, Method, Spec
from methods.slots import BLOCK

GRAPH_WARM_UP = 3
STREAM_CHUNK = 512
CHECK_EVERY = 64  # decoded tokens between two looks at the ledger


class Engine:
    """One model, one method, one batch. Slots are allocated here; no step allocates, syncs or holds a Python position.

    Args:
        model: a Hugging Face causal LM in eval mode; it attends through our layers inside the calls below only.
        method: an unbound method; the engine binds it. ValueError when its plan is impossible for these shapes.
        max_prompt_len: longest prompt; the budget refers to it. max_new_tokens: most tokens fed or decoded after prefill.
        impl: kernels, "reference" or "triton". decode_impl: "graph" replays one CUDA graph per step, "eager" launches each
            kernel. step_impl: "module" runs the Hugging Face module, "fused" joins its projections and fuses its small ops.
        prefill_chunk: tokens that go through all layers at a time, for prompts whose activations do not fit; None: the whole
            prompt, layer by layer (methods that stream: STREAM_CHUNK).
    """

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
        spec = hf.make_spec(model, batch_size=batch_size, context_len=max_prompt_len, max_new_tokens=max_new_tokens, impl=impl)
        self._set_up(
            model, method, spec, decode_impl, STREAM_CHUNK if prefill_chunk is None and method.streams else prefill_chunk
        )
        self.seals = any(layer.slots.seals for layer in method.layers)
        if self.seals and decode_impl == "graph" and impl == "reference":
            raise ValueError(
                f"kv_dtype={method.kv_dtype} seals blocks on the host with impl=reference, which no graph can hold; "
                "use impl=triton or decode_impl=eager"
            )
        headroom = max(method.planned.layer_slots(i)[1] for i in range(self.spec.num_layers))
        if headroom > max_new_tokens:
            raise ValueError(
                f"{type(method).__name__} plans headroom={headroom} slots, more than the {max_new_tokens} tokens that can come"
            )
        sliding = hf.make_sliding(model.config, self.spec)
        self.methods = [method, sliding] if sliding else [method]
        layers = hf.layers_of(model.config, method, sliding)
        self.phase = hf.Phase()
        self.cache = hf.make_cache(layers, self.phase)
        self.step = FusedStep(model, method) if step_impl == "fused" else ModuleStep(model, layers)
        self.graph = self._capture() if decode_impl == "graph" else None

    def _set_up(self, model: nn.Module, method: Method, spec: Spec, decode_impl: str, prefill_chunk: int | None) -> None:
        """What every engine has: the bound method and the tensors of the step."""
        self.model, self.method, self.spec, self.decode_impl = model, method, spec, decode_impl
        if decode_impl == "graph" and spec.device.type != "cuda":
            raise ValueError(
                f"decode_impl=graph needs a CUDA device, the model is on {spec.device.type}; use decode_impl=eager"
            )
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} must be at least 1 token (None: the whole prompt at once)")
        self.prefill_chunk = prefill_chunk
        method.bind(spec)
        self.compress_clock = method.clock = Stopwatch(spec.device)
        # the step reads and writes these in place: a graph can only hold addresses
        self.seen = torch.zeros(spec.batch_size, dtype=torch.long, device=spec.device)
        self.token = torch.zeros(spec.batch_size, dtype=torch.long, device=spec.device)
        self.logits = torch.zeros(spec.batch_size, model.config.vocab_size, dtype=spec.dtype, device=spec.device)
        self.steps_left = self.num_steps = 0  # steps that may still come, and those since prefill

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, lengths: Tensor | list[int] | None = None, keep_logits: bool = False):
        """Prompts into the cache, one sequence at a time; any earlier content is forgotten.

        Args:
            input_ids: [B, T], right-padded; lengths: [B] prompt lengths (None: all T). Padding is cut off before the model.
        Returns:
            logits [B, V] of each prompt's last token, or with keep_logits those of all its tokens, a list of [T, V].
        """
        lengths = [input_ids.shape[1]] * len(input_ids) if lengths is None else [int(n) for n in lengths]
        if len(input_ids) != self.spec.batch_size or len(lengths) != self.spec.batch_size:
            raise ValueError(f"prefill got {len(input_ids)} prompts, the engine was built for {self.spec.batch_size}")
        if not 1 <= min(lengths) <= max(lengths) <= min(self.spec.context_len, input_ids.shape[1]):
            raise ValueError(f"prompt lengths {lengths} must lie in 1 .. {self.spec.context_len} (max_prompt_len)")
        self.method.step = {}
        kept = [self.prefill_one(seq, input_ids[seq, :length], keep_logits) for seq, length in enumerate(lengths)]
        last = [logits[:, -1] for logits in kept] if keep_logits else kept
        self.seen.copy_(torch.tensor(lengths))
        self.steps_left, self.num_steps = self.spec.max_new_tokens, 0
        self.logits.copy_(torch.cat(last))
        self.token.copy_(self.logits.argmax(-1))
        self.start = self.seen.clone(), self.token.clone()
        return [logits[0] for logits in kept] if keep_logits else self.logits.clone()

    @torch.inference_mode()
    def prefill_one(self, seq: int, prompt: Tensor, keep_all: bool = False) -> Tensor:
        """One prompt [T] into the slots of sequence `seq`, layer by layer; logits [1, V], or [1, T, V] with keep_all."""
        prompt = prompt.to(self.spec.device)
        self.method.begin_prefill(seq, prompt)
        chunks = list(self._chunks(seq, prompt, 0 if keep_all else 1))
        self.method.end_prefill(seq)
        return torch.cat(chunks, 1) if keep_all else chunks[-1][:, -1]

    def _chunks(self, seq: int, tokens: Tensor, num_logits: int) -> Iterator[Tensor]:
        """Tokens [T] through the model in chunks; yields the last `num_logits` (0: all) logits of each, [1, n, V]."""
        size = self.prefill_chunk or len(tokens)
        positions = torch.arange(len(tokens), device=self.spec.device)[None]
        self.phase.seq, self.phase.length = seq, len(tokens) if self.prefill_chunk else None
        try:
            for start in range(0, len(tokens), size):
                self.phase.start, part = start, slice(start, start + size)
                with hf.kv_attention(self.model):
                    yield hf.forward(self.model, tokens[None, part], positions[:, part], self.cache, num_logits)
        finally:
            self.phase.seq = self.phase.length = None

    @torch.inference_mode()
    def stream(self, token_ids: Tensor) -> Tensor:
        """Log-probabilities [B, T - 1] (nats) of token_ids[:, 1:], each predicted from what the method still holds by then.

        Args:
            token_ids: [B, T], of any length: a method that streams holds a constant number of slots. Whatever the cache held
                is forgotten, and decoding cannot go on from here.
        """
        if not self.method.streams:
            name = type(self.method).__name__
            raise ValueError(
                f"{name} does not evict between chunks; use method=streaming_llm or window with method.prefill=stream"
            )
        rows = []
        for seq, tokens in enumerate(token_ids.to(self.spec.device)):
            self.method.begin_prefill(seq, tokens)
            logprobs, start = [], 1
            for logits in self._chunks(seq, tokens, 0):
                wanted = tokens[start : start + logits.shape[1]]
                start += logits.shape[1]
                rated = logits[0, : len(wanted)].float().log_softmax(-1)
                logprobs.append(rated.gather(1, wanted[:, None])[:, 0])
            self.method.end_prefill(seq)
            rows.append(torch.cat(logprobs))
        self.steps_left = self.num_steps = 0  # steps that may still come, and those since prefill
        return torch.stack(rows)

    def can_rewind(self) -> bool:
        """Whether the prompt is still in the cache as prefill left it, or in a ring of the same length.

        A block that was sealed since has lost its tokens' 16-bit rows, so prefill must come again.
        """
        if not self.seals:
            return True
        return torch.equal(*(self.method.slot_of(seen) // BLOCK for seen in (self.start[0], self.seen)))

    def rewind(self) -> None:
        """Back to the end of the prompt, for timing the same decode again: same lengths and bytes, but a ring has moved on."""
        if not self.can_rewind():
            raise ValueError(f"rewind: kv_dtype={self.method.kv_dtype} has sealed tokens of the prompt since; prefill again")
        self.seen.copy_(self.start[0])
        self.token.copy_(self.start[1])
        self.steps_left = self.spec.max_new_tokens

    def storages(self) -> list[torch.UntypedStorage]:
        """Memory of the cache that a step may change."""
        return [storage for method in self.methods for storage in held_storages(method).values()]

    def snapshot(self) -> list:
        """A copy of all that a step changes, for restore(): the method's tensors too, since a step moves a ring on."""
        storages = [*self.storages(), *(tensor.untyped_storage() for tensor in (self.seen, self.token, self.logits))]
        return [self.steps_left, self.num_steps, [(storage, storage.clone()) for storage in storages]]

    def restore(self, snapshot: list) -> None:
        """Back to where snapshot() was taken, as often as wanted, until the next prefill."""
        self.steps_left, self.num_steps, copies = snapshot
        for storage, copy in copies:
            storage.copy_(copy)

    def decode(self, num_tokens: int, clock: Clock | None = None, forced: Tensor | None = None) -> Tensor:
        """Greedy tokens [B, num_tokens]; end-of-sequence is not a stop.

        Args:
            clock: gets a mark before the first step and after every step.
            forced: [B, F] tokens that take the place of the greedy ones, as a question that compression has not seen, and are
                part of what is returned; -1 leaves the greedy token, as in the answer before the next question.
        """
        device = self.spec.device
        forced = torch.empty(self.spec.batch_size, 0, dtype=torch.long) if forced is None else forced
        forced = forced.to(device)
        tokens = torch.empty(self.spec.batch_size, num_tokens, dtype=torch.long, device=device)
        for step in self._steps(num_tokens, clock):
            if step < forced.shape[1]:
                self.token.copy_(torch.where(forced[:, step] >= 0, forced[:, step], self.token))
            tokens[:, step] = self.token
            self._step()
        return tokens

    def score(self, token_ids: Tensor, clock: Clock | None = None, keep_logits: bool = False):
        """Log-probabilities [B, n] (nats) of token_ids [B, n], teacher-forced through the cache as decode does.

        Returns:
            logprobs, or (logprobs, logits [B, n, V] fp32 that predicted each token) with keep_logits.
        """
        token_ids = token_ids.to(self.spec.device)
        logprobs: list[Tensor] = []
        logits: list[Tensor] = []
        for step in self._steps(token_ids.shape[1], clock):
            predicted = self.logits.float() if self.logits.dtype != torch.float32 else self.logits.clone()
            logprobs.append(predicted.log_softmax(-1).gather(1, token_ids[:, step : step + 1])[:, 0])
            if keep_logits:
                logits.append(predicted)
            self.token.copy_(token_ids[:, step])
            self._step()
        scores = torch.stack(logprobs, dim=1)
        return (scores, torch.stack(logits, dim=1)) if keep_logits else scores

    def _steps(self, num_tokens: int, clock: Clock | None) -> Iterator[int]:
        """Step numbers, with the clock's marks around them; ValueError when the slots do not suffice."""
        if num_tokens > self.steps_left:
            raise ValueError(
                f"{num_tokens} more tokens do not fit: {self.steps_left} of max_new_tokens={self.spec.max_new_tokens} are left"
            )
        self.steps_left -= num_tokens
        if self.num_steps == 0:
            self.check_bytes()
        if clock:
            clock.mark()
        for step in range(num_tokens):
            yield step
            self.num_steps += 1
            if clock:
                clock.mark()
            if self.num_steps % CHECK_EVERY == 0:
                self.check_bytes()
                if clock:
                    clock.resume()

    def _step(self) -> None:
        """self.token [B] through the model; leaves logits and the next greedy token in place."""
        if self.graph:
            self.graph.replay()
        else:
            self._launch()

    @torch.inference_mode()
    def _launch(self) -> None:
        for method in self.methods:
            method.see_token(self.token)
            method.begin_step(self.seen)
        logits = self.step(self.token, self.seen)
        self.logits.copy_(logits)
        self.token.copy_(logits.argmax(-1))
        self.seen += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record one step. The slots hold nothing yet, so the warm-up steps may write what prefill will overwrite."""
        stream = torch.cuda.Stream(self.spec.device)
        stream.wait_stream(torch.cuda.current_stream(self.spec.device))
        with torch.cuda.stream(stream):
            for _ in range(GRAPH_WARM_UP):
                self.seen.zero_()
                self._launch()
        torch.cuda.current_stream(self.spec.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch()
        return graph

    def finite(self) -> bool:
        """Whether the newest logits hold neither NaN nor infinity."""
        return bool(torch.isfinite(self.logits).all())

    def ledger(self) -> Ledger:
        """Bytes held by the cache, by kind."""
        return sum((measure(method) for method in self.methods), Ledger({}))

    @property
    def resident_bytes(self) -> int:
        """Predicted bytes after prefill, of the method's layers and of the others."""
        return sum(method.planned.resident_bytes for method in self.methods)

    @property
    def read_bytes(self) -> int:
        """Predicted KV bytes read per decode step, mean over max_new_tokens steps."""
        return sum(method.planned.read_bytes for method in self.methods)

    def check_bytes(self) -> None:
        """RuntimeError when the cache holds more than its budget, or more than it held after prefill.

        Every decode and score does this before its first step and after every CHECK_EVERY tokens, outside the clock.
        """
        ledger, name = self.ledger(), type(self.method).__name__
        allocated = ledger.allocated_bytes - ledger.kinds.get(WORKSPACE, 0)
        if self.num_steps == 0:
            self.allocated_bytes = allocated
        elif allocated > self.allocated_bytes:
            raise RuntimeError(
                f"{name} grew from {self.allocated_bytes} to {allocated} bytes while it decoded {self.num_steps} tokens"
            )
        if isinstance(self.method, Budgeted) and self.method.memory_class == "freed" and not self.method.planned.noop:
            budget = self.method.budget_bytes(self.spec)
            if ledger.resident_bytes > budget:
                raise RuntimeError(
                    f"{name} holds {ledger.resident_bytes} bytes after {self.num_steps} decoded tokens, its budget is {budget}"
                )

    def positions(self, layer_idx: int = 0) -> Tensor:
        """True position held by each slot of each head of a layer, [B, Hkv, C], -1 where empty."""
        return self.method.layers[layer_idx].positions(self.seen)
