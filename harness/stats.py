"""Is the method as accurate as full? Paired by sample, with an interval: two means of eight samples say little.

A paired bootstrap (Efron, 1979): the differences of shared samples are drawn anew with replacement; the 95 % interval of their
mean is the percentile interval. Seeded, so that the same samples always give the same verdict.
"""

from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
CHUNK = 1_000_000  # draws held at a time
# with fewer samples that differ, no two-sided sign test reaches 5 %: 2 * 0.5 ** 5 = 0.0625
MIN_DIFFERENT = 6


@dataclass(frozen=True)
class Comparison:
    """Method minus full over shared samples, in units of the score; low and high are the 95 % interval of the mean.

    verdict: better or worse: the interval excludes 0 and at least 6 samples differ; unclear: it excludes 0, but fewer differ;
    same: it contains 0, which with few samples does not prove equality.
    """

    num_pairs: int
    diff: float
    low: float
    high: float
    verdict: str


def compare(scores: dict[str, float], full: dict[str, float], seed: int = 0) -> Comparison | None:
    """Comparison of two sides by sample id; None when fewer than two samples are shared that have a number on both."""
    shared = sorted(name for name in scores.keys() & full.keys() if np.isfinite([scores[name], full[name]]).all())
    if len(shared) < 2:
        return None
    gaps = np.array([scores[name] - full[name] for name in shared], dtype=np.float64)
    rng = np.random.default_rng(seed)
    means, left = [], NUM_RESAMPLES
    while left:
        count = min(left, max(1, CHUNK // len(gaps)))
        means.append(gaps[rng.integers(len(gaps), size=(count, len(gaps)))].mean(axis=1))
        left -= count
    low, high = (float(value) for value in np.percentile(np.concatenate(means), (2.5, 97.5)))
    verdict = "same"
    if low > 0 or high < 0:
        verdict = "unclear" if np.count_nonzero(gaps) < MIN_DIFFERENT else "better" if low > 0 else "worse"
    return Comparison(len(shared), float(gaps.mean()), low, high, verdict)


def mean_and_stderr(values: list[float]) -> tuple[float, float | None]:
    """Mean and its standard error (from the sample's standard deviation); the latter None for a single value."""
    array = np.array(values, dtype=np.float64)
    stderr = float(array.std(ddof=1) / len(array) ** 0.5) if len(array) > 1 else None
    return float(array.mean()), stderr


def worst_task(scores: dict[str, dict[str, float]], full: dict[str, dict[str, float]]) -> tuple[str, float] | None:
    """Task with the largest mean loss against full, and that difference; scores by task and sample id. None: nothing shared."""
    gaps = {}
    for task in scores.keys() & full.keys():
        shared = scores[task].keys() & full[task].keys()
        if shared:
            gaps[task] = float(np.mean([scores[task][name] - full[task][name] for name in shared]))
    return min(sorted(gaps.items()), key=lambda item: item[1]) if gaps else None
