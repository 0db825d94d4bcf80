"""Questions about a long document: in which module a function is defined, and which function has a description.

Run: `python run.py task=doc_qa question=hidden`.

The document is a reference made of the docstrings of this Python's library (tasks/library.py) with their true modules.
Functions carry invented names: what is asked can be read in the document and is not known from a model's training. Kinds take
turns: `module`, `function`.
"""

import random
import re
from dataclasses import dataclass

from tasks.base import Sample, Turn
from tasks.library import described
from tasks.niah import ADJECTIVES, NOUNS
from tasks.retrieval import Ask, Draft, Retrieval, first_is

KINDS = ("module", "function")
MAX_ENTRY_CHARS = 1000
ENTRY = "{description}\nFunction: {name}\nModule: {module}\n{details}\n\n"
QUESTIONS = {
    "module": "\nIn which module is the function {name} defined?\n",
    "function": "\nWhich function of the document above has the following description?\n",
}
PREFIXES = {"module": "Function: {name}\nModule:", "function": "{description}\nFunction:"}
DOTTED_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass
class DocQa(Retrieval):
    """Retrieval of a name from a document whose entries all look alike."""

    needle_word = "entry"
    max_answer_tokens: int = 24
    floor: float = 0.8

    def draft(self, rng: random.Random, index: int) -> Draft:
        names = [f"{adjective}_{noun}" for adjective in ADJECTIVES for noun in NOUNS]
        rng.shuffle(names)
        entries = []
        for name, (function, description, details) in zip(names, described(), strict=False):
            details = details[: MAX_ENTRY_CHARS - len(description)]
            entries.append({"name": name, "module": function.module, "description": description, "details": details})
        rng.shuffle(entries)
        # the entry that is asked about has no details: the shortest context stays short
        asked = [entry | {"details": ""} for entry in entries[: self.num_turns]]
        kinds = [KINDS[(index + turn) % len(KINDS)] for turn in range(self.num_turns)]
        return Draft(
            needles=[ENTRY.format(**entry) for entry in asked],
            depths=[self.depth_of(index, turn) for turn in range(self.num_turns)],
            asks=[_ask(kind, entry) for kind, entry in zip(kinds, asked, strict=True)],
            units=(ENTRY.format(**entry) for entry in entries[self.num_turns :]),
            meta={"kinds": kinds, "functions": [entry["name"] for entry in asked]},
        )

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return 1.0 if the first name in `text`, dots included, is the answer, else 0.0."""
        return first_is(DOTTED_NAME.findall(text), turn.answers)


def _ask(kind: str, entry: dict[str, str]) -> Ask:
    answer = entry["name" if kind == "function" else "module"]
    return Ask(QUESTIONS[kind].format(**entry), PREFIXES[kind].format(**entry), [answer])
