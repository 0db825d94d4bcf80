"""Several questions one after the other, each about another fact, all answered from the cache of one compressed prompt.

Run: `python run.py task=multi_turn task.num_turns=5`.

Compression has seen the first question at most, as in SCBench's multi-request mode (arXiv 2412.10319). Later questions and
answers come on top of context_len: the cache grows by them.
"""

from dataclasses import dataclass

from tasks.niah import Niah


@dataclass
class MultiTurn(Niah):
    """`task=niah` with `num_turns` questions, scored apart as turn_1, turn_2, ..."""

    num_turns: int = 5

    def __post_init__(self):
        super().__post_init__()
        if self.question == "two_turn":
            raise ValueError("question=two_turn: use task.num_turns=2 with question=visible, or question=hidden")
