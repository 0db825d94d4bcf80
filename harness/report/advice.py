"""What to use: for a wanted accuracy loss and a goal, the best method that the rows allow, or `keep full`, with the reasons.

Only rows decide. A method is never advised on a row that failed, that is flagged noop, simulated, untrained or
baseline_broken, or whose accuracy may be worse than full's by more than the wanted loss: the low end of the interval counts.
Under 4k tokens the field's rule holds: keep full, unless a limit was set that full does not meet.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import hypot

from harness.report.rows import Entry, config_labels, devices, full_command, is_full, on_busy_cpu, overrides_of, settings_of
from harness.report.text import factor, ms, number, percent, size, tokens

SHORT_CONTEXT, LONG_CONTEXT = 4096, 16384  # below: does not pay; from here on: suits redundant text
MIN_GAIN = 0.05  # a smaller gain is no reason to change anything
BARRING_FLAGS = ("noop", "simulated", "untrained", "baseline_broken")
LIMITS = (None, 0.75, 0.5, 0.25, 0.1)
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class Goal:
    name: str
    text: str
    metric: str
    shown: Callable[[float | None], str]
    words: tuple[str, str]
    barring_flags: tuple[str, ...] = ()


GOALS = {
    goal.name: goal
    for goal in (
        Goal("bytes", "fewest KV bytes held", "kv_resident_bytes", size, ("less", "more")),
        Goal("tpot", "least time per token", "tpot_ms_p50", ms, ("faster", "slower"), ("short_decode", "noisy")),
        Goal("ttft", "least time to first token", "ttft_ms", ms, ("faster", "slower")),
    )
}


@dataclass(frozen=True)
class Gap:
    """Accuracy minus full's in points (0.01), with the ends of its 95 % interval."""

    points: float
    low: float
    high: float
    paired: bool
    num_samples: int


def accuracy_gap(entry: Entry, full: Entry) -> Gap | None:
    """Gap between a row and full's: paired where both samples files are there, else from the two standard errors.

    None when either has no accuracy or no spread is known (one sample). Two standard errors on either side.
    """
    row, reference = entry.row, full.row
    if row.accuracy is None or reference.accuracy is None:
        return None
    own, theirs = _scores(entry), _scores(full)
    shared = sorted(own.keys() & theirs.keys())
    if len(shared) > 1 and len(shared) == row.num_samples == reference.num_samples:
        differences = [own[key] - theirs[key] for key in shared]
        mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
        return Gap(100 * mean, 100 * (mean - 2 * error), 100 * (mean + 2 * error), True, len(shared))
    if row.accuracy_stderr is None or reference.accuracy_stderr is None:
        return None
    mean, error = row.accuracy - reference.accuracy, hypot(row.accuracy_stderr, reference.accuracy_stderr)
    num_samples = min(row.num_samples or 0, reference.num_samples or 0)
    return Gap(100 * mean, 100 * (mean - 2 * error), 100 * (mean + 2 * error), False, num_samples)


def _scores(entry: Entry) -> dict[str, float]:
    return {
        str(line["id"]): line["score"] for line in entry.samples if isinstance(line.get("score"), int | float) and "id" in line
    }


@dataclass
class Candidate:
    """One method with its knobs in one view: its rows (tasks, seeds) and the full that it stands beside."""

    label: str
    method: str
    entries: list[Entry]
    full: "Candidate | None" = None

    @property
    def row(self):
        return self.entries[-1].row

    @property
    def is_full(self) -> bool:
        return is_full(self.row)

    @property
    def overrides(self) -> str:
        return overrides_of(self.row)

    def value(self, metric: str) -> float | None:
        """Median over the rows that know it."""
        known = [getattr(entry.row, metric) for entry in self.entries if getattr(entry.row, metric) is not None]
        return statistics.median(known) if known else None

    @property
    def accuracy(self) -> float | None:
        """Mean over the tasks and seeds."""
        known = [entry.row.accuracy for entry in self.entries]
        return None if None in known else statistics.fmean(known)

    @property
    def stderr(self) -> float | None:
        known = [entry.row.accuracy_stderr for entry in self.entries]
        return None if None in known else hypot(*known) / len(known)

    @property
    def flags(self) -> list[str]:
        return list(dict.fromkeys(flag for entry in self.entries for flag in entry.row.flags))

    @cached_property
    def gaps(self) -> dict[str, Gap | None]:
        """By task: the gap to full, averaged over seeds."""
        if self.full is None:
            return {}
        found: dict[str, list[Gap | None]] = {}
        for entry in self.entries:
            row = entry.row
            beside = [one for one in self.full.entries if (one.row.task, one.row.seed) == (row.task, row.seed)]
            found.setdefault(row.task, []).append(accuracy_gap(entry, beside[0]) if beside else None)
        return {task: _mean(gaps) for task, gaps in found.items()}

    @property
    def worst(self) -> Gap | None:
        """The gap of the task that may lose most; None when one of them is not known."""
        gaps = list(self.gaps.values())
        return None if not gaps or None in gaps else min(gaps, key=lambda gap: gap.low)

    @property
    def barred(self) -> str | None:
        """Why this can never be advised, whatever is wanted."""
        for entry in self.entries:
            if entry.row.status != "ok":
                return f"{entry.row.status}{f': {entry.row.error}' if entry.row.error else ''}"
        for flag in BARRING_FLAGS:
            if flag in self.flags:
                return flag
        return None


