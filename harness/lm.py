"""lm-eval on the engine: every number comes from a compressed cache, none from a single forward pass that it cannot touch.

    lm = EngineLM(model, SparDA(sparsity=0.8), tokenizer)
    lm_eval.simple_evaluate(model=lm, tasks=[...])              # or python run.py task=lm_eval task.name=<task>

Prompts, truncation and stops are those of lm-eval's Hugging Face model, so with `full` every number is equal to it.

loglikelihood: the context up to its last token is prefilled and compressed; the last token and the continuation go through the
decode path. In a server the first token of an answer comes from the dense prefill; here that would give every method the score
of full wherever an answer is one token. Continuations of one context share its prefill, each starts from the same cache.
generate_until: prefill and greedy decode, as in a server.
loglikelihood_rolling: lm-eval's windows; of each window the first `context_len` tokens, at most half, are prefilled and scored
there, then compressed; the rest is scored through the cache. lm-eval scores the whole window in one dense forward.

The budget refers to each prompt by itself: one engine per prompt length, rebuilt when the length changes. With slots for the
longest prompt short ones would not be compressed at all. A prompt too short for the method at this budget keeps everything
and is counted (`Call.noop`).
"""

import dataclasses
from dataclasses import dataclass, field

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text, resolve_max_length
from torch import Tensor, nn

from harness.engine import Engine
from harness.timing import Clock
from methods.base import Budgeted, Method

