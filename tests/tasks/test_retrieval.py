"""What holds for every retrieval task: which ids compression sees, where facts stand, how turns and errors read."""

import pytest

from harness.models import ByteTokenizer
from tasks.base import FREE, Sample, Turn, breakdown
from tasks.code_lookup import CodeLookup
from tasks.common_words import CommonWords
from tasks.doc_qa import DocQa
from tasks.kv_retrieval import KvRetrieval
from tasks.multi_instruction import MultiInstruction
from tasks.multi_turn import MultiTurn
from tasks.niah import Niah
from tasks.niah_multikey import NiahMultikey
from tasks.niah_multiquery import NiahMultiquery
from tasks.niah_multivalue import NiahMultivalue
from tasks.passkey import Passkey
from tasks.retrieval import first_is, numbers, share_found
from tasks.variable_tracking import VariableTracking

BYTES = ByteTokenizer()
TWO_TURN = (CodeLookup, DocQa, KvRetrieval, Niah, NiahMultikey, NiahMultiquery, NiahMultivalue, Passkey, VariableTracking)
ONE_QUESTION = (CommonWords, MultiInstruction)
every_task = pytest.mark.parametrize("task", [*TWO_TURN, *ONE_QUESTION, MultiTurn], ids=lambda task: task.__name__)
with_two_turns = pytest.mark.parametrize("task", TWO_TURN, ids=lambda task: task.__name__)


@pytest.fixture(params=["bytes", "smollm2"])
def tokenizer(request):
    return BYTES if request.param == "bytes" else request.getfixturevalue("smollm2").tokenizer


@every_task
def test_hidden_and_visible_are_the_same_ids(tokenizer, task):
    visible, hidden = (task(question=question).samples(tokenizer, 2011, 0) for question in ("visible", "hidden"))
    for seen, unseen in zip(visible, hidden, strict=True):
        assert not seen.forced_ids and unseen.forced_ids
        assert seen.prompt_ids == unseen.prompt_ids + unseen.forced_ids
        assert (seen.meta, seen.answers, seen.later) == (unseen.meta, unseen.answers, unseen.later)


@with_two_turns
def test_the_second_question_comes_after_the_whole_prompt(tokenizer, task):
    for sample in task(question="two_turn").samples(tokenizer, 2011, 0):
        assert len(sample.prompt_ids) == 2011 and not sample.forced_ids
        (second,) = sample.later
        assert second.forced_ids and second.max_answer_tokens == sample.max_answer_tokens
        assert not set(second.answers) & set(sample.answers)
        text, question = tokenizer.decode(sample.prompt_ids), tokenizer.decode(second.forced_ids)
        assert question not in text
        assert all(answer in text and answer not in question for answer in second.answers)
        script, starts = sample.script()
        assert script == [FREE] * sample.max_answer_tokens + second.forced_ids
        assert starts == [0, len(script)]


@pytest.mark.parametrize("task", ONE_QUESTION, ids=lambda task: task.__name__)
def test_one_question_has_no_second_turn(task):
    with pytest.raises(ValueError) as caught:
        task(question="two_turn")
    name = task.__module__.removeprefix("tasks.")
    assert str(caught.value) == f"question=two_turn: task={name} asks one question; use question=visible or question=hidden"


@every_task
def test_too_short_names_the_shortest(tokenizer, task):
    with pytest.raises(ValueError, match=r"^context_len=9 is too short: \d+ .* and the question need at least \d+$") as caught:
        task().samples(tokenizer, 9, 0)
    shortest = int(str(caught.value).split()[-1])
    assert {len(sample.prompt_ids) for sample in task().samples(tokenizer, shortest, 0)} == {shortest}
    with pytest.raises(ValueError, match=f"at least {shortest}$"):
        task().samples(tokenizer, shortest - 1, 0)


@every_task
def test_the_questions_do_not_depend_on_the_length(task):
    short, long = (task().samples(BYTES, context_len, 0) for context_len in (1500, 4096))
    assert [(s.answers, s.later) for s in short] == [(s.answers, s.later) for s in long]


@pytest.mark.parametrize("task", [CodeLookup, DocQa, KvRetrieval, Passkey, MultiTurn], ids=lambda task: task.__name__)
def test_depths_are_spread_evenly(task):
    samples = task(num_samples=6).samples(BYTES, 30_000, 0)
    for index, sample in enumerate(samples):
        turns = len(sample.turns)
        wanted = [((index + 0.5) / 6 + turn / turns) % 1 for turn in range(turns)]
        assert sample.meta["depths"] == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize("lengths", [(2, 0), (0, 3), (4, 4)], ids=str)
def test_a_script_leaves_the_answers_free(lengths):
    first, second = ([5] * length for length in lengths)
    later = [Turn(second, ["b"], 2), Turn([8], ["c"], 9)]
    sample = Sample("s", [1], first, ["a"], 3, later=later)
    script, starts = sample.script()
    assert script == first + [FREE] * 3 + second + [FREE] * 2 + [8]
    assert starts == [lengths[0], lengths[0] + 3 + lengths[1], len(script)]
    assert [turn.answers for turn in sample.turns] == [["a"], ["b"], ["c"]]
    assert Sample("s", [1], first, ["a"], 3).script() == (first, [lengths[0]])


def test_scores_are_reported_apart():
    meta = {"depths": [0.0, 0.25, 1.0], "kinds": ["x", "y", "x"]}
    sample = Sample("s", [1], meta=meta, later=[Turn([2], [], 1), Turn([3], [], 1)])
    assert breakdown(sample, [0.0, 0.5, 1.0]) == [
        ("turn_1", 0.0),
        ("turn_2", 0.5),
        ("turn_3", 1.0),
        ("depth_0.00_0.25", 0.0),
        ("depth_0.25_0.50", 0.5),
        ("depth_0.75_1.00", 1.0),
        ("kind_x", 0.0),
        ("kind_y", 0.5),
        ("kind_x", 1.0),
    ]
    assert breakdown(Sample("s", [1]), [1.0]) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,234,567 and 12", ["1234567", "12"]),
        ("12345678.", ["12345678"]),
        ("-5, 1.5, 1,23", ["-5", "1.5", "1", "23"]),
        ("none", []),
        ("", []),
    ],
)
def test_numbers_are_read_whole(text, found):
    assert numbers(text) == found


def test_listing_everything_does_not_pay():
    answers = ["1", "2", "3", "4"]
    assert share_found(["4", "3", "1", "2"], answers) == 1
    assert share_found(["9", "3", "1", "2", "4"], answers) == 0.75
    assert share_found(["3", "3", "3", "3", "1"], answers) == 0.5
    assert share_found([], answers) == 0
    assert (first_is(["a", "b"], ["b"]), first_is(["b"], ["a", "b"]), first_is([], ["a"])) == (0, 1, 0)


@every_task
@pytest.mark.parametrize("text", ["", " ", "\n\n", "no idea", "0", ". , ;"], ids=repr)
def test_saying_nothing_scores_nothing(task, text):
    task = task(num_samples=1)
    (sample,) = task.samples(BYTES, 1700, 0)
    assert [task.score(turn, text) for turn in sample.turns] == [0] * len(sample.turns)
    assert all(score == 0 for score in task.parts(sample, text).values())


@every_task
def test_the_right_answer_scores_one(task):
    task = task()
    for sample in task.samples(BYTES, 1700, 0):
        for turn in sample.turns:
            assert task.score(turn, " " + ", ".join(turn.answers) + ".\nWhat is") == 1
            assert len(BYTES.encode(" ".join(turn.answers))) <= turn.max_answer_tokens + 32
