"""The key once, in nothing but filler; its two statements agree."""

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.passkey import FACT, FILLER, INTRO, Passkey

BYTES = ByteTokenizer()


@pytest.mark.parametrize("question", ["visible", "hidden", "two_turn"])
def test_the_secret_is_there_once(question):
    for sample in Passkey(question=question).samples(BYTES, 1501, 0):
        text = BYTES.decode(sample.prompt_ids + sample.forced_ids)
        for secret, turn in zip(("pass key", "door code"), sample.turns, strict=False):
            fact = FACT.format(secret=secret, value=turn.answers[0])
            assert text.count(fact) == 1 and text.count(turn.answers[0]) == 2
            text = text.replace(fact, "")
        rest, _, question_asked = text.partition("\n\nWhat is the pass key?")
        assert question_asked == " The pass key is"
        before, _, filler = rest.partition(INTRO)
        assert FILLER.endswith(before) and len(before) < len(FILLER)
        assert (filler + "\n") == FILLER * sample.meta["num_distractors"]


@pytest.mark.parametrize(("text", "score"), [(" 71432. Remember", 1), (" 714320", 0), (" 7143", 0), (" 71,432", 1), ("", 0)])
def test_score(text, score):
    assert Passkey().score(Sample("s", [], answers=["71432"]), text) == score
