"""A pass key in a haystack of the same few sentences again and again.

Run: `python run.py task=passkey question=hidden`.

The task of Mohtashami and Jaggi (arXiv 2305.16300). A second turn asks for a second secret, the door code.
"""

import random
from dataclasses import dataclass
from itertools import repeat

from tasks.base import Sample, Turn
from tasks.retrieval import Ask, Draft, Retrieval, first_is, numbers

INTRO = (
    "There is important information hidden inside a lot of irrelevant text. Find it and memorize it."
    " You will be asked about it.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
FACT = "The {secret} is {value}. Remember it. {value} is the {secret}.\n"
QUESTION = "\nWhat is the {secret}?"
PREFIX = " The {secret} is"


@dataclass
class Passkey(Retrieval):
    """Retrieval of a 5-digit number."""

    def draft(self, rng: random.Random, index: int) -> Draft:
        secrets = ("pass key", "door code")[: self.num_turns]
        values = [str(value) for value in rng.sample(range(10**4, 10**5), len(secrets))]
        pairs = list(zip(secrets, values, strict=True))
        return Draft(
            needles=[FACT.format(secret=secret, value=value) for secret, value in pairs],
            depths=[self.depth_of(index, turn) for turn in range(self.num_turns)],
            asks=[Ask(QUESTION.format(secret=secret), PREFIX.format(secret=secret), [value]) for secret, value in pairs],
            units=repeat(FILLER),
            intro=INTRO,
        )

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return 1.0 if the first number in `text`, read whole, is the answer, else 0.0."""
        return first_is(numbers(text), turn.answers)
