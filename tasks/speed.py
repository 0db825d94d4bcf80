"""Random tokens: memory and time only, for any model and any length; no accuracy.

Run: `python run.py task=speed shape.context_len=32768`.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from tasks.base import Sample, Task, fingerprint, require_at_least


@dataclass
class Speed(Task):
    """One prompt of random ids per repeat."""

    mode: ClassVar[str] = "speed"
    num_samples: int = 5

    def __post_init__(self):
        require_at_least("task.num_samples", self.num_samples, 1)

    def samples(self, tokenizer, context_len: int, seed: int) -> list[Sample]:
        """Return samples of `context_len` ids, drawn evenly from the vocabulary without its special ids."""
        require_at_least("context_len", context_len, 1)
        # byte and mock tokenizers have neither list; Hugging Face's vocab_size leaves out added tokens
        special = {tokenizer.bos_token_id, tokenizer.eos_token_id, *getattr(tokenizer, "all_special_ids", ())}
        special |= set(getattr(tokenizer, "added_tokens_decoder", ()))
        ordinary = [token for token in range(tokenizer.vocab_size) if token not in special]
        rng = random.Random(f"speed/{seed}")
        prompts = [rng.choices(ordinary, k=context_len) for _ in range(self.num_samples)]
        return [Sample(f"speed-{seed}-{i}", ids, meta=fingerprint(ids, [])) for i, ids in enumerate(prompts)]
