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
from harness.ledger import Ledger, held_storages, measure
from harness.step import FusedStep, ModuleStep
from harness.timing import Clock, Stopwatch
from methods.base import Method

GRAPH_WARM_UP = 3


class Engine:
    """One model, one method, one batch. Slots are allocated here; no step allocates, syncs or holds a Python position.

    Args:
        model: a Hugging Face causal LM in eval mode; it attends through our layers inside the calls below only.
        method: an unbound method; the engine binds it. ValueError when its plan is impossible for these shapes.
        max_prompt_len: longest prompt; the budget refers to it. max_new_tokens: most tokens fed or decoded after prefill.
        impl: kernels, "reference" or "triton". decode_impl: "graph" replays one CUDA graph per step, "eager" launches each
            kernel. step_impl: "module" runs the Hugging Face module, "fused" joins its projections and fuses its small ops.
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
    ):
        self.model, self.method, self.decode_impl = model, method, decode_impl
        self.spec = hf.make_spec(
            model, batch_size=batch_size, context_len=max_prompt_len, max_new_tokens=max_new_tokens, impl=impl
        )
        if decode_impl == "graph" and self.spec.device.type != "cuda":
            device = self.spec.device.type
            raise ValueError(f"decode_impl=graph needs a CUDA device, the model is on {device}; use decode_impl=eager")
        method.bind(self.spec)
        if method.planned.headroom > max_new_tokens:
            raise ValueError(
                f"{type(method).__name__} plans headroom={method.planned.headroom} slots, more than the {max_new_tokens} "
                "tokens that can come"
            )
        self.compress_clock = method.clock = Stopwatch(self.spec.device)
        self.phase = hf.Phase()
        self.cache = hf.make_cache(method, self.phase)
        device = self.spec.device
        # the step reads and writes these in place: a graph can only hold addresses
        self.seen = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.token = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.logits = torch.zeros(batch_size, model.config.vocab_size, dtype=self.spec.dtype, device=device)
        self.step = (FusedStep if step_impl == "fused" else ModuleStep)(model, method)
        self.steps_left = 0
        self.graph = self._capture() if decode_impl == "graph" else None

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
        self.steps_left = self.spec.max_new_tokens
        self.logits.copy_(torch.cat(last))
        self.token.copy_(self.logits.argmax(-1))
        self.start = self.seen.clone(), self.token.clone()
        return [logits[0] for logits in kept] if keep_logits else self.logits.clone()

    @torch.inference_mode()
    def prefill_one(self, seq: int, prompt: Tensor, keep_all: bool = False) -> Tensor:
        """One prompt [T] into the slots of sequence `seq`, layer by layer; logits [1, V]. prefill() is what callers want."""
        self.phase.seq = seq
        prompt = prompt.to(self.spec.device)
        self.method.begin_prefill(seq, prompt)
        positions = torch.arange(len(prompt), device=self.spec.device)[None]
        try:
            with hf.kv_attention(self.model):
                logits = hf.forward(self.model, prompt[None], positions, self.cache, keep_all)
            self.method.end_prefill(seq)
        finally:
            self.phase.seq = None
        return logits

    def rewind(self) -> None:
        """Back to the end of the prompt, for timing the same decode again: same lengths and bytes, but a ring has moved on."""
        self.seen.copy_(self.start[0])
        self.token.copy_(self.start[1])
        self.steps_left = self.spec.max_new_tokens

    def snapshot(self) -> list:
        """A copy of all that a step changes, for restore(): the method's tensors too, since a step moves a ring on."""
        storages = [*held_storages(self.method).values()]
        storages += [tensor.untyped_storage() for tensor in (self.seen, self.token, self.logits)]
        return [self.steps_left, [(storage, storage.clone()) for storage in storages]]

    def restore(self, snapshot: list) -> None:
        """Back to where snapshot() was taken, as often as wanted, until the next prefill."""
        self.steps_left, copies = snapshot
        for storage, copy in copies:
            storage.copy_(copy)

    def decode(
        self,
        num_tokens: int,
        clock: Clock | None = None,
        forced: Tensor | None = None,
        forced_lens: list[int] | None = None,
    ) -> Tensor:
        """Greedy tokens [B, num_tokens]; end-of-sequence is not a stop.

        Args:
            clock: gets a mark before the first step and after every step.
            forced: [B, F] tokens that take the place of the first greedy ones, as a question that compression has not seen;
                forced_lens: how many of each row count (None: all F). They are part of what is returned.
        """
        device = self.spec.device
        forced = torch.empty(self.spec.batch_size, 0, dtype=torch.long) if forced is None else forced
        forced_lens = [forced.shape[1]] * self.spec.batch_size if forced_lens is None else forced_lens
        forced, lens = forced.to(device), torch.tensor(forced_lens, device=device)
        tokens = torch.empty(self.spec.batch_size, num_tokens, dtype=torch.long, device=device)
        for step in self._steps(num_tokens, clock):
            if step < forced.shape[1]:
                self.token.copy_(torch.where(step < lens, forced[:, step], self.token))
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
        if clock:
            clock.mark()
        for step in range(num_tokens):
            yield step
            if clock:
                clock.mark()

    def _step(self) -> None:
        """self.token [B] through the model; leaves logits and the next greedy token in place."""
        if self.graph:
            self.graph.replay()
        else:
            self._launch()

    @torch.inference_mode()
    def _launch(self) -> None:
        self.method.begin_step(self.seen)
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
        """Bytes held by the method's cache, by kind."""
        return measure(self.method)

    def positions(self, layer_idx: int = 0) -> Tensor:
        """True position held by each slot of each head of a layer, [B, Hkv, C], -1 where empty."""
        return self.method.layers[layer_idx].positions(self.seen)
