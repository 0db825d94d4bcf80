"""A cell whose task is lm-eval's: documents take the place of batches, each prompt has a budget of its own length.

Bytes and peaks of the row are those of the longest prompt (`context_len`); times are over all prompts. Accuracy and its error
are what lm-eval's own evaluate() makes of the recorded responses, so filters, metrics and groups are exactly lm-eval's.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator
from numbers import Real

import numpy as np
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from harness import hf
from harness.cell import NonFinite, Side
from harness.lm import EngineLM
from harness.stats import worst_task
from methods.base import Budgeted
from tasks.lm_eval import Document

GENERATE = "generate_until"
BOOTSTRAP_ITERS = 1000  # only for the errors of metrics without a formula, such as F1 or perplexity


class LmEvalSide(Side):
    """One method's half of such a cell."""

    def __init__(self, cfg, loaded, peak_load, reproduce):
        super().__init__(cfg, loaded, peak_load, reproduce)
        self.lm: EngineLM | None = None
        self.other: dict[str, float] = {}  # a metric of which less is better, and no column of the row

    def prepare(self) -> None:
        """Read the task, build all prompts; the longest sets the shape of the warm-up."""
        self.lm = EngineLM(
            self.model,
            self.method,
            self.tokenizer,
            context_len=self.shape.context_len,
            impl=self.impl,
            decode_impl=self.decode_impl,
            step_impl=self.step_impl,
        )
        tokenizer = getattr(self.tokenizer, "name_or_path", "")
        self.loaded_tasks = self.task.load(tokenizer, self.shape.context_len, self.seed)
        documents = self.task.documents(self.loaded_tasks, self.lm, self.seed)
        self.num_drawn, self.num_rounds = len(documents), len(documents)
        self.batches = [[document] for document in documents]
        self.recall(documents)
        self.max_new_tokens = self.lm.min_new_tokens = max(document.max_new_tokens for document in documents)
        self.shape = dataclasses.replace(self.shape, context_len=documents[0].max_prompt_len)
        self.row.context_len, self.row.num_new_tokens = self.shape.context_len, self.max_new_tokens
        bos = self.tokenizer.bos_token_id
        if bos is not None and any(document.prompt_ids[:2] == [bos, bos] for document in documents):
            self.row.flags.append("double_bos")
        if self.lm.truncated:
            self.row.flags.append("truncated")
        penalty = getattr(getattr(self.model, "generation_config", None), "repetition_penalty", None)
        if penalty not in (None, 1.0) and any(document.requests[0].request_type == GENERATE for document in documents):
            print(
                f"note: the model's generation_config sets repetition_penalty={penalty}; this is plain greedy", file=sys.stderr
            )

    def run(self, group: list[Side]) -> Iterator[None]:
        """One document per turn; the first `repeats` are always run, for their times."""
        for turn, (document,) in enumerate(self.batches):
            if turn >= self.shape.repeats and self.is_recorded(turn):
                self.resume(turn)
            else:
                self.phase = "prefill"
                try:
                    self.answer(document)
                finally:
                    self.phase = self.lm.phase
            yield
        self.lm.release()

    def answer(self, document: Document) -> None:
        """Run a document's requests and keep what came out."""
        first = len(self.lm.calls)
        responses = self.lm.answer(document.requests)
        calls = self.lm.calls[first:]
        numbers = [response for item in responses for response in (item if isinstance(item, tuple) else (item,))]
        if not all(math.isfinite(number) for number in numbers if not isinstance(number, str)):
            raise NonFinite(f"{self.name}: a log-probability is not finite")
        if calls and not self.lm.engine.finite():
            raise NonFinite(f"{self.name}: the logits are not finite after decoding")
        for call in calls:
            self.ttft_ms.append(call.prefill_ms + call.fed_ms)
            self.prefill_ms.append(call.prefill_ms)
            self.prefilled_tokens = call.prompt_len
            self.compress_ms.append(call.compress_ms)
            self.step_ms += call.step_ms
            self.num_timed += bool(call.step_ms)
        lengths = [call.num_output for call in calls if call.num_output is not None]
        line = {"responses": responses, "noop": bool(calls) and all(call.noop for call in calls)}
        if lengths:
            line |= {"output": responses[0], "output_len": sum(lengths)}
        self.keep({"id": document.id} | line | self.metrics_of(document, responses) | document.meta)

    def metrics_of(self, document: Document, responses: list) -> dict:
        """The document's right answer and its values of every metric, by lm-eval's filters; score: the chosen one."""
        task = self.loaded_tasks["tasks"][document.task]
        copies = [
            dataclasses.replace(request, resps=[response] * request.repeats, filtered_resps={})
            for request, response in zip(document.requests, responses, strict=True)
        ]
        for ensemble in task._filters:
            ensemble.apply(copies)
        doc, values = document.requests[0].doc, {}
        for name in copies[0].filtered_resps:
            found = task.process_results(doc, [request.filtered_resps[name] for request in copies])
            values |= {f"{metric},{name}": plain(value) for metric, value in found.items()}
        key = self.metric_in(list(values), task)
        value = values[key]
        better = task.higher_is_better().get(key.partition(",")[0], True)
        score = float(value) if better and isinstance(value, int | float) else None
        return {"answers": [str(task.doc_to_target(doc))], "score": score, "metrics": values}

    def summarise(self) -> None:
        if not self.step_ms:
            raise ValueError("no token of this task goes through the cache: its prompts are single tokens")
        super().summarise()
        row, calls = self.row, self.lm.calls
        row.method_facts |= self.other
        row.prefill_tokens_per_s = sum(call.prompt_len for call in calls) / sum(self.prefill_ms) * 1000
        # prompts differ in length: the bound is the mean over all steps that were run
        weights = hf.weight_bytes_read(self.model, 1)
        read = statistics.fmean(weights + call.read_bytes for call in calls for _ in call.step_ms)
        row.bound_ms_per_step = read / (row.ceiling_gb_per_s * 1e9) * 1000
        row.bound_ratio = statistics.fmean(self.step_ms) / row.bound_ms_per_step
        row.achieved_gb_per_s = row.ceiling_gb_per_s / row.bound_ratio

    def summarise_samples(self) -> None:
        """Accuracy by lm-eval's evaluate() on the recorded responses."""
        row = self.row
        super().summarise_samples()
        if isinstance(self.method, Budgeted):
            row.num_noop = sum(line["noop"] for line in self.samples)
            if row.num_noop and "noop" not in row.flags:
                row.flags.append("partly_noop")
        row.metric, value, error, better = self.result(self.evaluate())
        if not math.isfinite(value):
            row.accuracy = row.accuracy_stderr = None
        elif better:
            row.accuracy, row.accuracy_stderr = value, error
        elif "perplexity" in row.metric:
            row.perplexity = value
        else:
            self.other = {row.metric: value}

    def evaluate(self) -> dict:
        """lm-eval's result of the recorded responses."""
        lines = {line["id"]: line["responses"] for line in self.samples}
        recorded = {
            (document.task, request.doc_id, request.idx): tuple(response) if isinstance(response, list) else response
            for (document,) in self.batches
            for request, response in zip(document.requests, lines[document.id], strict=True)
        }
        return evaluate(
            Recorded(recorded, self.lm),
            self.loaded_tasks,
            limit=self.task.num_samples,
            bootstrap_iters=BOOTSTRAP_ITERS,
            log_samples=False,
            apply_chat_template=self.task.chat_template,
            # load() has asked for the user's consent
            confirm_run_unsafe_code=True,
        )

    def result(self, found: dict) -> tuple[str, float, float | None, bool]:
        """Metric, value, standard error and whether more is better: of the task or group, or the mean over a tag's tasks."""
        tasks, groups = self.loaded_tasks["tasks"], self.loaded_tasks["groups"]
        children = {child for names in self.loaded_tasks["group_map"].values() for child in names}
        names = [name for name in groups if name not in children and found["results"].get(name, {}).keys() - {"alias", "name"}]
        names = [name for name in names if metrics_in(found["results"][name])] or list(tasks)
        # RULER's group aggregates one length only
        if self.has_length(*tasks, found=found) and not self.has_length(*names, found=found):
            names = list(tasks)
        keys = [self.metric_in(metrics_in(found["results"][name]), tasks.get(name)) for name in names]
        values = [float(found["results"][name][key]) for name, key in zip(names, keys, strict=True)]
        metric = keys[0].partition(",")[0]
        better = all(found["higher_is_better"].get(name, {}).get(metric, True) is not False for name in names)
        error = found["results"][names[0]].get(keys[0].replace(",", "_stderr,", 1)) if len(names) == 1 else None
        shown = "/".join(word for word in keys[0].split(",") if word != "none")
        return shown, statistics.fmean(values), error if isinstance(error, float) and math.isfinite(error) else None, better

    def has_length(self, *names: str, found: dict) -> bool:
        """Whether one of these tasks or groups has a metric that is named after this context's length."""
        return any(f"{self.lm.context_len}," in key for name in names for key in metrics_in(found["results"].get(name, {})))

    def metric_in(self, keys: list[str], task=None) -> str:
        """The key `metric,filter` of task.metric; by default of the context's length where metrics are named so, as RULER's
        are, else of the first in the task's metric_list."""
        if self.task.metric is None:
            listed = [entry.get("metric") for entry in (task and task.get_config("metric_list")) or ()]
            for name in (str(self.lm.context_len), *listed):
                if own := [key for key in keys if key.partition(",")[0] == name]:
                    return own[0]
        return choose_metric(keys, self.task.metric)

    def compare_with(self, full: Side) -> None:
        super().compare_with(full)
        by_task = [scores_by_task(side.samples or side.log.read().values()) for side in (self, full)]
        if len(by_task[0]) > 1 and (worst := worst_task(*by_task)):
            self.row.worst_task, self.row.worst_task_diff = worst


