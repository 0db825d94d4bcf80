"""The needle: there exactly once, where it should be, asked for by its key, and scored as a whole number."""

import re

import pytest
import torch

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.niah import ADJECTIVES, FACT, NOUNS, NUM_KEYS, PREFIX, QUESTION, Niah

BYTES = ByteTokenizer()
ASK = QUESTION + PREFIX
ASKED = re.compile(re.escape(FACT).replace(r"\{key\}", "([a-z]+-[a-z]+)").replace(r"\{value\}", "([0-9]{7})"))


@pytest.fixture(params=["bytes", "smollm2"])
def tokenizer(request):
    return BYTES if request.param == "bytes" else request.getfixturevalue("smollm2").tokenizer


def whole_text(tokenizer, sample):
    return tokenizer.decode(sample.prompt_ids + sample.forced_ids)


@pytest.mark.parametrize("context_len", [307, 1024, 4001])
@pytest.mark.parametrize(
    "knobs",
    [{}, {"num_facts": 2}, {"haystack": "facts"}, {"haystack": "facts", "num_facts": 2}],
    ids=["one", "two", "facts", "two-of-facts"],
)
def test_the_fact_is_there_exactly_once(tokenizer, knobs, context_len):
    for sample in Niah(**knobs).samples(tokenizer, context_len, 0):
        text = whole_text(tokenizer, sample)
        key, value = sample.meta["key"], sample.meta["value"]
        assert sample.answers == [value]
        assert text.count(FACT.format(key=key, value=value)) == 1
        assert text.count(value) == 1
        assert text.count(key) == 3
        assert text.endswith(ASK.format(key=key))


@pytest.mark.parametrize("num_facts", [1, 4, 9])
def test_facts_in_text_have_their_own_keys_and_values(tokenizer, num_facts):
    for sample in Niah(num_facts=num_facts).samples(tokenizer, 2049, 0):
        facts = ASKED.findall(whole_text(tokenizer, sample))
        assert len(facts) == len(dict(facts)) == len({value for _, value in facts}) == num_facts
        assert dict(facts)[sample.meta["key"]] == sample.meta["value"]
        assert (sample.meta["num_needles"], sample.meta["num_distractors"]) == (num_facts, 0)


def test_haystack_of_facts_is_nothing_but_facts(tokenizer):
    for sample in Niah(haystack="facts").samples(tokenizer, 2049, 0):
        text = whole_text(tokenizer, sample).removesuffix(ASK.format(key=sample.meta["key"]))
        facts = ASKED.findall(text)
        assert len(facts) == len(dict(facts)) == len({value for _, value in facts}) == 1 + sample.meta["num_distractors"]
        # what is left is the end of the one fact that was cut
        assert len(ASKED.sub("", text)) < len(FACT) + 20


def test_keys_and_values_differ_between_samples():
    samples = [sample for seed in range(5) for sample in Niah().samples(BYTES, 512, seed)]
    assert len({sample.meta["value"] for sample in samples}) == len(samples)
    assert len({sample.meta["key"] for sample in samples}) >= len(samples) - 1


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("haystack", ["text", "facts"])
def test_depths_are_spread_evenly(tokenizer, haystack, num_samples):
    samples = Niah(num_samples=num_samples, haystack=haystack).samples(tokenizer, 8192, 0)
    for index, sample in enumerate(samples):
        wanted = (index + 0.5) / num_samples
        assert sample.meta["depths"] == [pytest.approx(wanted, abs=0.03)]
        text = whole_text(tokenizer, sample)
        assert text.index(sample.meta["value"]) / len(text) == pytest.approx(wanted, abs=0.12)


def test_a_fact_stands_between_lines(tokenizer):
    for sample in Niah().samples(tokenizer, 4096, 0):
        text = whole_text(tokenizer, sample)
        before = text[: text.index(FACT.format(key=sample.meta["key"], value=sample.meta["value"]))]
        assert before.rstrip(" ").endswith("\n")


@pytest.mark.parametrize("knobs", [{}, {"num_facts": 3}, {"haystack": "facts"}], ids=["one", "three", "facts"])
def test_hidden_and_visible_are_the_same_ids(tokenizer, knobs):
    visible = Niah(question="visible", **knobs).samples(tokenizer, 1001, 0)
    hidden = Niah(question="hidden", **knobs).samples(tokenizer, 1001, 0)
    for seen, unseen in zip(visible, hidden, strict=True):
        assert not seen.forced_ids
        assert seen.prompt_ids == unseen.prompt_ids + unseen.forced_ids
        assert tokenizer.decode(unseen.forced_ids) == ASK.format(key=seen.meta["key"])
        assert seen.meta == unseen.meta