def _mean(gaps: list[Gap | None]) -> Gap | None:
    if None in gaps:
        return None
    points = statistics.fmean(gap.points for gap in gaps)
    half = hypot(*((gap.high - gap.low) / 2 for gap in gaps)) / len(gaps)
    return Gap(points, points - half, points + half, all(gap.paired for gap in gaps), sum(gap.num_samples for gap in gaps))


@dataclass
class View:
    """All candidates that may be set side by side: one model, device, context, batch, task (or all of them) and question."""

    model: str
    device: str
    context_len: int
    batch_size: int
    task: str
    question: str
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def title(self) -> str:
        question = f", question {self.question}" if self.question else ""
        what = f"{self.task}{question}, {tokens(self.context_len)} tokens, batch {self.batch_size}"
        return f"{self.model}: {what}, {self.device or 'unknown device'}"

    @property
    def full(self) -> Candidate | None:
        """The reference with the most rows."""
        return max((one for one in self.candidates if one.is_full), key=lambda one: len(one.entries), default=None)


def views(entries: list[Entry]) -> list[View]:
    """Every view of the rows, the most telling first; with several tasks that have an accuracy, one view over all of them."""
    labels = dict(zip(map(id, entries), config_labels([entry.row for entry in entries]), strict=True))
    grouped: dict[tuple, list[Entry]] = {}
    for entry in entries:
        row = entry.row
        setting = (row.model, devices(row), row.context_len, row.batch_size)
        grouped.setdefault((*setting, row.task, row.question), []).append(entry)
    for key in list(grouped):
        *setting, _, question = key
        scored = {
            task: found
            for (*other, task, asked), found in grouped.items()
            if (other, asked) == (setting, question)
            and task != ALL_TASKS
            and any(one.row.accuracy is not None for one in found)
        }
        if len(scored) > 1:
            grouped[(*setting, ALL_TASKS, question)] = [entry for found in scored.values() for entry in found]
    found = []
    for key, members in grouped.items():
        by_label: dict[str, dict[tuple, Entry]] = {}
        for entry in members:  # oldest first: a later row of the same task and seed takes the place of an earlier one
            by_label.setdefault(labels[id(entry)], {})[entry.row.task, entry.row.seed] = entry
        all_tasks = {task for chosen in by_label.values() for task, _ in chosen}
        candidates = [
            Candidate(label, rows[-1].row.method, rows) for label, rows in ((k, list(v.values())) for k, v in by_label.items())
        ]
        # a method that has not run all tasks of the view cannot be ranked by their mean
        candidates = [one for one in candidates if {entry.row.task for entry in one.entries} == all_tasks]
        references = [one for one in candidates if one.is_full]
        for one in candidates:
            one.full = max(references, key=lambda full: _likeness(one, full), default=None)
        candidates.sort(key=lambda one: (not one.is_full, one.method, one.label))
        if candidates:
            found.append(View(*key, candidates))
    return sorted(
        found, key=lambda view: (view.full is None, view.full is not None and view.full.accuracy is None, -len(view.candidates))
    )


def _likeness(one: Candidate, full: Candidate) -> int:
    """How alike two were run: the same kernels and decode loop first."""
    own, theirs = settings_of(one.row), settings_of(full.row)
    return sum(own.get(name) == theirs.get(name) for name in ("decode_impl", "impl"))


@dataclass(frozen=True)
class Advice:
    """verdict: use, keep or unknown. command: the override line of the method, empty unless verdict is use."""

    verdict: str
    headline: str
    command: str = ""
    reasons: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # every candidate that was not taken, and why


