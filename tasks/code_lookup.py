"""Look up a value in source code: the default of a parameter, or what a function returns.

Run: `python run.py task=code_lookup question=hidden`.

The haystack is functions of this Python's library (tasks/library.py). The value that is asked for is replaced by a random
7-digit number that stands nowhere else: no model knows it from its weights. Other functions get such numbers too: finding a
number is not enough. The answer begins with the function's signature. Kinds take turns: `default`, and `return` for functions
that do nothing but return a value.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.base import Sample, Turn
from tasks.library import Function, Spot, functions, unique_names
from tasks.niah import draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, first_is, numbers

KINDS = ("default", "return")
MAX_ASKED_CHARS = 500
QUESTIONS = {
    "default": "\nWhat is the default value of the parameter {parameter} of the function {name} in the source code above?\n",
    "return": "\nWhat does the function {name} in the source code above return?\n",
}


@dataclass
class CodeLookup(Retrieval):
    """Retrieval of a number from the code of one function among many."""

    needle_word = "function"

    def draft(self, rng: random.Random, index: int) -> Draft:
        values = (value for _, value in draw_pairs(rng))
        kinds = [KINDS[(index + turn) % len(KINDS)] for turn in range(self.num_turns)]
        needles, asks, asked = [], [], []
        for kind in kinds:
            function, spot = rng.choice([pair for pair in _askable(kind) if pair[0].name not in asked])
            value = next(values)
            needles.append(_replaced(function, spot, value))
            asks.append(_ask(function, spot, value))
            asked.append(function.name)
        others = [function for function in functions() if function.name not in asked]
        rng.shuffle(others)
        return Draft(
            needles=needles,
            depths=[self.depth_of(index, turn) for turn in range(self.num_turns)],
            asks=asks,
            units=_distractors(others, values),
            meta={"kinds": kinds, "functions": asked},
        )

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return 1.0 if the first number in `text`, read whole, is the answer, else 0.0."""
        return first_is(numbers(text), turn.answers)


@functools.cache
def _askable(kind: str) -> list[tuple[Function, Spot]]:
    named = [function for function in functions() if function.name in unique_names()]
    short = [function for function in named if len(function.source) <= MAX_ASKED_CHARS]
    return [(function, spot) for function in short for spot in function.spots if spot.kind == kind]


def _replaced(function: Function, spot: Spot, value: str) -> str:
    return function.source[: spot.start] + value + function.source[spot.end :] + "\n\n"


def _ask(function: Function, spot: Spot, value: str) -> Ask:
    question = QUESTIONS[spot.kind].format(name=function.name, parameter=spot.parameter)
    if spot.kind == "return":
        return Ask(question, f"{function.signature}\n    return", [value])
    return Ask(question, function.source[: spot.start].rstrip(" "), [value])


def _distractors(others: list[Function], values: Iterator[str]) -> Iterator[str]:
    for function in others:
        value = next(values, None) if function.spots else None
        yield _replaced(function, function.spots[0], value) if value else function.source + "\n\n"