def test_keys_do_not_depend_on_the_length(tokenizer):
    short, long = (Niah().samples(tokenizer, context_len, 0) for context_len in (512, 4096))
    assert [s.meta["key"] for s in short] == [s.meta["key"] for s in long]
    assert [s.answers for s in short] == [s.answers for s in long]


@pytest.mark.parametrize("knobs", [{}, {"num_facts": 3}, {"haystack": "facts"}], ids=["one", "three", "facts"])
def test_too_short_names_the_shortest(tokenizer, knobs):
    task = Niah(**knobs)
    with pytest.raises(
        ValueError, match=r"^context_len=9 is too short: \d fact\(s\) and the question need at least \d+$"
    ) as caught:
        task.samples(tokenizer, 9, 0)
    shortest = int(str(caught.value).split()[-1])
    samples = task.samples(tokenizer, shortest, 0)
    assert {len(sample.prompt_ids) for sample in samples} == {shortest}
    with pytest.raises(ValueError, match=f"at least {shortest}$"):
        task.samples(tokenizer, shortest - 1, 0)


def test_the_smoke_shape_fits_every_key_in_bytes():
    key = max(ADJECTIVES, key=len) + "-" + max(NOUNS, key=len)
    assert len(BYTES.encode(FACT.format(key=key, value="1234567") + ASK.format(key=key), True)) <= 256
    assert len({f"{a}-{n}" for a in ADJECTIVES for n in NOUNS}) == NUM_KEYS


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"question": "visble"}, "question=visble: did you mean question=visible? Valid: visible, hidden, two_turn"),
        ({"question": "hiden"}, "question=hiden: did you mean question=hidden? Valid: visible, hidden, two_turn"),
        ({"haystack": "fact"}, "task.haystack=fact: did you mean task.haystack=facts? Valid: text, facts"),
        ({"num_samples": 0}, "task.num_samples=0: must be at least 1"),
        ({"num_facts": 0}, "task.num_facts=0: must be at least 1"),
        ({"num_facts": 10**6}, f"task.num_facts=1000000: must be at most {NUM_KEYS}, there are no more keys"),
        ({"max_answer_tokens": -3}, "task.max_answer_tokens=-3: must be at least 1"),
        ({"floor": 90}, "task.floor=90: must be in [0, 1]"),
        ({"chat_template": "on"}, "task.chat_template=on: did you mean task.chat_template=none? Valid: auto, none"),
    ],
    ids=["visble", "hiden", "fact", "no-samples", "no-facts", "many-facts", "no-answer", "floor", "template"],
)
def test_bad_values(knobs, message):
    with pytest.raises(ValueError) as caught:
        Niah(**knobs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 1234567.", 1),
        ("1234567", 1),
        (" 1234567.\nWhat is the special magic number", 1),
        ("\n\n**1234567**", 1),
        (" 1,234,567.", 1),
        ("1234567, 8912345", 1),
        ("1234567,8912345", 1),
        ("1234567 8912345", 1),
        ("8912345 1234567", 0),
        ("8912345, 1234567", 0),
        ("12345678", 0),
        ("01234567", 0),
        ("91234567", 0),
        ("123456", 0),
        ("1234567.5", 0),
        ("-1234567", 0),
        ("1,234,5678", 0),
        ("1,234,567,890", 0),
        ("9,1234567", 0),
        ("1 234 567", 0),
        ("number 2: 1234567", 0),
        ("one million", 0),
        ("", 0),
    ],
)
def test_score(text, score):
    sample = Sample("s", prompt_ids=[], answers=["1234567"])
    assert Niah().score(sample, text) == score


@pytest.mark.slow
@torch.no_grad()
def test_the_real_model_answers(smollm2):
    task, tokenizer = Niah(), smollm2.tokenizer
    scores = []
    for sample in task.samples(tokenizer, 1024, 0):
        # greedy decoding gives the answer if every token of it is the most likely one after those before it
        answer = tokenizer.encode(f" {sample.answers[0]}.", add_special_tokens=False)
        ids = torch.tensor([sample.prompt_ids + answer])
        greedy = smollm2.model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(-1).tolist()
        scores.append(greedy == answer and task.score(sample, tokenizer.decode(greedy)))
    assert sum(scores) >= 0.95 * len(scores)
