"""The advice: only rows decide, and no row that must not be advised ever is."""

import dataclasses
import statistics

import pytest

from harness.report.advice import ALL_TASKS, GOALS, LIMITS, accuracy_gap, advise, at, steps, views
from harness.report.rows import Entry
from harness.results import STATUSES
from tests.report.conftest import make_row, stress_rows


def view_of(*rows, task: str | None = None):
    found = views([Entry(row) for row in rows])
    return next(view for view in found if task in (None, view.task))


def good(**fields):
    return make_row("sparda", 0.8, **{"accuracy": 0.98, "accuracy_stderr": 0.0} | fields)


def full(**fields):
    return make_row("full", **{"accuracy": 0.98, "accuracy_stderr": 0.0} | fields)


def test_a_method_that_keeps_the_accuracy_is_advised_with_its_overrides():
    advice = advise(view_of(full(), good()))
    assert (advice.verdict, advice.headline) == ("use", "Use sparda 0.8")
    assert advice.command == "method=sparda sparsity=0.8"
    assert "KV cache 409.6 MiB instead of 2.0 GiB, 5.00x less." in advice.reasons
    assert any("from 16k tokens on" in line for line in advice.reasons)


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_row_without_a_result_is_never_advised(status):
    advice = advise(view_of(full(), good(status=status)), loss_points=100)
    assert advice.verdict == "keep"
    assert advice.refused == (f"sparda 0.8: {status}",)


@pytest.mark.parametrize("flag", ["noop", "simulated", "untrained", "baseline_broken"])
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_flag_that_bars_is_never_advised(flag, goal, limit):
    assert advise(view_of(full(), good(flags=[flag])), 100, goal, limit).verdict == "keep"


@pytest.mark.parametrize("flag", ["short_decode", "noisy"])
@pytest.mark.parametrize("side", ["method", "full"])
def test_times_that_are_no_measurement_decide_nothing(flag, side):
    view = view_of(full(flags=[flag] * (side == "full")), good(flags=[flag] * (side == "method")))
    assert advise(view, goal_name="tpot").verdict == "keep"
    assert advise(view, goal_name="bytes").verdict == "use"


@pytest.mark.parametrize("flags", [[], ["not_interleaved"]], ids=["in turns", "apart"])
def test_on_a_cpu_only_times_taken_in_turns_decide(flags):
    cpu = {"versions": {"torch": "2.13.0"}, "batch_size": 64}
    view = view_of(full(**cpu), good(**cpu, flags=flags))
    assert advise(view, goal_name="tpot").verdict == ("keep" if flags else "use")
    assert advise(view, goal_name="bytes").verdict == "use"


@pytest.mark.parametrize(
    "accuracy, stderr, wanted, verdict",
    [
        (0.98, 0.0, 0, "use"),
        (0.97, 0.0, 0.9, "keep"),
        (0.97, 0.0, 1.1, "use"),
        # measured one point below, but it may be three: the low end of the interval counts
        (0.97, 0.01, 2.9, "keep"),
        (0.97, 0.01, 3.1, "use"),
        # better than full on average is no proof either
        (0.99, 0.02, 1, "keep"),
        (0.99, None, 100, "keep"),
    ],
)
def test_the_interval_decides(accuracy, stderr, wanted, verdict):
    row = dataclasses.replace(good(), accuracy=accuracy, accuracy_stderr=stderr)
    assert advise(view_of(full(), row), wanted).verdict == verdict


def test_pairs_of_samples_make_the_interval_narrow():
    rows = full(accuracy=0.5, num_samples=100), good()
    rows[1].accuracy, rows[1].num_samples = 0.5, 100
    for row in rows:
        row.accuracy_stderr = 0.05
    samples = [{"id": str(i), "score": float(i % 2)} for i in range(100)]
    apart = accuracy_gap(Entry(rows[1]), Entry(rows[0]))
    paired = accuracy_gap(Entry(rows[1], samples), Entry(rows[0], samples))
    assert not apart.paired and apart.low == pytest.approx(-100 * 2 * (2 * 0.05**2) ** 0.5)
    assert paired.paired and (paired.low, paired.high) == (0, 0)
    one_lost = [dict(line, score=0.0) if line["id"] == "1" else line for line in samples]
    gap = accuracy_gap(Entry(rows[1], one_lost), Entry(rows[0], samples))
    error = statistics.stdev([-1.0] + [0.0] * 99) / 10
    assert (gap.points, gap.low) == (pytest.approx(-1), pytest.approx(100 * (-0.01 - 2 * error)))


def test_samples_of_another_run_are_not_paired():
    ours = [{"id": str(i), "score": 1.0} for i in range(10)]
    theirs = [{"id": f"other {i}", "score": 1.0} for i in range(10)]
    rows = full(num_samples=10), good(num_samples=10)
    assert not accuracy_gap(Entry(rows[1], ours), Entry(rows[0], theirs)).paired


