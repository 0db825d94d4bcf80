"""Look up one key of a JSON object of UUIDs.

Run: `python run.py task=kv_retrieval question=hidden`.

The task of "Lost in the Middle" (arXiv 2307.03172); random keys and values share nothing with the text that a model knows, and
all pairs but one are distractors. The length is made exact by the end of one more pair, which stands before the object.
"""

import random
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.base import Sample, Turn
from tasks.retrieval import Ask, Draft, Retrieval, first_is

INTRO = "\n\nHere is a JSON object. Give the value of the key that is asked for.\n\n{\n"
OUTRO = ' "{key}": "{value}"\n}}\n'
PAIR = ' "{key}": "{value}",\n'
QUESTION = '\nWhat is the value of the key "{key}" in the JSON object?'
PREFIX = '\n "{key}": "'
# longer runs of hex digits and dashes are other words
UUID = re.compile(r"(?<![0-9a-f-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])")


@dataclass
class KvRetrieval(Retrieval):
    """Retrieval of a UUID by another UUID."""

    needle_word = "pair"
    max_answer_tokens: int = 48

    def draft(self, rng: random.Random, index: int) -> Draft:
        pairs = draw_pairs(rng)
        asked = [next(pairs) for _ in range(self.num_turns)]
        key, value = next(pairs)
        return Draft(
            needles=[PAIR.format(key=key, value=value) for key, value in asked],
            depths=[self.depth_of(index, turn) for turn in range(self.num_turns)],
            asks=[Ask(QUESTION.format(key=key), PREFIX.format(key=key), [value]) for key, value in asked],
            units=(PAIR.format(key=key, value=value) for key, value in pairs),
            intro=INTRO,
            outro=OUTRO.format(key=key, value=value),
        )

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return 1.0 if the first whole UUID in `text` is the value, else 0.0."""
        return first_is(UUID.findall(text), turn.answers)


def draw_pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield pairs of random UUIDs without end."""
    while True:
        yield tuple(str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