def advise(view: View, loss_points: float = 1.0, goal_name: str = "bytes", limit: float | None = None) -> Advice:
    """The best candidate whose accuracy interval stays within `loss_points` of full's.

    Args:
        goal_name: bytes, tpot or ttft. limit: share of full's value that must not be exceeded; then the candidate that loses
            least is chosen among those that meet it, else the one with the best value.
    """
    goal, full = GOALS[goal_name], view.full
    if full is None:
        command = full_command(view.candidates[0].row)
        return Advice("unknown", "No advice: full was not measured here", reasons=(f"Measure it first: {command}",))
    if full.barred == "baseline_broken":
        return Advice("unknown", "No advice: full itself fails this task", reasons=("No loss can be measured against it.",))
    if full.barred:
        return Advice("unknown", f"No advice: full has no result ({full.barred})", reasons=_sole_survivors(view))
    if full.accuracy is None:
        return Advice("unknown", "No advice: no accuracy was measured here", reasons=("Choose a view with an accuracy task.",))
    others = [one for one in view.candidates if not one.is_full]
    if not others:
        return Advice("unknown", "No advice: only full was measured here")
    reference = full.value(goal.metric)
    if not reference:
        return Advice("unknown", f"No advice: {goal.metric} of full is not known")
    refused, passing = {}, []
    for one in others:
        why = _refusal(one, goal, loss_points, limit)
        if why:
            refused[one.label] = why
        else:
            passing.append(one)
    not_taken = tuple(f"{label}: {why}" for label, why in refused.items())
    rule = _rule(view)
    if not passing:
        return Advice(
            "keep",
            "Keep full",
            reasons=(*_nearest(others, loss_points), *_diagnosis(view, full, goal), *rule),
            refused=not_taken,
        )

    def rank(one: Candidate) -> tuple:
        best = one.value(goal.metric)
        return (-one.worst.points, best) if limit is not None else (best, -one.worst.points)

    best = min(passing, key=rank)
    facts = _facts(best, goal)
    if limit is None and (why := _not_worth_it(view, full, best, goal)):
        return Advice(
            "keep", "Keep full", "", (why, *rule, f"The best that the rows allow is {best.label}: {facts[0]}"), not_taken
        )
    reasons = (*facts, *rule, *_caveats(best, goal, loss_points))
    return Advice("use", f"Use {best.label}", best.overrides, reasons, not_taken)


def _refusal(one: Candidate, goal: Goal, loss_points: float, limit: float | None) -> str | None:
    """Why a candidate cannot be taken for this goal; None when it can."""
    if one.barred:
        return one.barred
    if one.full is None or one.full.barred:
        return "no full beside it"
    value, reference = one.value(goal.metric), one.full.value(goal.metric)
    if not value or not reference:
        return f"{goal.metric} is not known"
    for flag in goal.barring_flags:
        if flag in one.flags or flag in one.full.flags:
            return f"{flag}, its times are no measurement" if flag in one.flags else f"full is {flag}, times cannot be compared"
    if goal.metric != "kv_resident_bytes" and on_busy_cpu(one.row, one.full.row):
        return "timed on a CPU, not in turns with full: another load decides"
    gap = one.worst
    if gap is None:
        return "the accuracy gap to full has no interval (too few samples)"
    if -gap.low > loss_points:
        return f"it may lose {number(-gap.low)} points (measured {gap.points:+.1f}, {gap.num_samples} samples)"
    if limit is not None and value > limit * reference:
        return f"{goal.shown(value)} is {percent(value / reference)} of full's {goal.shown(reference)}"
    if limit is None and value > (1 - MIN_GAIN) * reference:
        return f"no gain, {goal.shown(value)} where full has {goal.shown(reference)}"
    return None


def _facts(one: Candidate, goal: Goal) -> list[str]:
    """What taking it changes, the goal's metric first."""
    lines = []
    for each in sorted(GOALS.values(), key=lambda each: each is not goal):
        value, reference = one.value(each.metric), one.full.value(each.metric)
        if value and reference:
            what = {"bytes": "KV cache", "tpot": "time per token", "ttft": "time to first token"}[each.name]
            lines.append(
                f"{what} {each.shown(value)} instead of {each.shown(reference)}, {factor(value, reference, each.words)}."
            )
    gap, task = one.worst, min(one.gaps, key=lambda name: one.gaps[name].low)
    how = "paired" if gap.paired else "not paired"
    lines.append(
        f"Accuracy {gap.points:+.1f} points on {task}, between {gap.low:+.1f} and {gap.high:+.1f} "
        f"({gap.num_samples} samples, {how})."
    )
    return lines


def _nearest(others: list[Candidate], loss_points: float) -> list[str]:
    """The candidates that come closest to the wanted loss, where it is the loss that none of them keeps."""
    known = [one for one in others if not one.barred and one.worst is not None]
    if not known:
        return ["No other row here may be advised."]
    near = min(known, key=lambda one: -one.worst.low)
    if -near.worst.low <= loss_points:
        return ["No row that keeps the accuracy gains anything by this goal."]
    gap = near.worst
    return [
        f"No row surely keeps the accuracy. The nearest is {near.label}: {gap.points:+.1f} points, "
        f"between {gap.low:+.1f} and {gap.high:+.1f} ({gap.num_samples} samples, {'paired' if gap.paired else 'not paired'})."
    ]


