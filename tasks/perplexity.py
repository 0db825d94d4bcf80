"""How well the model goes on with real text from the compressed cache.

Run: `python run.py task=perplexity task.num_scored=256`.

A prompt of context_len tokens is compressed, then the next `num_scored` tokens of the same text go through the decode
path and their log-probabilities are taken: context_len + num_scored positions in all.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from tasks.base import Sample, Task, fingerprint, leading_ids, require_at_least, require_full_length
from tasks.corpus import corpus_of


@dataclass
class Perplexity(Task):
    """Teacher-forced log-probability of running text."""

    mode: ClassVar[str] = "score"
    num_samples: int = 4
    num_scored: int = 128

    def __post_init__(self):
        require_at_least("task.num_samples", self.num_samples, 1)
        require_at_least("task.num_scored", self.num_scored, 1)

    def samples(self, tokenizer, context_len: int, seed: int) -> list[Sample]:
        """Return samples of `context_len` prompt ids and the `num_scored` ids after them; no text is in two samples."""
        require_at_least("context_len", context_len, 1)
        corpus = corpus_of(tokenizer)
        lead = leading_ids(tokenizer)
        num_tokens = context_len + self.num_scored
        # each sample has its own equal share of the corpus, turned by the seed
        share = corpus.num_pieces // self.num_samples
        offset = random.Random(f"perplexity/{seed}").randrange(corpus.num_pieces)
        samples = []
        for index in range(self.num_samples):
            start = offset + index * share
            ids = lead + corpus.running_ids(num_tokens - len(lead), start, share)
            prompt, forced = ids[:context_len], ids[context_len:]
            meta = {"first_piece": start % corpus.num_pieces, **fingerprint(prompt, forced)}
            samples.append(Sample(f"perplexity-{seed}-{index}", prompt, forced, meta=meta))
        require_full_length(samples, num_tokens, context_len, f"the text for {self.num_samples} samples")
        return samples
