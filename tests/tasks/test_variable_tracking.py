"""Executing the assignments gives the answer."""

import re

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.variable_tracking import VariableTracking

BYTES = ByteTokenizer()


@pytest.mark.parametrize("knobs", [{}, {"num_chains": 3, "num_hops": 2}, {"question": "two_turn"}], ids=str)
def test_executing_the_text_gives_the_answer(knobs):
    for sample in VariableTracking(**knobs).samples(BYTES, 3001, 0):
        text = BYTES.decode(sample.prompt_ids + sample.forced_ids)
        values = {}
        for name, source in re.findall(r"\nVAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|[0-9]{7})\n", text):
            # a KeyError means that a variable is copied before it has a value
            assert name not in values
            values[name] = source if source.isdigit() else values[source]
        assert len(values) == sample.meta["num_needles"]
        for turn in sample.turns:
            asked = BYTES.decode(turn.forced_ids) or text[text.rindex("Find all") :]
            (value,) = set(re.findall("[0-9]{7}", asked))
            assert sorted(turn.answers) == sorted(name for name in values if values[name] == value)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" ABCDE, FGHIJ", 1),
        (" FGHIJ and ABCDE, KLMNO", 1),
        (" KLMNO, ABCDE, FGHIJ", 0.5),
        (" ABCDE ABCDE", 0.5),
        (" ABCDEF, FGHI", 0),
        (" abcde", 0),
        ("", 0),
    ],
)
def test_score(text, score):
    assert VariableTracking().score(Sample("s", [], answers=["ABCDE", "FGHIJ"]), text) == score
