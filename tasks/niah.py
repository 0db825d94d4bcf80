"""Needle in a haystack: one fact is asked about, hidden in real text or among nothing but other facts.

Run: `python run.py task=niah question=hidden task.num_facts=4`.

Wording and variants follow RULER (arXiv 2404.06654): `num_facts=1` is its single needle, `num_facts=4` its multikey 1
(the other facts have other keys and are distractors), `haystack=facts` its multikey 2 (all of the haystack is such
distractors: the hard case).

Without a chat template the prompt is raw text that ends in the beginning of the answer, with a BOS only where the tokenizer
itself sets one. Measured on smollm2-135m-32k (full cache, fp32, greedy, seed 0), right of 8 at 1k and at 2k tokens: raw 8
and 8, with <|endoftext|> in front 8 and 8, with <|im_start|> in front 8 and 8, chat template 0 and 0 (it repeats the
sentence and runs out of 16 tokens), chat template with the beginning of the answer 8 and 8. Raw with haystack=facts: 8 and
8; with num_facts=4 (seed 1): 8 at 1k.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.base import Sample, Turn, require_at_least, require_option
from tasks.corpus import long_numbers
from tasks.retrieval import Ask, Draft, Retrieval, first_is, numbers

FACT = "\nOne of the special magic numbers for {key} is: {value}.\n"
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
PREFIX = " The special magic number for {key} mentioned in the provided text is"
# for several numbers, as those of one key or of several keys
QUESTION_ALL = "\nWhat are all the special magic numbers for {keys} mentioned in the provided text?"
PREFIX_ALL = " The special magic numbers for {keys} mentioned in the provided text are"
ADJECTIVES = """
    able amber ancient arctic autumn azure bitter blank bold brave brief bright broad broken bronze calm careful
    cheerful clean clear clever cold cosmic crimson curious damp daring dark deep distant dusty eager early elegant
    empty faint famous fancy fast fierce fresh frozen gentle giant glad golden grand green happy heavy hidden hollow
    honest humble icy jolly keen kind late lazy light lively lonely loud lucky mellow mighty misty modest narrow
    noble odd old orange pale patient plain polite proud purple quick quiet rapid rare royal rustic salty scarlet
    secret sharp shiny silent silver simple sleepy smooth snowy solid steady sunny swift tall tender tidy tiny vast
    velvet violet warm wild wise young
""".split()
NOUNS = """
    anchor apple arrow badger bakery balloon banjo barrel basket beacon bishop blanket bottle bridge bucket button
    cabin candle canyon captain carpet castle cedar cellar cherry circus comet copper coral cottage cricket crystal
    curtain desert dolphin dragon eagle engine falcon feather fiddle forest fountain galaxy garden garlic giraffe
    glacier guitar hammer harbor helmet hunter island ivory jacket jungle kettle ladder lantern lemon library lizard
    magnet maple marble market meadow mirror monkey mountain needle oasis orchard otter oyster palace panda parrot
    pebble pencil pepper piano pillow pirate planet pocket pony prairie puzzle rabbit ribbon river rocket saddle
    sailor salmon shadow shelter spider station summit temple thunder tiger tunnel turtle valley village violin
    walnut whistle willow window winter wizard
""".split()
NUM_KEYS = len(ADJECTIVES) * len(NOUNS)


@dataclass
class Niah(Retrieval):
    """Retrieval of a 7-digit number; in later turns of the numbers of other facts."""

    num_facts: int = 1
    haystack: str = "text"

    def __post_init__(self):
        super().__post_init__()
        require_at_least("task.num_facts", self.num_facts, 1)
        require_option("task.haystack", self.haystack, ("text", "facts"))
        if self.num_facts > NUM_KEYS:
            raise ValueError(f"task.num_facts={self.num_facts}: must be at most {NUM_KEYS}, there are no more keys")

    @property
    def filler(self) -> str:
        return f"haystack={self.haystack}"

    def draft(self, rng: random.Random, index: int) -> Draft:
        """Fact i is (i + 0.5) / num_samples deep; each turn asks about one, and there are at least as many as turns."""
        pairs = draw_pairs(rng)
        facts = [next(pairs) for _ in range(max(self.num_facts, self.num_turns))]
        depths = [self.depth_of(index), *(rng.random() for _ in facts[1:])]
        depths[: self.num_turns] = [self.depth_of(index, turn) for turn in range(self.num_turns)]
        asks = [Ask(QUESTION.format(key=key), PREFIX.format(key=key), [value]) for key, value in facts[: self.num_turns]]
        key, value = facts[0]
        return Draft(
            needles=[FACT.format(key=key, value=value) for key, value in facts],
            depths=depths,
            asks=asks,
            first_piece=rng.random(),
            units=(FACT.format(key=key, value=value) for key, value in pairs) if self.haystack == "facts" else None,
            meta={"key": key, "value": value},
        )

    def score(self, turn: Sample | Turn, text: str) -> float:
        """Return 1.0 if the first number in `text`, read whole, is the answer, else 0.0."""
        return first_is(numbers(text), turn.answers)


def draw_pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield distinct keys with distinct 7-digit values that do not occur in the corpus."""
    keys = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    rng.shuffle(keys)
    used = set()
    for key in keys:
        value = str(rng.randrange(10**6, 10**7))
        while value in used or value in long_numbers():
            value = str(rng.randrange(10**6, 10**7))
        used.add(value)
        yield key, value