DEFAULT_MAX_GEN_TOKENS = 256  # lm-eval's own
CHECK_STOPS_EVERY = 16  # tokens between two looks at the output: each is a sync with the GPU
LOGIT_ROWS = 1024  # rows of [T, V] logits turned into log-probabilities at a time
# settings that change nothing when decoding is greedy
NO_EFFECT = {"do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "use_cache"}


@dataclass
class Call:
    """What one prefill and the steps after it took. noop: the whole prompt was kept. num_output: generated tokens."""

    prompt_len: int
    noop: bool
    prefill_ms: float = 0.0
    compress_ms: float = 0.0
    fed_ms: float = 0.0  # the prompt's last token through the decode path, before the first scored one
    step_ms: list[float] = field(default_factory=list)
    read_bytes: int = 0
    num_output: int | None = None


class EngineLM(TemplateLM):
    """An lm-eval `LM` that answers through one method's cache, one prompt at a time, greedily.

    Args:
        method: unbound; it is bound anew for every prompt length. tokenizer: Hugging Face's, or one with encode and decode.
        context_len: most tokens of a rolling window that are compressed; other requests bring their own prompts.
        min_new_tokens: room that every engine has at least, so that requests of one length share one engine.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        tokenizer,
        *,
        context_len: int = 1024,
        min_new_tokens: int = 1,
        impl: str = "reference",
        decode_impl: str = "eager",
        step_impl: str = "module",
    ):
        super().__init__()
        self.model, self.method, self.tokenizer = model, method, tokenizer
        self.context_len, self.min_new_tokens = context_len, min_new_tokens
        self.impls = {"impl": impl, "decode_impl": decode_impl, "step_impl": step_impl}
        self._device = next(model.parameters()).device
        self.max_length = resolve_max_length(model.config, tokenizer)
        self.eos_ids = eos_ids(model, tokenizer)
        self.engine: Engine | None = None
        self.calls: list[Call] = []
        self.phase = "prefill"
        self.truncated = False  # whether a prompt has lost its front to the model's limit

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return getattr(self.tokenizer, "name_or_path", "").replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Ids; the tokenizer's own BOS is left out where the text brings one, so there are never two."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not (prefix and string.startswith(prefix))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def encode_prompt(self, string: str, max_gen_tokens: int) -> list[int]:
        """Ids of a prompt to go on from, cut from the left so that `max_gen_tokens` more fit."""
        room = self.max_length - max_gen_tokens
        if room < 1:
            raise ValueError(f"the task generates {max_gen_tokens} tokens, the model allows {self.max_length} in all")
        bos = getattr(self.tokenizer, "bos_token", None)
        ids = list(self.tokenizer.encode(string, add_special_tokens=not (bos and string.startswith(bos))))
        require_prompt(ids)
        self.truncated = self.truncated or len(ids) > room
        return ids[-room:]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("task.chat_template=true, but this model's tokenizer has no chat template")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def answer(self, requests: list[Instance]) -> list:
        """Responses to requests of any types, in order."""
        responses: list = [None] * len(requests)
        for kind in dict.fromkeys(request.request_type for request in requests):
            numbers = [number for number, request in enumerate(requests) if request.request_type == kind]
            found = getattr(self, kind)([requests[number] for number in numbers])
            for number, response in zip(numbers, found, strict=True):
                responses[number] = response
        return responses

    def shapes(self, requests: list[Instance]) -> list[tuple[list[int], int]]:
        """(prompt ids that prefill will see, most tokens after it) of each request, without running anything."""
        found = []
        for request in requests:
            if request.request_type == "generate_until":
                prompt, _, max_gen_tokens = self._generation(*request.args)
                found.append((prompt, max_gen_tokens))
            elif request.request_type == "loglikelihood":
                context, continuation = self._fit(*self._encode(*request.args))
                found.append((context[: max(1, len(context) - 1)], len(continuation)))
            else:
                for context, continuation in self._windows(request.args[0]):
                    cut = self._cut(context, continuation)
                    found.append(((context + continuation)[:cut], len(context + continuation) - cut))
        return found

    # likelihood

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Context and continuation ids; an empty context is the prefix token."""
        if context:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """What is too long loses the front of its context."""
        require_prompt(context)
        excess = len(context) + len(continuation) - (self.max_length + 1)
        if not continuation or excess >= len(context):
            raise ValueError(
                f"a continuation of {len(continuation)} tokens cannot be scored: it needs 1 to {self.max_length} tokens"
            )
        self.truncated = self.truncated or excess > 0
        return context[max(0, excess) :], continuation

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._loglikelihood_tokens([(request.args, *self._encode(*request.args)) for request in requests])

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        results: list = [None] * len(requests)
        groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for number, (_, *ids) in enumerate(requests):
            context, continuation = self._fit(*ids)
            groups.setdefault(tuple(context), []).append((number, continuation))
        # longest first: what does not fit fails at once, and equal lengths share one engine
        for context, members in sorted(groups.items(), key=lambda item: -len(item[0])):
            scored = self._score_continuations(list(context), [ids for _, ids in members])
            for (number, _), result in zip(members, scored, strict=True):
                results[number] = result
                self.cache_hook.add_partial("loglikelihood", requests[number][0], result)
        return results

    def _score_continuations(self, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each continuation after one prefill of their context."""
        prompt, last = (context[:-1], context[-1:]) if len(context) > 1 else (context, [])
        engine, call = self._prefill(prompt, len(last) + max(map(len, continuations)) - 1)
        if last:
            clock = Clock(engine.spec.device)
            engine.score(torch.tensor([last]), clock)
            call.step_ms += clock.durations_ms()
            call.fed_ms = call.step_ms[0]
        longer = sum(len(ids) > 1 for ids in continuations)
        start = engine.snapshot() if longer > 1 else None
        first, moved = engine.logits.float().clone(), False  # the steps write into engine.logits
        results = []
        for ids in continuations:
            rows = [first]
            if len(ids) > 1:
                if moved:
                    engine.restore(start)
                logits, moved = self._feed(ids[:-1], call), True
                rows += [*logits[:, 1:].unbind(1), engine.logits.float()]
            results.append(summed(torch.cat(rows), ids))
        return results

    def _feed(self, ids: list[int], call: Call) -> Tensor:
        """Ids through the decode path; logits [1, n, V] that predicted each."""
        clock = Clock(self.engine.spec.device)
        _, logits = self.engine.score(torch.tensor([ids]), clock, keep_logits=True)
        call.step_ms += clock.durations_ms()
        return logits

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            totals.append(sum(self._score_window(*window) for window in self._windows(request.args[0])))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """lm-eval's windows (context ids, ids to predict): each token once, with as much context as the model allows."""
        ids = self.tok_encode(text)
        windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        return [utils.make_disjoint_window(window) for window in windows]

    def _cut(self, context: list[int], continuation: list[int]) -> int:
        """How many tokens of a window are compressed: never more than half, so that the cache always has a say."""
        total = len(context) + len(continuation)
        return max(len(context), min(self.context_len, total // 2))

    def _score_window(self, context: list[int], continuation: list[int]) -> float:
        """Log-probability of the continuation: its part inside the prompt from prefill, the rest through the cache."""
        ids, cut = context + continuation, self._cut(context, continuation)
        rest = ids[cut:]
        engine, call, prompt_logits = self._prefill(ids[:cut], len(rest) - 1, keep_logits=True)
        # the logits at position i predict token i + 1; the last ones predict the first token of the rest
        total = summed(prompt_logits[len(context) - 1 :], ids[len(context) : cut + 1])[0]
        if len(rest) > 1:
            logits = self._feed(rest[:-1], call)
            total += summed(torch.cat([logits[0, 1:], engine.logits.float()]), rest[1:])[0]
        return total

    # generation

    def _generation(self, context: str, gen_kwargs: dict) -> tuple[list[int], list[str], int]:
        """Prompt ids, stop strings, most new tokens; ValueError for what greedy decoding cannot do."""
        kwargs = normalize_gen_kwargs(gen_kwargs, DEFAULT_MAX_GEN_TOKENS)
        if kwargs.get("do_sample"):
            raise ValueError("the task asks for sampling, the engine decodes greedily: set do_sample: false in its yaml")
        until, max_gen_tokens = kwargs.pop("until"), kwargs.pop("max_gen_toks")
        if unknown := sorted(set(kwargs) - NO_EFFECT):
            raise ValueError(f"the task sets {', '.join(unknown)} for generation, which greedy decoding here does not know")
        if not all(isinstance(stop, str) and stop for stop in ([until] if isinstance(until, str) else until)):
            raise ValueError(f"the task's until={until} must hold strings of at least one character")
        if max_gen_tokens < 1:
            raise ValueError(f"the task's max_gen_toks={max_gen_tokens} must be at least 1")
        stops = handle_stop_sequences(until, eos=self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        return self.encode_prompt(context, max_gen_tokens), stops, max_gen_tokens

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        jobs = [(number, *self._generation(*request.args)) for number, request in enumerate(requests)]
        texts: list = [None] * len(jobs)
        done: dict = {}
        for number, prompt, stops, max_gen_tokens in sorted(jobs, key=lambda job: -len(job[1])):
            # greedy: a request that is repeated has the same answer
            key = (*prompt, *stops, max_gen_tokens)
            if key not in done:
                done[key] = self._generate(prompt, stops, max_gen_tokens)
                self.cache_hook.add_partial("generate_until", requests[number].args, done[key])
            texts[number] = done[key]
        return texts

    def _generate(self, prompt: list[int], stops: list[str], max_gen_tokens: int) -> str:
        engine, call = self._prefill(prompt, max_gen_tokens)
        chunk = CHECK_STOPS_EVERY if engine.spec.device.type == "cuda" else 1
        tokens: list[int] = []
        end = None
        while end is None and len(tokens) < max_gen_tokens:
            clock = Clock(engine.spec.device)
            checked = len(tokens)
            tokens += engine.decode(min(chunk, max_gen_tokens - checked), clock)[0].tolist()
            call.step_ms += clock.durations_ms()
            end = self._find_end(tokens, checked, stops)
        tokens = tokens[:end]
        call.num_output = len(tokens) - (bool(tokens) and tokens[-1] in self.eos_ids)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return postprocess_generated_text(text, stops, None)

    def _find_end(self, tokens: list[int], checked: int, stops: list[str]) -> int | None:
        """How many tokens there are up to the first end-of-sequence or stop string after `checked`; None: go on."""
        # a token is at least a character, apart from the pieces of one
        tail = max(map(len, stops), default=0) + 8
        for count in range(checked + 1, len(tokens) + 1):
            if tokens[count - 1] in self.eos_ids:
                return count
            text = self.tokenizer.decode(tokens[max(0, count - tail) : count], skip_special_tokens=False)
            if any(stop and stop in text for stop in stops):
                return count
        return None

    # engines

    def _prefill(self, prompt: list[int], num_new: int, keep_logits: bool = False):
        """Engine with the prompt in its cache and the new Call, with keep_logits also the logits [T, V] of the prompt."""
        self.phase = "prefill"
        engine = self._engine_for(len(prompt), num_new)
        planned = engine.method.planned
        noop = isinstance(engine.method, Budgeted) and planned.noop
        call = Call(len(prompt), noop, read_bytes=planned.read_bytes)
        engine.compress_clock.total_ms()
        clock = Clock(engine.spec.device)
        clock.mark()
        logits = engine.prefill(torch.tensor([prompt]), keep_logits=keep_logits)
        clock.mark()
        call.prefill_ms, call.compress_ms = clock.durations_ms()[0], engine.compress_clock.total_ms()
        self.calls.append(call)
        self.phase = "decode"
        return (engine, call, logits[0]) if keep_logits else (engine, call)

    def _engine_for(self, prompt_len: int, num_new: int) -> Engine:
        """The engine whose budget refers to exactly this prompt length."""
        engine = self.engine
        if engine and engine.spec.context_len == prompt_len and engine.spec.max_new_tokens >= num_new:
            return engine
        self.release()
        shape = {"batch_size": 1, "max_prompt_len": prompt_len, "max_new_tokens": max(1, num_new, self.min_new_tokens)}
        try:
            self.engine = Engine(self.model, self.method, **shape, **self.impls)
        except ValueError:
            # shorter than what the method keeps at least: it stays whole, and the call says so
            if not isinstance(self.method, Budgeted):
                raise
            whole = dataclasses.replace(self.method, sparsity=0.0, kv_budget=None)
            self.engine = Engine(self.model, whole, **shape, **self.impls)
        return self.engine

    def release(self) -> None:
        """Give the slots back."""
        if self.engine:
            self.engine.method.release()
            self.engine = None


def require_prompt(ids: list[int]) -> None:
    """ValueError for a prompt without a token."""
    if not ids:
        raise ValueError("a prompt of the task is empty and the tokenizer puts no token before it: fill doc_to_text")


def summed(logits: Tensor, ids: list[int]) -> tuple[float, bool]:
    """Log-probability (nats) of ids [n] under logits [n, V], and whether each is the most likely token."""
    total, greedy = 0.0, True
    for start in range(0, len(ids), LOGIT_ROWS):
        rows = logits[start : start + LOGIT_ROWS].float()
        wanted = torch.tensor(ids[start : start + LOGIT_ROWS], device=rows.device)
        total += float(rows.log_softmax(-1).gather(1, wanted[:, None]).sum())
        greedy = greedy and bool((rows.argmax(-1) == wanted).all())
    return total, greedy


def eos_ids(model: nn.Module, tokenizer) -> set[int]:
    """All ids that end a generation: the model's own set and the tokenizer's."""
    config = getattr(model, "generation_config", None)
    own = getattr(config, "eos_token_id", None)
    ids = set(own if isinstance(own, list) else [] if own is None else [own])
    return ids | ({tokenizer.eos_token_id} - {None})
