"""Several instructions, spread over a text, are to be carried out in one answer; each is scored apart.

Run: `python run.py task=multi_instruction question=hidden`.

Compression may forget some instructions and keep others (arXiv 2510.00231): the row's `accuracy_by` has one accuracy each, and
instruction i always stands at the same depth, (i - 0.5) / num_instructions.
"""

import random
from dataclasses import dataclass

from tasks.base import Sample, Turn, require_at_least
from tasks.niah import draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, numbers, share_found

FACT = "\nInstruction {i}: write down the number {value}.\n"
QUESTION = "\nCarry out the {num} instructions of the text above, one after the other."
PREFIX = " The numbers to write down by all {num} instructions are"


@dataclass
class MultiInstruction(Retrieval):
    """The score is the share of instructions that were carried out, in any order."""

    needle_word = "instruction"
    num_instructions: int = 4
    max_answer_tokens: int = 64

    def __post_init__(self):
        super().__post_init__()
        self.require_one_question()
        require_at_least("task.num_instructions", self.num_instructions, 2)

    def draft(self, rng: random.Random, index: int) -> Draft:
        values = [value for (_, value), _ in zip(draw_pairs(rng), range(self.num_instructions), strict=False)]
        num = len(values)
        return Draft(
            needles=[FACT.format(i=i, value=value) for i, value in enumerate(values, 1)],
            depths=[(i + 0.5) / num for i in range(num)],
            asks=[Ask(QUESTION.format(num=num), PREFIX.format(num=num), values)],
            first_piece=rng.random(),
            reports_depth=False,
        )

    def parts(self, turn: Sample | Turn, text: str) -> dict[str, float]:
        """Return for each instruction whether its number, read whole, is among as many distinct numbers of `text`."""
        said = list(dict.fromkeys(numbers(text)))[: len(turn.answers)]
        return {f"instruction_{i}": float(answer in said) for i, answer in enumerate(turn.answers, 1)}

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return the share of instructions that were carried out."""
        return share_found(numbers(text), turn.answers)
