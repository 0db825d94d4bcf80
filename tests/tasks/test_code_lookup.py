"""Python itself says what the code means: the answer is what the one function of that name has there."""

import ast

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.code_lookup import CodeLookup
from tasks.library import functions, unique_names

BYTES = ByteTokenizer()


@pytest.mark.parametrize("question", ["visible", "hidden", "two_turn"])
@pytest.mark.parametrize("context_len", [1500, 4003])
def test_the_code_gives_the_answer(context_len, question):
    for sample in CodeLookup(question=question).samples(BYTES, context_len, 0):
        text = BYTES.decode(sample.prompt_ids + sample.forced_ids)
        for name, kind, turn in zip(sample.meta["functions"], sample.meta["kinds"], sample.turns, strict=True):
            (answer,) = turn.answers
            assert text.count(answer) == 1
            start = text.index(f"def {name}(")
            assert text.find(f"def {name}(") == start and text[:start].endswith("\n\n") or start == 1
            node = ast.parse(text[start : text.index(answer)] + answer + ending(text, answer)).body[0]
            assert node.name == name
            if kind == "return":
                (value,) = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)]
                assert ast.literal_eval(value) == int(answer)
            else:
                defaults = {arg: value for arg, value in defaults_of(node)}
                asked = BYTES.decode(turn.forced_ids) or text[text.rindex("\nWhat is the default") :]
                parameter = asked.split("parameter ")[1].split(" ")[0]
                assert ast.literal_eval(defaults[parameter]) == int(answer)


def ending(text, answer):
    """The rest of the code after the answer, up to the next function or the question."""
    return text.split(answer)[1].split("\n\ndef ")[0].split("\n\n\nWhat ")[0]


def defaults_of(node):
    positional = [*node.args.posonlyargs, *node.args.args]
    yield from zip([a.arg for a in reversed(positional)], reversed(node.args.defaults), strict=False)
    yield from zip([a.arg for a in node.args.kwonlyargs], node.args.kw_defaults, strict=True)


def test_numbers_stand_in_other_functions_too():
    sample = CodeLookup(num_samples=1).samples(BYTES, 20_000, 0)[0]
    text = BYTES.decode(sample.prompt_ids)
    assert sum(len(word) == 7 for word in "".join(c if c.isdigit() else " " for c in text).split()) > 5


def test_kinds_take_turns():
    kinds = [sample.meta["kinds"] for sample in CodeLookup(num_samples=3, question="two_turn").samples(BYTES, 2500, 0)]
    assert kinds == [["default", "return"], ["return", "default"], ["default", "return"]]


def test_spots_of_the_library_are_what_they_say():
    assert len(functions()) > 4000 and len(unique_names()) > 2000
    for function in functions()[::40]:
        for spot in function.spots:
            value = function.source[spot.start : spot.end]
            before = function.source[: spot.start].rstrip(" (")
            if spot.kind == "default":
                assert value == "None" or int(value.replace("_", ""), 0) is not None
                assert before.endswith("=") and spot.parameter in before
            else:
                ast.parse(value, mode="eval")
                assert before.endswith("return") and function.source.count("return ") >= 1


@pytest.mark.parametrize(("text", "score"), [("1234567):\n", 1), (" 1234567.", 1), ("12345678", 0), ("0, 1234567", 0), ("", 0)])
def test_score(text, score):
    assert CodeLookup().score(Sample("s", [], answers=["1234567"]), text) == score
