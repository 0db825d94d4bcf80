"""The document says it once: the module of a function, the function of a description."""

import re

import pytest

from harness.models import ByteTokenizer
from tasks.base import Sample
from tasks.doc_qa import DocQa
from tasks.library import described

BYTES = ByteTokenizer()
ENTRY = re.compile(r"([^\n]+)\nFunction: ([a-z]+_[a-z]+)\nModule: ([\w.]+)\n")


@pytest.mark.parametrize("question", ["visible", "hidden", "two_turn"])
@pytest.mark.parametrize("context_len", [1501, 8000])
def test_the_document_gives_the_answer(context_len, question):
    for sample in DocQa(question=question).samples(BYTES, context_len, 0):
        text = BYTES.decode(sample.prompt_ids + sample.forced_ids)
        entries = ENTRY.findall(text)
        assert len({name for _, name, _ in entries}) == len(entries)
        for name, kind, turn in zip(sample.meta["functions"], sample.meta["kinds"], sample.turns, strict=True):
            ((description, _, module),) = [entry for entry in entries if entry[1] == name]
            assert sum(entry[0] == description for entry in entries) == 1
            assert turn.answers == [module if kind == "module" else name]
            asked = BYTES.decode(turn.forced_ids) or text
            if kind == "module":
                assert asked.endswith(f"?\nFunction: {name}\nModule:")
            else:
                assert asked.endswith(f"\n{description}\nFunction:")
                assert text.count(name) == 1


def test_modules_are_those_of_the_library():
    modules = {paragraph: function.module for function, paragraph, _ in described()}
    text = BYTES.decode(DocQa(num_samples=1).samples(BYTES, 30_000, 0)[0].prompt_ids)
    entries = ENTRY.findall(text)
    assert len(entries) > 20
    assert all(modules[description] == module for description, _, module in entries[1:])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" logging.handlers\n", 1),
        (" `logging.handlers`.", 1),
        ("logging.handlers", 1),
        (" logging.handlers.Queue", 0),
        (" logging", 0),
        (" mylogging.handlers", 0),
        (" logging.handlers2", 0),
        (" asyncio, logging.handlers", 0),
        ("", 0),
    ],
)
def test_score(text, score):
    assert DocQa().score(Sample("s", [], answers=["logging.handlers"]), text) == score
