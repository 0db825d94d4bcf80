"""Needle in a haystack: one fact is asked about, hidden in real text or among nothing but other facts.

Run: `python run.py task=niah question=hidden task.num_facts=4`.

Wording and variants follow RULER (arXiv 2404.06654): `num_facts=1` is its single needle, `num_facts=4` its multikey 1
(the other facts have other keys and are distractors), `haystack=facts` its multikey 2 (all of the haystack is such
distractors: the hard case).

The prompt is raw text that ends in the beginning of the answer, with a BOS only where the tokenizer itself sets one.
Measured on smollm2-135m-32k (full cache, fp32, greedy, seed 0), right of 8 at 1k and at 2k tokens: raw 8 and 8, with
<|endoftext|> in front 8 and 8, with <|im_start|> in front 8 and 8, chat template 0 and 0 (it repeats the sentence and
runs out of 16 tokens), chat template with the beginning of the answer 8 and 8. Raw with haystack=facts: 8 and 8; with
num_facts=4 (seed 1): 8 at 1k.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar

from tasks.base import Sample, Task, fingerprint, leading_ids, require_at_least, require_full_length, require_option
from tasks.corpus import corpus_of, long_numbers

FACT = "\nOne of the special magic numbers for {key} is: {value}.\n"
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text?"
    " The special magic number for {key} mentioned in the provided text is"
)
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
# sign, thousands separators and decimals belong to a number
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


@dataclass
class Niah(Task):
    """Retrieval of a 7-digit number.

    `question`: visible (in the prompt when it is compressed) or hidden (fed afterwards); all ids together are the same.
    `floor`: the accuracy that the full cache must reach before a comparison with it means anything.
    """

    mode: ClassVar[str] = "generate"
    num_samples: int = 8
    num_facts: int = 1
    haystack: str = "text"
    question: str = "visible"
    max_answer_tokens: int = 12
    floor: float = 0.9

    def __post_init__(self):
        for name in ("num_samples", "num_facts", "max_answer_tokens"):
            require_at_least(f"task.{name}", getattr(self, name), 1)
        require_option("task.haystack", self.haystack, ("text", "facts"))
        require_option("question", self.question, ("visible", "hidden"))
        if not 0 <= self.floor <= 1:
            raise ValueError(f"task.floor={self.floor}: must be in [0, 1]")
        if self.num_facts > NUM_KEYS:
            raise ValueError(f"task.num_facts={self.num_facts}: must be at most {NUM_KEYS}, there are no more keys")
        if self.haystack == "facts" and self.num_facts > 1:
            raise ValueError(f"task.num_facts={self.num_facts} needs task.haystack=text: a haystack of facts is full")

    def samples(self, tokenizer, context_len: int, seed: int) -> list[Sample]:
        """Return samples of exactly `context_len` ids, question included; fact i is (i + 0.5) / num_samples deep.

        ValueError if `context_len` cannot hold the facts and the question, or is longer than the haystack can be.
        """
        drafts = [_Draft(tokenizer, self.num_facts, f"niah/{seed}/{index}") for index in range(self.num_samples)]
        shortest = max(len(draft.frame) for draft in drafts)
        if context_len < shortest:
            need = f"{self.num_facts} fact(s) and the question need"
            raise ValueError(f"context_len={context_len} is too short: {need} at least {shortest}")
        samples = [self._sample(draft, context_len, seed, index) for index, draft in enumerate(drafts)]
        require_full_length(samples, context_len, context_len, f"haystack={self.haystack}")
        return samples

    def _sample(self, draft: "_Draft", context_len: int, seed: int, index: int) -> Sample:
        hide = draft.hide_in_facts if self.haystack == "facts" else draft.hide_in_text
        body, start, num_facts = hide(context_len - len(draft.frame), depth=(index + 0.5) / self.num_samples)
        prompt, forced = draft.lead + body, draft.question
        if self.question == "visible":
            prompt, forced = prompt + forced, []
        # 0 = nothing before the fact, 1 = nothing between it and the question
        depth = round(start / max(1, len(body) - len(draft.facts[0])), 4)
        meta = {"depth": depth, "key": draft.key, "value": draft.value, "num_facts": num_facts}
        meta |= fingerprint(prompt, forced)
        return Sample(f"niah-{seed}-{index}", prompt, forced, [draft.value], self.max_answer_tokens, meta)

    def score(self, sample: Sample, text: str) -> float:
        """Return 1.0 if the first number in `text` is the answer, else 0.0.

        A number is read whole: "1,234,567" is 1234567; "12345678", "1234567.5" and "-1234567" are other numbers.
        """
        number = NUMBER.search(text)
        return float(number is not None and number.group().replace(",", "") in sample.answers)


class _Draft:
    """What a sample says, whatever its length: the same for every context_len, so that lengths can be compared."""

    def __init__(self, tokenizer, num_facts: int, rng_seed: str):
        self.tokenizer = tokenizer
        # a string seed does not depend on PYTHONHASHSEED
        self.rng = random.Random(rng_seed)
        self.pairs = _pairs(self.rng)
        self.key, self.value = next(self.pairs)
        self.lead = leading_ids(tokenizer)
        self.question = self._encode(QUESTION.format(key=self.key))
        self.facts = [self._fact(self.key, self.value)] + [self._fact(*next(self.pairs)) for _ in range(num_facts - 1)]
        self.depths = [self.rng.random() for _ in self.facts[1:]]
        self.first_piece = self.rng.random()
        # all ids that must be there
        self.frame = self.lead + sum(self.facts, []) + self.question

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _fact(self, key: str, value: str) -> list[int]:
        return self._encode(FACT.format(key=key, value=value))

    def hide_in_text(self, num_tokens: int, depth: float) -> tuple[list[int], int, int]:
        """Put the facts between lines of `num_tokens` of text; return (body, start of the asked one, num_facts)."""
        corpus = corpus_of(self.tokenizer)
        haystack = corpus.running_ids(num_tokens, int(self.first_piece * corpus.num_pieces))
        breaks = [i + 1 for i, token in enumerate(haystack) if corpus.ends_line(token)]
        return *_insert(self.facts, [depth, *self.depths], haystack, breaks), len(self.facts)

    def hide_in_facts(self, num_tokens: int, depth: float) -> tuple[list[int], int, int]:
        """The same with other facts as the haystack; the first of them loses its front to make the length exact."""
        others, total = [], 0
        for key, value in self.pairs:
            if total >= num_tokens:
                break
            others.append(self._fact(key, value))
            total += len(others[-1])
        cut = max(0, total - num_tokens)
        haystack = list(chain.from_iterable(others))[cut:]
        ends = [end - cut for end in accumulate(map(len, others))]
        return *_insert(self.facts, [depth], haystack, ends), len(self.facts) + len(others) - (cut > 0)


def _pairs(rng: random.Random) -> Iterator[tuple[str, str]]:
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


def _insert(facts: list[list[int]], depths: list[float], haystack: list[int], breaks: list[int]) -> tuple[list[int], int]:
    """Put each fact at the break of `haystack` nearest to its depth; return (body, start of the first fact)."""
    targets = [depth * len(haystack) for depth in depths]
    places = [min(breaks, key=lambda place: abs(place - target), default=round(target)) for target in targets]
    body, done, start = [], 0, 0
    for place, index in sorted((place, index) for index, place in enumerate(places)):
        body += haystack[done:place]
        done = place
        if index == 0:
            start = len(body)
        body += facts[index]
    return body + haystack[done:], start
