"""compare: break-even by stepping through the byte model, pairs of the same cell only, verdicts that a row can bear."""

import pytest

from harness import compare
from harness.compare import break_even, pairs
from harness.report.rows import Entry
from tests.report.conftest import make_row, write_rows


def step_ms(row, context_len, batch_size):
    """The byte model, written out: what a step would take at another size."""
    weights = row.bound_ms_per_step * row.ceiling_gb_per_s * 1e6 - row.kv_read_bytes_per_step
    kv = row.kv_read_bytes_per_step * context_len * batch_size / (row.context_len * row.batch_size)
    return (weights + kv) / (row.ceiling_gb_per_s * 1e6) + row.tpot_ms_p50 - row.bound_ms_per_step


def slow(extra_ms, **fields):
    row = make_row("sparda", 0.8, **fields)
    row.tpot_ms_p50 += extra_ms
    return row


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("extra_ms", [0.05, 0.3, 2.0])
def test_break_even_is_where_the_model_crosses(batch_size, extra_ms):
    row, full = slow(extra_ms, batch_size=batch_size), make_row(batch_size=batch_size)
    found = break_even(row, full)
    at = found.context_len
    assert step_ms(row, at, batch_size) == pytest.approx(step_ms(full, at, batch_size))
    assert step_ms(row, at * 0.9, batch_size) > step_ms(full, at * 0.9, batch_size)
    assert step_ms(row, at * 1.1, batch_size) < step_ms(full, at * 1.1, batch_size)
    assert step_ms(row, 16384, found.batch_size) == pytest.approx(step_ms(full, 16384, found.batch_size))


def test_break_even_at_the_ends():
    full = make_row()
    assert break_even(slow(-0.1), full).context_len == 0
    same_bytes = slow(0.5, kv_read_bytes_per_step=full.kv_read_bytes_per_step)
    assert break_even(same_bytes, full).context_len == float("inf")
    assert break_even(make_row("sparda", 0.8, tpot_ms_p50=None), full).context_len is None


@pytest.mark.parametrize(
    "later_ms, faster_ms, expected",
    [(100, 1, 100), (0, 1, 0), (100, 0, float("inf")), (100, -1, float("inf"))],
)
def test_longer_first_token_is_repaid(later_ms, faster_ms, expected):
    full = make_row(ttft_ms=1000, tpot_ms_p50=10)
    row = make_row("sparda", 0.8, ttft_ms=1000 + later_ms, tpot_ms_p50=10 - faster_ms)
    assert break_even(row, full).num_tokens == expected


def entries(*rows):
    return [Entry(row) for row in rows]


def test_pairs_stand_in_the_same_cell():
    ours = entries(*(make_row("sparda", 0.8, context_len=length) for length in (4096, 16384)))
    full = entries(*(make_row(context_len=length) for length in (16384, 65536, 4096)))
    found = pairs(ours, full)
    assert [(one.row.context_len, other.row.context_len) for one, other in found] == [(4096, 4096), (16384, 16384)]


def test_ranks_stand_beside_the_same_number_of_ranks():
    """Bytes are those of one rank: half of them is no saving."""
    one, two = Entry(make_row("sparda", 0.8, tp_size=2)), [Entry(make_row(tp_size=size)) for size in (1, 2)]
    assert pairs([one, Entry(make_row("window", 0.8, task="other"))], two) == [(one, two[1])]


def test_the_same_budget_is_preferred():
    ours = entries(make_row("sparda", 0.8), make_row("sparda", 0.5))
    theirs = entries(make_row("window", 0.5), make_row("window", 0.8))
    assert [(one.row.sparsity, other.row.sparsity) for one, other in pairs(ours, theirs)] == [(0.8, 0.8), (0.5, 0.5)]


def test_no_pair_says_what_differs():
    ours = entries(make_row("sparda", 0.8, context_len=4096), make_row("sparda", 0.5, context_len=4096))
    with pytest.raises(ValueError, match="context_len 4096 and 16384") as err:
        pairs(ours, entries(make_row()))
    assert "\n" not in str(err.value)


