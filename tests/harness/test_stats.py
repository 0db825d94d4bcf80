"""The verdict against full: intervals against scipy's bootstrap, and words that small samples do not stretch."""

import numpy as np
import pytest
from scipy.stats import bootstrap, sem

from harness.stats import MIN_DIFFERENT, compare, mean_and_stderr, worst_task


def named(values):
    return {f"s{i}": float(value) for i, value in enumerate(values)}


def test_interval_is_scipys():
    rng = np.random.default_rng(1)
    full = rng.integers(0, 2, 137)
    own = np.where(rng.random(137) < 0.3, 0, full)
    found = compare(named(own), named(full))
    gaps = own - full
    expected = bootstrap((gaps,), np.mean, method="percentile", n_resamples=10_000, rng=2).confidence_interval
    assert found.diff == pytest.approx(gaps.mean()) and found.num_pairs == 137
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.02)
    assert found.verdict == "worse"


def test_interval_covers_the_truth():
    """Over 200 experiments with a known true difference the interval misses it about one time in twenty."""
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(200):
        gaps = rng.choice([-1.0, 0.0, 1.0], p=[0.3, 0.5, 0.2], size=60)
        found = compare(named(gaps), named(np.zeros(60)))
        missed += not found.low <= -0.1 <= found.high
    assert 2 <= missed <= 25


@pytest.mark.parametrize(
    ("own", "full", "verdict"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], "same"),
        ([1, 0, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1, 1], "same"),
        ([0] * 3, [1] * 3, "unclear"),
        ([0] * (MIN_DIFFERENT - 1), [1] * (MIN_DIFFERENT - 1), "unclear"),
        ([0] * MIN_DIFFERENT, [1] * MIN_DIFFERENT, "worse"),
        ([1] * 20 + [0] * 4, [0] * 20 + [0] * 4, "better"),
    ],
    ids=["equal", "both-ways", "three-lost", "five-lost", "six-lost", "gained"],
)
def test_verdicts(own, full, verdict):
    found = compare(named(own), named(full))
    assert found.verdict == verdict and found.low <= found.diff <= found.high


def test_pairs_are_matched_by_id_and_seeded():
    full = named([1, 0, 1, 1, 0, 1, 0, 1])
    own = dict(reversed(list(full.items()))) | {"other": 0.0}
    found = compare(own, full)
    assert (found.num_pairs, found.diff, found.verdict) == (8, 0.0, "same")
    moved = {name: 1 - value for name, value in full.items()}
    assert compare(moved, full, seed=3) == compare(moved, full, seed=3)
    assert compare({"a": 1.0}, {"a": 1.0}) is None and compare({"a": 1.0, "b": 1.0}, {"c": 1.0, "d": 0.0}) is None


def test_many_samples_need_little_memory():
    own, full = named(np.zeros(30_000)), named(np.zeros(30_000))
    own["s0"] = 1.0
    assert compare(own, full).verdict == "same"


def test_mean_and_stderr():
    values = [0.25, 1.0, 0.0, 1.0, 0.5]
    assert mean_and_stderr(values) == (pytest.approx(0.55), pytest.approx(sem(values)))
    assert mean_and_stderr([1.0]) == (1.0, None)


def test_worst_task():
    full = {"a": named([1, 1]), "b": named([1, 1]), "c": named([0, 0])}
    own = {"a": named([1, 0]), "b": named([0, 0]), "d": named([0])}
    assert worst_task(own, full) == ("b", -1.0)
    assert worst_task(own, {}) is None


def test_a_score_that_is_no_number_is_no_pair():
    found = compare(named([1, float("nan"), 0]), named([0, 1, 0]))
    assert (found.num_pairs, found.diff) == (2, 0.5)
    assert compare(named([1, float("nan")]), named([0, 1])) is None
