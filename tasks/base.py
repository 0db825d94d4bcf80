"""What a task gives the engine: ids to prefill, ids to feed after compression, and how to score what comes out.

A task is one dataclass whose fields are its knobs and its Hydra schema. To add one, write `tasks/<name>.py` with a
subclass of `Task` and `conf/task/<name>.yaml`; `python run.py task=<name>` finds it.
"""

import difflib
import hashlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

FREE = -1  # in a script: here the model speaks


@dataclass(frozen=True)
class Turn:
    """One exchange after the first: `forced_ids` are fed, then at most `max_answer_tokens` are decoded and scored."""

    forced_ids: list[int]
    answers: list[str]
    max_answer_tokens: int


@dataclass(frozen=True)
class Sample:
    """One prompt. `prompt_ids` are compressed by the method; `forced_ids` go through the decode path afterwards.

    `later` holds the turns after the first, all answered from the cache that the prompt was compressed into.
    """

    id: str
    prompt_ids: list[int]
    forced_ids: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    max_answer_tokens: int = 0
    meta: dict = field(default_factory=dict)
    later: list[Turn] = field(default_factory=list)

    @property
    def turns(self) -> list["Sample | Turn"]:
        """All turns, the sample itself as the first."""
        return [self, *self.later]

    def script(self) -> tuple[list[int], list[int]]:
        """What is fed after the prompt up to the last answer, FREE for each decoded token; where each answer begins."""
        ids = list(self.forced_ids)
        starts = [len(ids)]
        for before, turn in pairwise(self.turns):
            ids += [FREE] * before.max_answer_tokens + turn.forced_ids
            starts.append(len(ids))
        return ids, starts


class Task:
    """Base of all tasks. `mode`: "generate" (answer, then `score`), "score" (logprobs of `forced_ids`) or "speed"."""

    mode: ClassVar[str]
    unread: ClassVar[tuple[str, ...]] = ()  # values of other groups that mean nothing here: giving them is a warning
    num_samples: int
    num_turns: int = 1

    def samples(self, tokenizer, context_len: int, seed: int) -> list[Sample]:
        """Return `num_samples` samples, always the same for the same (fields, tokenizer, context_len, seed).

        ValueError if `context_len` is too short or too long for the task; the message names the limit.
        """
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        """Versions of what samples and scores depend on besides the configuration, such as the content of a local file."""
        return {}

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return the accuracy of a generated `text` in [0, 1]; `turn` is the sample or one of its later turns."""
        raise NotImplementedError(f"{type(self).__name__} has no accuracy")

    def parts(self, turn: Sample | Turn, text: str) -> dict[str, float]:
        """Return the scores of parts of `text` that are reported apart, by name; none where the score says all."""
        return {}


def require_full_length(samples: list[Sample], num_tokens: int, context_len: int, cause: str) -> None:
    """Raise a ValueError that names the greatest possible context_len if a sample holds fewer than `num_tokens` ids."""
    missing = num_tokens - min(len(sample.prompt_ids) + len(sample.forced_ids) for sample in samples)
    if missing:
        raise ValueError(f"context_len={context_len} is too long: {cause} can fill at most {context_len - missing}")


def breakdown(sample: Sample, scores: list[float]) -> list[tuple[str, float]]:
    """Return the groups in which the scores of a sample's turns are reported apart: turn, quarter of depth, kind."""
    groups = [(f"turn_{number}", score) for number, score in enumerate(scores, 1)] if sample.later else []
    for depth, score in zip(sample.meta.get("depths", []), scores, strict=False):
        quarter = min(int(depth * 4), 3)
        groups.append((f"depth_{quarter / 4:.2f}_{(quarter + 1) / 4:.2f}", score))
    if "kinds" in sample.meta:
        groups += [(f"kind_{kind}", score) for kind, score in zip(sample.meta["kinds"], scores, strict=True)]
    return groups


def leading_ids(tokenizer) -> list[int]:
    """Return `[bos]` if the tokenizer itself begins every text with it, else `[]`: never two."""
    return [i for i in tokenizer.encode("", add_special_tokens=True) if i == tokenizer.bos_token_id][:1]


def fingerprint(prompt_ids: list[int], forced_ids: list[int]) -> dict:
    """Return what identifies a sample in a result: the hash of all its ids, forced ones included, and the first 8."""
    ids = prompt_ids + forced_ids
    return {"prompt_sha": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16], "first_ids": ids[:8]}


def require_option(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Raise a ValueError that names the nearest of `valid` unless `value` is one of them."""
    if value not in valid:
        nearest = max(valid, key=lambda v: difflib.SequenceMatcher(None, v, str(value)).ratio())
        raise ValueError(f"{name}={value}: did you mean {name}={nearest}? Valid: {', '.join(valid)}")


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise a ValueError unless `value` reaches `least`."""
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")
