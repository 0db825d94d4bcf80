"""Counting the list gives the answer, at every length."""

from collections import Counter

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.common_words import INTRO, CommonWords

BYTES = ByteTokenizer()


@pytest.mark.parametrize("context_len", [1024, 2001, 60_000])
def test_counting_gives_the_answer(context_len):
    for sample in CommonWords(num_samples=2).samples(BYTES, context_len, 0):
        words = BYTES.decode(sample.prompt_ids).split(INTRO)[1].split("\n\nWhat are")[0].split("\n")
        counts = Counter(words)
        assert sorted(word for word, _ in counts.most_common(5)) == sorted(sample.answers)
        assert {counts[word] for word in sample.answers} == {10}
        assert max(count for word, count in counts.items() if word not in sample.answers) == 2
        # not in one place: every common word is in both halves
        half = len(words) // 2
        assert all(word in words[:half] and word in words[half:] for word in sample.answers)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" calm, otter.", 1),
        (" 1. Otter 2. CALM", 1),
        (" otter otter calm", 1),
        (" tree, otter, calm", 0.5),
        (" otters, calmly", 0),
        (" calm-otter", 0),
        ("", 0),
    ],
)
def test_score(text, score):
    assert CommonWords().score(Sample("s", [], answers=["calm", "otter"]), text) == score


def test_common_words_must_be_more_common():
    with pytest.raises(ValueError, match=r"^task.common_repeats=2: must be at least 3$"):
        CommonWords(common_repeats=2)