def run(capsys, *arguments):
    code = compare.main([*map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_two_methods_from_the_store(tmp_path, capsys):
    eager = make_row(decode_impl="eager", tpot_ms_p50=30.0, config_hash="e" * 12)
    store = write_rows(tmp_path / "rows", [make_row(), slow(0.2), eager])
    code, out, _ = run(capsys, "sparda", store / f"{make_row().config_hash}.json", "--rows", store)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    words = " ".join(out.split())
    for expected in ("5.00x less", "decode, by context at batch 1: from", "of them KV", "GB/s", "noise", "launches cost"):
        assert expected in words, expected


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"device_name": "another GPU"}, "device_name NVIDIA H200 and another GPU"),
        ({"versions": {"python": "3.12.3", "torch": "2.13.0", "cuda": "13.0"}}, "torch 2.11.0 and 2.13.0"),
        ({"code_hash": "b" * 12}, "code_hash"),
        ({"flags": ["noisy"]}, "full is noisy"),
        ({"decode_impl": "eager"}, "decode_impl graph and eager"),
        ({"prefill_chunk": 1024}, "prefill_chunk – and 1024"),
    ],
    ids=["device", "version", "code", "noisy", "loop", "chunk"],
)
def test_times_that_cannot_be_compared_have_no_verdict(tmp_path, capsys, fields, why):
    folders = [write_rows(tmp_path / "a", [slow(0)]), write_rows(tmp_path / "b", [make_row(**fields)])]
    _, out, _ = run(capsys, *folders, "--rows", tmp_path / "none")
    words = " ".join(out.split())
    assert f"times are not comparable: {why}" in words
    assert "faster" not in words and "slower" not in words and "pays" not in words
    assert "5.00x less" in words, "bytes compare anywhere"


CPU = {"versions": {"python": "3.11", "torch": "2.13.0"}, "device_name": "a CPU"}


@pytest.mark.parametrize(
    "fields, seconds, in_turns",
    [({}, "00.2", True), ({}, "30", False), ({"flags": ["not_interleaved"]}, "00", False)],
    ids=["in turns", "later", "flagged"],
)
def test_a_cpu_gives_verdicts_only_in_turns(tmp_path, capsys, fields, seconds, in_turns):
    row = slow(0, **CPU, **fields, started_at=f"2026-12-01T03:00:{seconds}+00:00")
    folders = [write_rows(tmp_path / "a", [row]), write_rows(tmp_path / "b", [make_row(**CPU)])]
    _, out, _ = run(capsys, *folders, "--rows", tmp_path / "none")
    assert ("faster" in out) == in_turns
    assert ("times were taken in turns" in out) == in_turns
    assert ("timed on a CPU in different runs" in " ".join(out.split())) == (not in_turns)


def test_another_cell_is_named(tmp_path, capsys):
    folders = [write_rows(tmp_path / "a", [slow(0)]), write_rows(tmp_path / "b", [make_row(context_len=4096)])]
    _, out, _ = run(capsys, *folders, "--rows", tmp_path / "none")
    assert "! not the same cell: context_len 16384 and 4096" in out


def test_many_pairs_are_one_line_each(tmp_path, capsys):
    lengths = (4096, 8192, 16384, 32768)
    store = write_rows(
        tmp_path, [make_row(context_len=length) for length in lengths] + [slow(0, context_len=length) for length in lengths]
    )
    code, out, _ = run(capsys, "sparda", "full", "--rows", store)
    assert code == 0 and "4 pairs; accuracy in points" in out
    _, out, _ = run(capsys, "sparda", "full", "--rows", store, "--all")
    assert out.count("from where on the first pays") == 4


def test_a_name_that_is_nothing(tmp_path, capsys):
    store = write_rows(tmp_path, [make_row(), slow(0)])
    code, _, err = run(capsys, "spadra", "full", "--rows", store)
    assert code == 2 and "did you mean 'sparda'" in err and err.count("\n") == 1


def test_a_failed_row_is_shown_with_its_reason(tmp_path, capsys):
    failed = make_row("sparda", 0.8, status="oom_prefill", error="out of memory", tpot_ms_p50=None, accuracy=None)
    folders = [write_rows(tmp_path / "a", [failed]), write_rows(tmp_path / "b", [make_row()])]
    code, out, _ = run(capsys, *folders, "--rows", tmp_path / "none")
    assert code == 0 and "oom_prefill, out of memory" in out and "no decode step was measured" in out


def test_committed_example_rows(capsys):
    code, out, _ = run(capsys, "sparda", "full", "--rows", "docs/results/example", "--all")
    assert code == 0 and "from where on the first pays" in out and "why" in out
