"""Several facts, values or questions: each of them once in the text, all of them asked for, scored as whole numbers."""

import re

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.multi_turn import MultiTurn
from tasks.niah import FACT, PREFIX, QUESTION
from tasks.niah_multikey import NiahMultikey
from tasks.niah_multiquery import NiahMultiquery
from tasks.niah_multivalue import NiahMultivalue

BYTES = ByteTokenizer()
STATED = re.compile(re.escape(FACT).replace(r"\{key\}", "([a-z]+-[a-z]+)").replace(r"\{value\}", "([0-9]{7})"))


def facts_of(sample):
    text = BYTES.decode(sample.prompt_ids + sample.forced_ids)
    facts = STATED.findall(text)
    assert len({value for _, value in facts}) == len(facts) and all(text.count(value) == 1 for _, value in facts)
    return facts, text


@pytest.mark.parametrize("num_turns", [1, 2])
def test_all_values_of_one_key_are_asked_for(num_turns):
    task = NiahMultivalue(num_values=3, question="two_turn" if num_turns == 2 else "hidden")
    for sample in task.samples(BYTES, 3001, 0):
        facts, text = facts_of(sample)
        assert len(facts) == 3 * num_turns and len({key for key, _ in facts}) == num_turns
        for turn in sample.turns:
            (key,) = {key for key, value in facts if value in turn.answers}
            assert {value for other, value in facts if other == key} == set(turn.answers) and len(turn.answers) == 3
            asked = BYTES.decode(turn.forced_ids) or text
            assert asked.endswith(f"The special magic numbers for {key} mentioned in the provided text are")


def test_all_keys_are_asked_for_at_once():
    for sample in NiahMultiquery(num_queries=3, question="hidden").samples(BYTES, 3001, 0):
        facts, _ = facts_of(sample)
        values = dict(facts)
        assert len(values) == 3 and sorted(values.values()) == sorted(sample.answers)
        asked = re.findall("[a-z]+-[a-z]+", BYTES.decode(sample.forced_ids))
        assert [values[key] for key in asked] == sample.answers * 2
        # the order of the question is not always that of the text
    orders = [facts_of(s)[0] for s in NiahMultiquery(num_queries=3).samples(BYTES, 3001, 0)]
    samples = NiahMultiquery(num_queries=3).samples(BYTES, 3001, 0)
    assert any([value for _, value in facts] != s.answers for facts, s in zip(orders, samples, strict=True))


@pytest.mark.parametrize("haystack", ["text", "facts"])
def test_one_key_among_others(haystack):
    for sample in NiahMultikey(haystack=haystack).samples(BYTES, 2001, 0):
        facts, _ = facts_of(sample)
        assert len(dict(facts)) == len(facts) == sample.meta["num_needles"] + sample.meta["num_distractors"]
        assert sample.meta["num_needles"] == 4 and (haystack == "text") == (sample.meta["num_distractors"] == 0)
        assert dict(facts)[sample.meta["key"]] == sample.answers[0]


@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize("num_turns", [2, 5])
def test_each_turn_asks_for_another_fact(question, num_turns):
    for sample in MultiTurn(num_turns=num_turns, num_facts=6, question=question).samples(BYTES, 3001, 0):
        facts, text = facts_of(sample)
        assert len(facts) == 6 and len(sample.turns) == num_turns
        keys = {value: key for key, value in facts}
        asked = [keys[turn.answers[0]] for turn in sample.turns]
        assert len(set(asked)) == num_turns
        for key, turn in zip(asked[1:], sample.later, strict=True):
            assert BYTES.decode(turn.forced_ids) == (QUESTION + PREFIX).format(key=key)
            assert text.count(key) == 1, "a later question is not in the prompt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NiahMultivalue(num_values=0), "task.num_values=0: must be at least 1"),
        (lambda: NiahMultiquery(num_queries=1), "task.num_queries=1: must be at least 2"),
        (lambda: MultiTurn(num_turns=0), "task.num_turns=0: must be at least 1"),
        (
            lambda: MultiTurn(question="two_turn"),
            "question=two_turn: use task.num_turns=2 with question=visible, or question=hidden",
        ),
    ],
    ids=["values", "queries", "turns", "two-turn"],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("1111111, 2222222, 3333333 and 4444444.", 1),
        ("4,444,444; 3,333,333; 2222222; 1111111", 1),
        ("1111111, 1111111, 1111111, 1111111, 2222222", 0.5),
        ("9999999, 1111111, 2222222, 3333333, 4444444", 0.75),
        ("11111112222222, 33333334", 0),
        ("1111111, 22222222", 0.25),
        ("", 0),
    ],
)
@pytest.mark.parametrize("task", [NiahMultivalue(), NiahMultiquery()], ids=["multivalue", "multiquery"])
def test_score(task, text, score):
    assert task.score(Sample("s", [], answers=["1111111", "2222222", "3333333", "4444444"]), text) == score
