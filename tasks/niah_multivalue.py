"""Needle in a haystack with several values for one key: all of them are asked for.

Run: `python run.py task=niah_multivalue question=hidden`.

RULER's multivalue (arXiv 2404.06654), with running text of this machine's Python as the haystack instead of essays, and
values that count only among the first `num_values` numbers of the answer.
"""

import random
from dataclasses import dataclass

from tasks.base import Sample, Turn, require_at_least
from tasks.niah import FACT, PREFIX_ALL, QUESTION_ALL, draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, numbers, share_found


@dataclass
class NiahMultivalue(Retrieval):
    """Retrieval of all `num_values` numbers of a key; the score is the share that is found."""

    num_values: int = 4
    max_answer_tokens: int = 64

    def __post_init__(self):
        super().__post_init__()
        require_at_least("task.num_values", self.num_values, 1)

    def draft(self, rng: random.Random, index: int) -> Draft:
        pairs = draw_pairs(rng)
        asks, needles = [], []
        for _ in range(self.num_turns):
            drawn = [next(pairs) for _ in range(self.num_values)]
            key, values = drawn[0][0], [value for _, value in drawn]
            asks.append(Ask(QUESTION_ALL.format(keys=key), PREFIX_ALL.format(keys=key), values))
            needles += [FACT.format(key=key, value=value) for value in values]
        depths = [rng.random() for _ in needles]
        return Draft(needles, depths, asks, first_piece=rng.random(), reports_depth=False)

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return the share of the values among the first `num_values` distinct numbers of `text`, each read whole."""
        return share_found(numbers(text), turn.answers)
