"""The most common words of a long list: no single place holds the answer, all of the list does.

Run: `python run.py task=common_words question=hidden`.

RULER's common words extraction (arXiv 2404.06654). It differs in taking words from this Python's documentation (pairs of words
once they run out), one a line without numbers, in having no worked example in front, and in repeats that fit short contexts:
`common_repeats` and `uncommon_repeats`.
"""

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from tasks.base import Sample, Turn, require_at_least
from tasks.corpus import text
from tasks.niah import draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, share_found

INTRO = "\n\nBelow is a list of words. Some of them appear more often than the others.\n"
QUESTION = "\nWhat are the {num} most common words in the list above?"
PREFIX = " The {num} words that appear most often in the list are:"
WORD = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")
BLOCK = 40  # words whose repeats are shuffled together


@dataclass
class CommonWords(Retrieval):
    """Aggregation: the score is the share of the `num_common` most common words that is found."""

    needle_word = "word"
    num_common: int = 5
    common_repeats: int = 10
    uncommon_repeats: int = 2
    max_answer_tokens: int = 48
    floor: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        self.require_one_question()
        require_at_least("task.num_common", self.num_common, 1)
        require_at_least("task.uncommon_repeats", self.uncommon_repeats, 1)
        require_at_least("task.common_repeats", self.common_repeats, self.uncommon_repeats + 1)

    def draft(self, rng: random.Random, index: int) -> Draft:
        drawn = rng.sample(plain_words(), len(plain_words()))
        common, others = drawn[: self.num_common], drawn[self.num_common :]
        return Draft(
            needles=[word + "\n" for word in common for _ in range(self.common_repeats)],
            depths=[rng.random() for _ in range(self.num_common * self.common_repeats)],
            asks=[Ask(QUESTION.format(num=len(common)), PREFIX.format(num=len(common)), common)],
            units=self._uncommon(rng, chain(others, (pair for pair, _ in draw_pairs(rng)))),
            intro=INTRO,
            reports_depth=False,
        )

    def _uncommon(self, rng: random.Random, words: Iterator[str]) -> Iterator[str]:
        while block := list(islice(words, BLOCK)) * self.uncommon_repeats:
            rng.shuffle(block)
            yield from (word + "\n" for word in block)

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return the share of the common words among as many distinct words of `text`, in any case and order."""
        return share_found([word.lower() for word in WORD.findall(text)], turn.answers)


@functools.cache
def plain_words() -> list[str]:
    """Return the lower-case words of 4 to 8 letters that the corpus has at least 5 times, sorted."""
    counts: dict[str, int] = {}
    for word in re.findall(r"(?<![A-Za-z_.])[a-z]{4,8}(?![A-Za-z_.(])", text()):
        counts[word] = counts.get(word, 0) + 1
    return sorted(word for word, count in counts.items() if count >= 5)
