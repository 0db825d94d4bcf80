"""Needle in a haystack with look-alikes: several facts of the same wording, one of them asked about.

Run: `python run.py task=niah_multikey question=hidden`.

RULER's multikey 1 (arXiv 2404.06654) by default, its multikey 2 with `haystack=facts`; its multikey 3 (UUID keys and values)
is `task=kv_retrieval`. `task=niah` with other defaults.
"""

from dataclasses import dataclass

from tasks.niah import Niah


@dataclass
class NiahMultikey(Niah):
    """One fact of `num_facts` is asked about."""

    num_facts: int = 4
