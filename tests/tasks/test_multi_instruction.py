"""Each instruction stands once, at its own depth, and is scored for itself."""

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.multi_instruction import MultiInstruction

BYTES = ByteTokenizer()


@pytest.mark.parametrize("num_instructions", [2, 4, 7])
def test_instructions_are_spread_in_order(num_instructions):
    for sample in MultiInstruction(num_instructions=num_instructions).samples(BYTES, 8001, 0):
        text = BYTES.decode(sample.prompt_ids)
        for i, answer in enumerate(sample.answers):
            words = f"\nInstruction {i + 1}: write down the number {answer}.\n"
            assert text.count(words) == text.count(answer) == 1
            assert text.index(words) / len(text) == pytest.approx((i + 0.5) / num_instructions, abs=0.1)
        assert text.endswith(f" The numbers to write down by all {num_instructions} instructions are")


@pytest.mark.parametrize(
    ("text", "done"),
    [
        (" 1111111 and 2,222,222.", (1, 1)),
        (" 2222222, 1111111", (1, 1)),
        (" 3333333, 1111111, 2222222", (1, 0)),
        (" 11111112 -2222222", (0, 0)),
        (" 2222222 2222222", (0, 1)),
        ("", (0, 0)),
    ],
)
def test_each_is_scored_apart(text, done):
    task, sample = MultiInstruction(num_instructions=2), Sample("s", [], answers=["1111111", "2222222"])
    assert task.parts(sample, text) == {"instruction_1": done[0], "instruction_2": done[1]}
    assert task.score(sample, text) == sum(done) / 2


def test_one_instruction_is_not_several():
    with pytest.raises(ValueError, match=r"^task.num_instructions=1: must be at least 2$"):
        MultiInstruction(num_instructions=1)