def test_few_samples_without_a_difference_are_named():
    advice = advise(view_of(full(num_samples=16), good(num_samples=16)))
    assert "Caution: 16 samples without a difference cannot rule out a loss of 19 points." in advice.reasons


def test_short_context_keeps_full_unless_a_limit_needs_less():
    view = view_of(full(context_len=2048), good(context_len=2048))
    advice = advise(view)
    assert advice.verdict == "keep"
    assert "Context too short: 2048 tokens, under 4k." in advice.reasons
    assert any("sparda 0.8" in line for line in advice.reasons)
    assert advise(view, limit=0.25).verdict == "use"


def test_memory_that_is_not_scarce_keeps_full():
    view = view_of(full(context_len=4096), good(context_len=4096))
    assert "Memory is not scarce: 409.6 MiB saved of 14.5 GiB in use while decoding, 2.8 %." in advise(view).reasons


def test_small_batch_keeps_full_when_time_is_the_goal():
    view = view_of(full(context_len=4096), good(context_len=4096))
    advice = advise(view, goal_name="tpot")
    assert advice.verdict == "keep"
    assert any(line.startswith("Batch too small: the cache is 3.5 % of the bytes") for line in advice.reasons)
    large = view_of(full(context_len=4096, batch_size=64), good(context_len=4096, batch_size=64))
    assert advise(large, goal_name="tpot").verdict == "use"


def test_a_limit_prefers_the_smallest_loss_that_meets_it():
    rows = (
        full(),
        make_row("window", 0.5, accuracy=0.97, accuracy_stderr=0),
        make_row("window", 0.95, accuracy=0.9, accuracy_stderr=0),
    )
    view = view_of(*rows)
    assert advise(view, 20).command == "method=window sparsity=0.95"
    assert advise(view, 20, limit=0.5).command == "method=window sparsity=0.5"
    assert advise(view, 20, limit=0.1).command == "method=window sparsity=0.95"
    assert advise(view, 2, limit=0.1).verdict == "keep"


@pytest.mark.parametrize(
    "rows, words",
    [
        ([good()], "full was not measured here"),
        ([full()], "only full was measured here"),
        ([full(flags=["baseline_broken"]), good()], "full itself fails this task"),
        ([full(status="oom_prefill"), good()], "full has no result"),
        ([full(), good()], "no accuracy was measured here"),
    ],
    ids=["no full", "no method", "broken", "out of memory", "no accuracy"],
)
def test_without_data_it_says_so(rows, words):
    if "accuracy" in words:
        for row in rows:
            row.accuracy = row.accuracy_stderr = None
    advice = advise(view_of(*rows))
    assert (advice.verdict, advice.command) == ("unknown", "")
    assert words in advice.headline


def test_no_full_names_the_command_that_measures_it():
    row = good(reproduce="python run.py method=sparda sparsity=0.8 method.pool=7 shape.context_len=16384 logger=none")
    assert advise(view_of(row)).reasons == ("Measure it first: python run.py method=full shape.context_len=16384 logger=none",)


def test_the_worst_task_counts():
    tasks = ("niah", "ruler_vt")
    rows = [full(task=task) for task in tasks] + [good(task=task) for task in tasks]
    rows[-1].accuracy = 0.5
    view = view_of(*rows, task=ALL_TASKS)
    assert [len(one.entries) for one in view.candidates] == [2, 2]
    assert view.candidates[1].accuracy == pytest.approx(0.74)
    assert advise(view, 30).verdict == "keep" and advise(view, 49).verdict == "use"
    assert "on ruler_vt" in " ".join(advise(view, 49).reasons)


def test_a_method_that_skipped_a_task_is_not_ranked_over_all_tasks():
    rows = full(task="niah"), full(task="ruler_vt"), good(task="niah")
    assert [one.label for one in view_of(*rows, task=ALL_TASKS).candidates] == ["full"]


def test_steps_are_the_advice_at_every_loss():
    """What the page looks up is what advise() says, and a barred row is in none of it."""
    barred = 0
    for view in views([Entry(row) for row in stress_rows()]):
        by_override = {one.overrides: one for one in view.candidates}
        for goal in GOALS:
            for limit in LIMITS:
                found = steps(view, goal, limit)
                for loss in (0, 0.5, 1, 2.5, 10, 50, 100):
                    advice = at(found, loss)
                    assert advice == advise(view, loss, goal, limit)
                    if advice.verdict == "use":
                        chosen = by_override[advice.command]
                        assert chosen.barred is None and -chosen.worst.low <= loss
        barred += sum(one.barred is not None for one in view.candidates)
    assert barred > 50
