"""Several instructions, spread over a text, are to be carried out in one answer; each is scored apart.

Run: `python run.py task=multi_instruction question=hidden`.

Compression may forget some instructions and keep others (arXiv 2510.00231): the row's `accuracy_by` has one accuracy each, and
instruction i always stands at the same depth, (i - 0.5) / num_instructions.
"""

import random
from dataclasses import dataclass

from tasks.base import Sample, Turn, require_at_least
from tasks.niah import draw_pairs
from tasks.retrieval import Ask, Draft, Retrieval, numbers

# two sorts of things to write, in turn
FACTS = ("\nInstruction {i}: write down the number {value}.\n", "\nInstruction {i}: write down the name {key}.\n")
QUESTION = "\nNow carry out the {num} instructions of the text above, one after the other.\n"
PREFIX = "Instruction 1: write down the number"


@dataclass
class MultiInstruction(Retrieval):
    """The score is the share of instructions that were carried out, in any order."""

    needle_word = "instruction"
    num_instructions: int = 4
    max_answer_tokens: int = 96

    def __post_init__(self):
        super().__post_init__()
        self.require_one_question()
        require_at_least("task.num_instructions", self.num_instructions, 2)

    def draft(self, rng: random.Random, index: int) -> Draft:
        pairs = [pair for pair, _ in zip(draw_pairs(rng), range(self.num_instructions), strict=False)]
        needles = [FACTS[i % 2].format(i=i + 1, key=key, value=value) for i, (key, value) in enumerate(pairs)]
        answers = [pair[1 - i % 2] for i, pair in enumerate(pairs)]
        return Draft(
            needles=needles,
            depths=[(i + 0.5) / len(pairs) for i in range(len(pairs))],
            asks=[Ask(QUESTION.format(num=len(pairs)), PREFIX, answers)],
            first_piece=rng.random(),
            reports_depth=False,
        )

    def parts(self, turn: Sample | Turn, text: str) -> dict[str, float]:
        """Return for each instruction whether what it wants is in `text`, as a whole number or a whole name."""
        said = {*numbers(text), *text.replace(".", " ").replace(",", " ").split()}
        return {f"instruction_{i}": float(answer in said) for i, answer in enumerate(turn.answers, 1)}

    def score(self, turn: Sample | Turn, text: str) -> float:
        parts = self.parts(turn, text)
        return sum(parts.values()) / len(parts)
