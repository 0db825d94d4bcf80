"""Variables assigned to each other in a chain across the text: all that hold one value are asked for.

Run: `python run.py task=variable_tracking question=hidden`.

RULER's variable tracking (arXiv 2404.06654). It differs in the haystack, running text of this machine's Python instead of one
sentence repeated, in having no worked example in front, and in counting as many names as there are answers and no more.
"""

import random
import re
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase

from tasks.base import Sample, Turn, require_at_least
from tasks.niah import draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, share_found

VALUE = "\nVAR {name} = {value}\n"
COPY = "\nVAR {name} = VAR {other}\n"
QUESTION = "\nFind all variables that are assigned the value {value} in the text above, directly or through other variables."
PREFIX = " {num} variables are assigned the value {value}, they are:"
NAME = re.compile(r"(?<![A-Za-z0-9_])[A-Z]{5}(?![A-Za-z0-9_])")


@dataclass
class VariableTracking(Retrieval):
    """Each of `num_chains` values goes through `num_hops` copies; the score is the share of a chain's variables found."""

    needle_word = "assignment"
    num_chains: int = 1
    num_hops: int = 4
    max_answer_tokens: int = 48

    def __post_init__(self):
        super().__post_init__()
        require_at_least("task.num_chains", self.num_chains, 1)
        require_at_least("task.num_hops", self.num_hops, 1)

    def draft(self, rng: random.Random, index: int) -> Draft:
        names = _draw_names(rng, max(self.num_chains, self.num_turns), self.num_hops + 1)
        pairs = draw_pairs(rng)
        needles, depths, asks = [], [], []
        for chain in names:
            _, value = next(pairs)
            needles.append(VALUE.format(name=chain[0], value=value))
            needles += [COPY.format(name=name, other=other) for other, name in pairwise(chain)]
            # a variable is assigned before it is copied
            depths += sorted(rng.random() for _ in chain)
            asks.append(Ask(QUESTION.format(value=value), PREFIX.format(value=value, num=len(chain)), chain))
        return Draft(needles, depths, asks[: self.num_turns], first_piece=rng.random(), reports_depth=False)

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return the share of the chain's names among as many distinct names of `text`, read whole."""
        return share_found(NAME.findall(text), turn.answers)


def _draw_names(rng: random.Random, num_chains: int, length: int) -> list[list[str]]:
    """Return chains of distinct names of five capital letters."""
    drawn: dict[str, None] = {}
    while len(drawn) < num_chains * length:
        drawn["".join(rng.choices(ascii_uppercase, k=5))] = None
    names = list(drawn)
    return [names[i * length : (i + 1) * length] for i in range(num_chains)]
