"""Any lm-eval task, by name or from a task file, answered through the cache.

Run: `python run.py task=lm_eval task.name=gsm8k` (needs the Hugging Face hub once), `task.name=folder/mytask.yaml`, or a named
task with its documents from a file: `task.name=gsm8k task.data=gsm8k.jsonl`.

Prompts, few-shot examples, filters and metrics are lm-eval's own; with `full` the result is that of its command line.
"""

import functools
import hashlib
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from tasks.base import Sample, Task, require_at_least

FEWSHOT_SEED = 1234  # lm-eval's default; the harness's seed is added to it


@dataclass(frozen=True)
class Document(Sample):
    """One document: all its lm-eval requests. `prompt_ids` is its longest prompt."""

    requests: list = field(default_factory=list)
    max_new_tokens: int = 0
    max_prompt_len: int = 0
    task: str = ""


@dataclass
class LmEval(Task):
    """lm-eval's tasks.

    `name`: task, group or tag of lm-eval, or the path of a task yaml. `data`: local json lines in place of the hub's data set;
    few-shot examples then come from it too. `num_samples`: documents per task, null for all. `metric`: what becomes the row's
    accuracy, as `acc` or `exact_match/strict-match`; the task's first by default. `num_fewshot`: null for the task's own.
    """

    mode: ClassVar[str] = "lm_eval"
    unread: ClassVar[tuple[str, ...]] = ("shape.num_new_tokens",)
    name: str = ""
    data: str | None = None
    num_samples: int | None = 32
    metric: str | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    floor: float = 0.0

    def __post_init__(self):
        if self.num_samples is not None:
            require_at_least("task.num_samples", self.num_samples, 1)
        if self.num_fewshot is not None:
            require_at_least("task.num_fewshot", self.num_fewshot, 0)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"task.floor={self.floor}: must be in [0, 1]")

    def check(self, shape) -> None:
        """What can be known before any weights are loaded; ValueError with one line."""
        if not self.name:
            raise ValueError("task.name is empty: give an lm-eval task or the path of a task yaml, as in task.name=gsm8k")
        if shape.batch_size != 1:
            raise ValueError(
                f"shape.batch_size={shape.batch_size}: task=lm_eval gives each prompt a budget of its own length, one at "
                "a time; use shape.batch_size=1"
            )
        for key, path in (("task.name", self.name if self.is_file else None), ("task.data", self.data)):
            if path and not Path(path).is_file():
                raise ValueError(f"{key}={path}: there is no such file")

    @property
    def is_file(self) -> bool:
        """Whether `name` is a task file rather than a name."""
        return self.name.endswith((".yaml", ".yml"))

    def versions(self) -> dict[str, str]:
        """What the result depends on besides the configuration: lm-eval and the content of local files."""
        from importlib.metadata import version

        found = {"lm_eval": version("lm_eval")}
        paths = [Path(self.data)] if self.data else []
        if self.is_file:
            folder = Path(self.name).resolve().parent
            paths += sorted(path for kind in ("*.yaml", "*.py", "*.json", "*.jsonl") for path in folder.glob(kind))
        if paths:
            digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.is_file()))
            found["task_files"] = digest.hexdigest()[:12]
        return found

    def load(self, tokenizer: str = "", context_len: int = 1024, seed: int = 0) -> dict:
        """lm-eval's tasks and groups with their data; ValueError of one line: unknown name, hub out of reach.

        Args:
            tokenizer: folder or hub id; tasks that make their own prompts, as RULER's do, fill `context_len` of its tokens.
        """
        if self.is_file:
            path = Path(self.name).resolve()
            manager = task_manager(str(path.parent), tokenizer, context_len, seed)
            name = next((name for name, entry in manager.task_index.items() if entry.yaml_path == path), None)
            if name is None:
                raise ValueError(
                    f"task.name={self.name} is no lm-eval task file: it needs a line task: <name>, its own in the folder"
                )
        else:
            manager, name = task_manager(None, tokenizer, context_len, seed), self.name
            if name not in manager.all_tasks:
                raise ValueError(unknown_name(name, manager.all_tasks))
        # as lm-eval's simple_evaluate does; both sides of a cell must draw the same documents
        random.seed(seed)
        np.random.seed(FEWSHOT_SEED + seed)
        try:
            loaded = manager.load([name] if self.data is None else [self._from_file(manager, name)])
        except Exception as err:
            raise ValueError(why_not(self, err)) from err
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) and os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
                raise ValueError(f"{name} runs code that the model writes: allow that with HF_ALLOW_CODE_EVAL=1")
            self._set_fewshot(task)
        return loaded

    def _from_file(self, manager, name: str) -> dict:
        """The task's own settings with `data` in place of its data set."""
        if name not in manager.all_subtasks:
            raise ValueError(f"task.data={self.data}: {name} is a group of tasks; give the name of one task")
        from lm_eval.tasks._yaml_loader import load_yaml

        own = load_yaml(manager.task_index[name].yaml_path)
        splits = {own[key] for key in ("test_split", "validation_split", "training_split", "fewshot_split") if own.get(key)}
        scored = own.get("test_split") or own.get("validation_split") or "test"
        data_files = {split: str(Path(self.data).resolve()) for split in splits | {scored}}
        # few-shot examples from the split that is scored: lm-eval then leaves out the document that is asked
        own |= {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": data_files}}
        return own | {"fewshot_split": scored}

    def _set_fewshot(self, task) -> None:
        """As lm-eval's simple_evaluate does it."""
        own = task.get_config("num_fewshot")
        if self.num_fewshot is not None and own != 0:
            task.set_config("num_fewshot", self.num_fewshot)
        elif own is None:
            task.set_config("num_fewshot", 0)

    def documents(self, loaded: dict, lm, seed: int) -> list[Document]:
        """All documents with their requests, the longest prompt first."""
        from lm_eval.evaluator_utils import get_sample_size

        documents = []
        for name, task in loaded["tasks"].items():
            task.set_fewshot_seed(seed=FEWSHOT_SEED + seed)
            task.build_all_requests(limit=get_sample_size(task, self.num_samples), **self.prompt_options(lm))
            requests: dict[int, list] = {}
            for request in task.instances:
                requests.setdefault(request.doc_id, []).append(request)
            for doc_id, own in requests.items():
                # lm-eval hands the responses to the task in this order
                documents.append(self._document(name, doc_id, sorted(own, key=lambda request: request.idx), lm))
        if not any(document.prompt_ids for document in documents):
            raise ValueError(f"task.name={self.name} has nothing to score: no document, or empty ones")
        return sorted(documents, key=lambda document: -document.max_prompt_len)

    def prompt_options(self, lm) -> dict:
        """How lm-eval builds prompts."""
        if not self.chat_template:
            return {}
        return {"apply_chat_template": True, "chat_template": lm.apply_chat_template, "tokenizer_name": lm.tokenizer_name}

    def _document(self, name: str, doc_id: int, requests: list, lm) -> Document:
        shapes = lm.shapes(requests)
        # lm-eval scores an empty text of a rolling task 0 and asks for nothing
        longest = max((prompt for prompt, _ in shapes), key=len, default=[])
        content = repr([(request.request_type, request.args) for request in requests])
        meta = {
            "task": name,
            "prompt_sha": hashlib.sha256(content.encode()).hexdigest()[:16],
            "first_ids": longest[:8],
            "prompt_len": len(longest),
        }
        return Document(
            id=f"{name}-{doc_id}",
            prompt_ids=longest,
            meta=meta,
            requests=requests,
            max_new_tokens=max((num_new for _, num_new in shapes), default=0),
            max_prompt_len=len(longest),
            task=name,
        )


@functools.cache
def task_manager(folder: str | None, tokenizer: str, context_len: int, seed: int):
    """lm-eval's index of a folder's task files, or of its own: the latter takes seconds, and both sides of a cell need it."""
    from lm_eval.tasks import TaskManager

    # max_seq_lengths: RULER's word; the others are those of tasks/lm_eval_files
    made = {"tokenizer": tokenizer, "max_seq_lengths": [context_len], "context_len": context_len, "seed": seed}
    return TaskManager(include_path=folder, include_defaults=folder is None, metadata=made)


def unknown_name(name: str, known: list[str]) -> str:
    """One line with the nearest names."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=3, cutoff=0.6)
    guess = f": did you mean {' or '.join(near)}?" if near else "."
    return f"task.name={name} is no task of lm-eval{guess} A task file is given by its path, ending in .yaml"


def why_not(task: LmEval, err: Exception) -> str:
    """One line for a task that cannot be loaded."""
    chain, cause = [], err
    while cause is not None and len(chain) < 8:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = " ".join(f"{type(cause).__name__}: {cause}" for cause in chain)
    if isinstance(err, ModuleNotFoundError):
        return f"task.name={task.name} needs a package that is missing: {err.name}; pip install {err.name}"
    offline = ("offline", "couldn't reach", "connection", "localentrynotfound", "resolve", "timed out", "hub")
    if task.data is None and any(word in text.lower() for word in offline):
        return (
            f"task.name={task.name} takes its data from the Hugging Face hub, which is out of reach; run once with network, or "
            "give the documents as task.data=<file.jsonl>"
        )
    if any(isinstance(cause, StopIteration) for cause in chain):
        return f"task.{'data' if task.data else 'name'}={task.data or task.name} has no documents"
    said = dict.fromkeys(" ".join(str(cause).split())[:300] or type(cause).__name__ for cause in (err, chain[-1]))
    return f"task.name={task.name} cannot be loaded: {'; '.join(said)}"