class Recorded(LM):
    """Gives lm-eval's evaluate() the responses that were recorded, by task, document and request."""

    def __init__(self, responses: dict, lm: EngineLM):
        super().__init__()
        self.responses = responses
        self.apply_chat_template, self.tokenizer_name_ = lm.apply_chat_template, lm.tokenizer_name

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer_name_

    def loglikelihood(self, requests) -> list:
        return [self.responses[request.task_name, request.doc_id, request.idx] for request in requests]

    loglikelihood_rolling = generate_until = loglikelihood


def metrics_in(results: dict) -> list[str]:
    """Keys `metric,filter` of lm-eval's results, without their errors."""
    return [key for key, value in results.items() if "," in key and "_stderr," not in key and isinstance(value, Real)]


def choose_metric(keys: list[str], wanted: str | None) -> str:
    """The key `metric,filter` that task.metric names as `metric` or `metric/filter`; the first without a wish."""
    if wanted is None:
        return keys[0]
    name = wanted.replace("/", ",")
    found = [key for key in keys if name in (key, key.partition(",")[0])]
    if not found:
        valid = ", ".join("/".join(word for word in key.split(",") if word != "none") for key in keys)
        raise ValueError(f"task.metric={wanted} is none of this task's metrics: {valid}")
    return found[0]


def plain(value):
    """What JSON can hold of a metric's value: lists for arrays and sets, None for what is no number, else its text."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in (sorted(value, key=repr) if isinstance(value, set) else value)]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def scores_by_task(lines) -> dict[str, dict[str, float]]:
    """Scores of log lines by task and sample id."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.get("score") is not None:
            found.setdefault(line["task"], {})[line["id"]] = line["score"]
    return found
