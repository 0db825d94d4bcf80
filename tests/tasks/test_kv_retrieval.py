"""The object is valid JSON at every length; the value belongs to the key and stands there once."""

import json

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.kv_retrieval import KvRetrieval

BYTES = ByteTokenizer()


@pytest.mark.parametrize("question", ["visible", "hidden", "two_turn"])
@pytest.mark.parametrize("context_len", [1001, 1024, 4003])
def test_the_object_is_json_and_holds_the_answer(context_len, question, smollm2):
    for tokenizer in (BYTES, smollm2.tokenizer):
        for sample in KvRetrieval(num_samples=3, question=question).samples(tokenizer, context_len, 0):
            text = tokenizer.decode(sample.prompt_ids + sample.forced_ids)
            before, _, rest = text.partition("{")
            body, _, asked = rest.partition("}")
            pairs = json.loads("{" + body + "}")
            assert len(pairs) == sample.meta["num_needles"] + sample.meta["num_distractors"] + 1 == body.count(": ")
            for turn in sample.turns:
                question_text = tokenizer.decode(turn.forced_ids) or asked
                key = question_text.split('"')[1]
                assert question_text.endswith(f'\n "{key}": "')
                assert turn.answers == [pairs[key]] and text.count(turn.answers[0]) == 1
            assert len(before) < 250


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('0adfd10a-c185-4baa-98ff-1fa8dbed4e78",', 1),
        ("0adfd10a-c185-4baa-98ff-1fa8dbed4e78", 1),
        ("The value is 0adfd10a-c185-4baa-98ff-1fa8dbed4e78", 1),
        ("0adfd10a-c185-4baa-98ff-1fa8dbed4e7", 0),
        ("0adfd10a-c185-4baa-98ff-1fa8dbed4e789", 0),
        ("f0adfd10a-c185-4baa-98ff-1fa8dbed4e78", 0),
        ("1adfd10a-c185-4baa-98ff-1fa8dbed4e78 0adfd10a-c185-4baa-98ff-1fa8dbed4e78", 0),
        ("0adfd10a", 0),
        ("", 0),
    ],
)
def test_score(text, score):
    assert KvRetrieval().score(Sample("s", [], answers=["0adfd10a-c185-4baa-98ff-1fa8dbed4e78"]), text) == score
