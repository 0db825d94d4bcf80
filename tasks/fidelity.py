"""How near the method's predictions are to full's, token by token: no task to fail, the most sensitive measure.

Run: `python run.py method=int8 task=fidelity`.

After a compressed prompt both sides are fed the same tokens: first the text that follows (`top1_agreement`, `kl_nats`,
perplexity), then, from the same cache, full's own greedy continuation (`acceptance_rate`: the share of it that the method would
have proposed as a draft in speculative decoding, arXiv 2211.17192). The first token of each is left out: the dense prefill
predicts it, whatever the cache keeps.
"""

from dataclasses import dataclass
from typing import ClassVar

from tasks.perplexity import Perplexity


@dataclass
class Fidelity(Perplexity):
    """perplexity's samples, scored on full's greedy continuation too."""

    greedy: ClassVar[bool] = True
    num_samples: int = 8
