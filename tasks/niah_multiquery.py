"""Needle in a haystack with several questions at once: the numbers of several keys are asked for in one answer.

Run: `python run.py task=niah_multiquery question=hidden`.

RULER's multiquery (arXiv 2404.06654), with running text of this machine's Python as the haystack instead of essays, and
numbers that count only among the first `num_queries` of the answer, in any order.
"""

import random
from dataclasses import dataclass

from tasks.base import Sample, Turn, require_at_least
from tasks.niah import FACT, PREFIX_ALL, QUESTION_ALL, draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, numbers, share_found


@dataclass
class NiahMultiquery(Retrieval):
    """Retrieval of the numbers of `num_queries` keys; the score is the share that is found."""

    num_queries: int = 4
    max_answer_tokens: int = 64

    def __post_init__(self):
        super().__post_init__()
        require_at_least("task.num_queries", self.num_queries, 2)

    def draft(self, rng: random.Random, index: int) -> Draft:
        pairs = draw_pairs(rng)
        asks, needles = [], []
        for _ in range(self.num_turns):
            facts = [next(pairs) for _ in range(self.num_queries)]
            *most, last = (key for key, _ in facts)
            keys = f"{', '.join(most)} and {last}"
            values = [value for _, value in facts]
            asks.append(Ask(QUESTION_ALL.format(keys=keys), PREFIX_ALL.format(keys=keys), values))
            needles += [FACT.format(key=key, value=value) for key, value in facts]
        depths = [rng.random() for _ in needles]
        return Draft(needles, depths, asks, first_piece=rng.random(), reports_depth=False)

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return the share of the numbers among the first `num_queries` distinct ones of `text`, each read whole."""
        return share_found(numbers(text), turn.answers)