def _rule(view: View) -> tuple[str, ...]:
    if view.context_len < SHORT_CONTEXT:
        return ("The field's rule: under 4k tokens a method does not pay.",)
    if view.context_len < LONG_CONTEXT:
        return ("The field's rule leaves 4k to 16k open: only a measurement on your own text decides.",)
    return ("The field's rule: from 16k tokens on, redundant text suits; code or maths may not.",)


def _not_worth_it(view: View, full: Candidate, best: Candidate, goal: Goal) -> str | None:
    """Why full stays although a candidate is better by the goal; None when the gain is worth it."""
    if view.context_len < SHORT_CONTEXT:
        return f"Context too short: {view.context_len} tokens, under 4k."
    memory, held = full.value("peak_decode_bytes"), full.value("kv_allocated_bytes")
    if goal.name == "bytes" and memory and held:
        saved = full.value("kv_resident_bytes") - best.value("kv_resident_bytes")
        if saved < MIN_GAIN * memory:
            return (
                f"Memory is not scarce: {size(saved)} saved of {size(memory)} in use while decoding, {percent(saved / memory)}."
            )
    return None


def _diagnosis(view: View, full: Candidate, goal: Goal) -> list[str]:
    """Why nothing gains: what full's own row says about the cell."""
    lines, row = [], full.row
    if view.context_len < SHORT_CONTEXT:
        lines.append(f"Context too short: {view.context_len} tokens, under 4k.")
    if goal.name == "tpot" and row.bound_ms_per_step and row.ceiling_gb_per_s and row.kv_read_bytes_per_step is not None:
        share = row.kv_read_bytes_per_step / (row.bound_ms_per_step * row.ceiling_gb_per_s * 1e6)
        if share < 0.25:
            lines.append(
                f"Batch too small: the cache is {percent(share)} of the bytes that a step of full reads, weights are the rest; "
                f"without any cache a step could be {1 / (1 - share):.2f}x faster at most."
            )
        if row.bound_ratio and row.bound_ratio > 3:
            lines.append(
                f"A step takes {row.bound_ratio:.1f}x its bandwidth bound: launches and small work, not bytes, set the time."
            )
    memory, held = full.value("peak_decode_bytes"), full.value("kv_allocated_bytes")
    if goal.name == "bytes" and memory and held and held < 0.1 * memory:
        lines.append(
            f"Memory is not scarce: full's cache is {percent(held / memory)} of the {size(memory)} in use while decoding."
        )
    return lines


def _caveats(one: Candidate, goal: Goal, loss_points: float) -> list[str]:
    lines, gap = [], one.worst
    # no disagreement in n samples still leaves 3 / n possible, with 95 % confidence
    if gap.num_samples and 300 / gap.num_samples > loss_points and gap.low == gap.high:
        lines.append(
            f"Caution: {gap.num_samples} samples without a difference cannot rule out a loss of "
            f"{300 / gap.num_samples:.0f} points."
        )
    if goal.metric != "kv_resident_bytes" and "not_interleaved" in one.flags:
        lines.append("Caution: timed at another moment than full, not in turns.")
    if "few_prefills" in one.flags and goal.name == "ttft":
        lines.append("Caution: fewer than 5 prefills were timed.")
    if one.row.question == "visible":
        lines.append("Compression has seen the question; where it must not, look at the view with the question hidden.")
    return lines


def _sole_survivors(view: View) -> tuple[str, ...]:
    """Methods that ran where full could not: worth knowing although no loss can be stated."""
    ran = [one.label for one in view.candidates if not one.is_full and not one.barred]
    return (f"These ran where full could not: {', '.join(ran)}. Their accuracy stands beside nothing.",) if ran else ()


def steps(view: View, goal_name: str, limit: float | None) -> list[tuple[float, Advice]]:
    """The advice for every wanted loss: (from this many points on, advice), in rising order; the page looks it up here."""
    losses = {0.0} | {-one.worst.low for one in view.candidates if one.worst is not None and 0 < -one.worst.low <= 100}
    # where the advice itself names a bound that a larger wanted loss would meet
    losses |= {300 / one.worst.num_samples for one in view.candidates if one.worst is not None and one.worst.num_samples}
    found: list[tuple[float, Advice]] = []
    for loss in sorted(losses):
        advice = advise(view, loss, goal_name, limit)
        if not found or found[-1][1] != advice:
            found.append((loss, advice))
    return found


def at(found: Iterable[tuple[float, Advice]], loss_points: float) -> Advice:
    """The step that holds at this loss."""
    return [advice for loss, advice in found if loss <= loss_points][-1]
