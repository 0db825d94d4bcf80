"""What all retrieval tasks share: facts at chosen depths of an exactly filled context, questions seen or not.

A task says what a sample holds (`draft`) and how an answer is scored (`score`); lengths, depths, turns, the chat template
and what compression sees are settled here. Ids are joined, never text: each part is tokenised alone, so a part has the
same ids wherever it stands.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import ClassVar

from tasks.base import Sample, Task, Turn, fingerprint, require_at_least, require_full_length, require_option
from tasks.chat import chat_of
from tasks.corpus import corpus_of

# sign, thousands separators and decimals belong to a number
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Ask:
    """A question, the words that begin its answer (the model goes on from there), and the answers that are right."""

    question: str
    prefix: str
    answers: list[str]


@dataclass
class Draft:
    """What a sample says, whatever its length: the same for every context_len, so that lengths can be compared.

    `needles` must be there, at `depths` (0 the front, 1 the end) of the body; `asks` holds one question per turn, about
    the needles of the same numbers where `asked` depths are reported. The rest is filled with `units`, distractors that
    may be drawn without end, else with running text from `first_piece` (a share of the corpus) on.
    """

    needles: list[str]
    depths: list[float]
    asks: list[Ask]
    units: Iterator[str] | None = None
    first_piece: float = 0.0
    intro: str = ""
    outro: str = ""
    reports_depth: bool = True
    meta: dict = field(default_factory=dict)


@dataclass
class Retrieval(Task, ABC):
    """A task that asks for what is in its prompt.

    `question`: visible (the first question is in the prompt when it is compressed), hidden (fed afterwards; all ids
    together are the same) or two_turn (as visible, then a second question that compression has not seen).
    `chat_template`: auto (the tokenizer's own, where it has one) or none.
    `floor`: the accuracy that the full cache must reach before a comparison with it means anything.
    """

    mode: ClassVar[str] = "generate"
    needle_word: ClassVar[str] = "fact"
    num_samples: int = 8
    question: str = "visible"
    max_answer_tokens: int = 12
    floor: float = 0.9
    chat_template: str = "auto"

    def __post_init__(self):
        for name in ("num_samples", "max_answer_tokens", "num_turns"):
            require_at_least(f"task.{name}", getattr(self, name), 1)
        require_option("question", self.question, ("visible", "hidden", "two_turn"))
        require_option("task.chat_template", self.chat_template, ("auto", "none"))
        if not 0 <= self.floor <= 1:
            raise ValueError(f"task.floor={self.floor}: must be in [0, 1]")

    @property
    def num_turns(self) -> int:
        """How many questions a sample asks."""
        return 2 if self.question == "two_turn" else 1

    def require_one_question(self) -> None:
        """Raise a ValueError for two turns, for a task that has only one thing to ask."""
        if self.question == "two_turn":
            raise ValueError(f"question=two_turn: task={self.name} asks one question; use question=visible or question=hidden")

    @property
    def name(self) -> str:
        """Name of the task: that of its module."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def filler(self) -> str:
        """What fills the context, as it is named when it runs out."""
        return f"task={self.name}"

    @abstractmethod
    def draft(self, rng: random.Random, index: int) -> Draft:
        """Return what sample `index` says; every random choice comes from `rng`."""

    def samples(self, tokenizer, context_len: int, seed: int) -> list[Sample]:
        """Return samples whose prompt and first question together are exactly `context_len` ids, chat template included.

        ValueError if `context_len` cannot hold the facts and the question, or is longer than the filler can be.
        """
        # a string seed does not depend on PYTHONHASHSEED
        drafts = [self.draft(random.Random(f"{self.name}/{seed}/{i}"), i) for i in range(self.num_samples)]
        chat = chat_of(tokenizer, self.chat_template, self.num_turns)
        builders = [_Builder(tokenizer, chat, draft) for draft in drafts]
        shortest = max(builder.num_fixed for builder in builders)
        if context_len < shortest:
            need = f"{len(drafts[0].needles)} {self.needle_word}(s) and the question need"
            raise ValueError(f"context_len={context_len} is too short: {need} at least {shortest}")
        samples = [self._sample(builder, context_len, f"{self.name}-{seed}-{i}") for i, builder in enumerate(builders)]
        require_full_length(samples, context_len, context_len, self.filler)
        return samples

    def _sample(self, builder: "_Builder", context_len: int, sample_id: str) -> Sample:
        draft = builder.draft
        prompt, depths, num_distractors = builder.fill(context_len - builder.num_fixed)
        first, *later = builder.turns
        prompt, forced = (prompt, first) if self.question == "hidden" else (prompt + first, [])
        meta = {"depths": depths[: len(draft.asks)]} if draft.reports_depth else {}
        meta |= draft.meta | {"num_needles": len(draft.needles), "num_distractors": num_distractors}
        meta |= fingerprint(prompt, forced + list(chain.from_iterable(later)))
        turns = [Turn(ids, ask.answers, self.max_answer_tokens) for ids, ask in zip(later, draft.asks[1:], strict=True)]
        return Sample(sample_id, prompt, forced, draft.asks[0].answers, self.max_answer_tokens, meta, turns)

    def depth_of(self, index: int, turn: int = 0) -> float:
        """Return the depth of what sample `index` is asked for: evenly spread over samples, and over a sample's turns."""
        return ((index + 0.5) / self.num_samples + turn / self.num_turns) % 1


class _Builder:
    """A draft in ids."""

    def __init__(self, tokenizer, chat, draft: Draft):
        self.tokenizer, self.draft = tokenizer, draft
        self.head, self.intro, self.outro = chat.head, self.encode(draft.intro), self.encode(draft.outro)
        self.needles = [self.encode(text) for text in draft.needles]
        self.turns = [self.encode(ask.question) + chat.to_answer + self.encode(ask.prefix) for ask in draft.asks]
        self.turns[1:] = [chat.to_question + ids for ids in self.turns[1:]]
        parts = (self.head, self.intro, *self.needles, self.outro, self.turns[0])
        self.num_fixed = sum(map(len, parts))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def fill(self, num_tokens: int) -> tuple[list[int], list[float], int]:
        """Return the ids before the first question, the depth of each needle and the number of whole distractors."""
        if self.draft.units is None:
            corpus = corpus_of(self.tokenizer)
            haystack = corpus.running_ids(num_tokens, int(self.draft.first_piece * corpus.num_pieces))
            breaks = [i + 1 for i, token in enumerate(haystack) if corpus.ends_line(token)]
            rest, num_units = [], 0
        else:
            units, total = [], 0
            while total < num_tokens and (unit := next(self.draft.units, None)) is not None:
                units.append(self.encode(unit))
                total += len(units[-1])
            # the front is cut off to make the length exact; what is left of a cut unit stands before the intro
            rest, cut = [], total - num_tokens
            while cut > 0:
                first = units.pop(0)
                rest, cut = first[cut:], cut - len(first)
            haystack, breaks, num_units = list(chain.from_iterable(units)), [0, *accumulate(map(len, units))], len(units)
        body, starts = _insert(self.needles, self.draft.depths, haystack, breaks)
        spans = [max(1, len(body) - len(needle)) for needle in self.needles]
        # 0 = nothing before the fact, 1 = nothing between it and the question
        depths = [round(start / span, 4) for start, span in zip(starts, spans, strict=True)]
        return self.head + rest + self.intro + body + self.outro, depths, num_units


def _insert(
    needles: list[list[int]], depths: list[float], haystack: list[int], breaks: list[int]
) -> tuple[list[int], list[int]]:
    """Put each needle at the break of `haystack` nearest to its depth; return the body and where each needle starts."""
    targets = [depth * len(haystack) for depth in depths]
    places = [min(breaks, key=lambda place: abs(place - target), default=round(target)) for target in targets]
    body, done, starts = [], 0, [0] * len(needles)
    for place, index in sorted((place, index) for index, place in enumerate(places)):
        body += haystack[done:place]
        done = place
        starts[index] = len(body)
        body += needles[index]
    return body + haystack[done:], starts


def numbers(text: str) -> list[str]:
    """Return the numbers in `text`, each read whole: "1,234,567" is 1234567, while "1234567.5" and "-1234567" stay so."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def first_is(found: list[str], answers: list[str]) -> float:
    """Return 1.0 if the first thing found is one of the answers, else 0.0."""
    return float(bool(found) and found[0] in answers)


def share_found(found: list[str], answers: list[str]) -> float:
    """Return the share of `answers` among as many distinct first finds: listing everything does not pay."""
    return len(set(list(dict.fromkeys(found))[: len(answers)]) & set(answers)) / len(answers)
