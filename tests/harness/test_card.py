"""The card: 80 columns, no colour codes when piped, honest words, nothing that a long or missing value could break."""

import dataclasses
import io
import re
import shlex

import pytest

from harness.report.card import print_card, print_table
from harness.results import FLAGS, STATUSES, Row

MIB = 2**20
COMMON = {
    "status": "ok",
    "model": "smollm2-135m-32k",
    "task": "niah",
    "question": "visible",
    "kv_dtype": "fp32",
    "context_len": 1024,
    "batch_size": 1,
    "num_new_tokens": 128,
    "num_samples": 8,
    "device_name": "a CPU",
    "versions": {"python": "3.11", "torch": "2.13.0"},
    "started_at": "2026-12-01T00:00:00+00:00",
    "kernel_impl": "reference",
    "decode_impl": "eager",
    "ceiling_gb_per_s": 20.0,
}
FULL = Row(
    method="full",
    kv_resident_bytes=45 * MIB,
    kv_predicted_bytes=45 * MIB,
    kv_kept_ratio=1.0,
    kv_ledger={"kv": 45 * MIB},
    ttft_ms=1000.0,
    tpot_ms_p50=20.0,
    tpot_ms_p95=30.0,
    decode_tokens_per_s=50.0,
    bound_ratio=2.0,
    achieved_gb_per_s=10.0,
    accuracy=1.0,
    accuracy_stderr=0.0,
    **COMMON,
)
SPARSE = Row(
    method="sparda",
    sparsity=0.8,
    memory_class="freed",
    kv_resident_bytes=9 * MIB,
    kv_predicted_bytes=10 * MIB,
    kv_kept_ratio=0.2,
    kv_ledger={"kv": 8 * MIB, "index": 1 * MIB},
    ttft_ms=1250.0,
    tpot_ms_p50=10.0,
    tpot_ms_p95=30.1,
    decode_tokens_per_s=100.0,
    bound_ratio=1.5,
    achieved_gb_per_s=13.3,
    accuracy=0.5,
    accuracy_stderr=0.1,
    reproduce="python run.py method=sparda sparsity=0.8",
    **COMMON,
)


def drawn(*args, printer=print_card, encoding="utf-8") -> str:
    """What a pipe gets."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    printer(*args, file=file)
    file.flush()
    return raw.getvalue().decode(encoding)


def cells(text: str, label: str) -> list[str]:
    """Values of the line that starts with a label."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return [part for part in line.strip().removeprefix(label).split("  ") if part.strip()]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("KV cache held", ["9.0 MiB", "45.0 MiB", "5.00x less"]),
        ("kv ", ["8.0 MiB", "45.0 MiB"]),
        ("index", ["1.0 MiB", "–"]),
        ("predicted", ["10.0 MiB -10.0 %", "45.0 MiB exact"]),
        ("share of dense cache", ["20.0 %", "100.0 %"]),
        ("time to first token", ["1250 ms", "1000 ms", "1.25x slower"]),
        ("time per token, median", ["10.0 ms", "20.0 ms", "2.00x faster"]),
        ("time per token, p95", ["30.1 ms", "30.0 ms", "same"]),
        ("decode tokens/s", ["100", "50.0", "2.00x faster"]),
        ("prefill tokens/s", ["–", "–", "–"]),
        ("peak memory, prefill", ["–", "–", "–"]),
        ("time / bandwidth bound", ["1.5x", "2.0x"]),
        ("GB/s of copy speed", ["13.3 of 20.0", "10.0 of 20.0"]),
        ("accuracy", ["0.500 ± 0.100", "1.000 ± 0.000", "-0.500 worse"]),
        ("samples", ["8", "8"]),
    ],
    ids=lambda value: value.strip() if isinstance(value, str) else "",
)
def test_method_beside_full(label, expected):
    assert [value.strip() for value in cells(drawn(SPARSE, FULL), label)] == expected


def test_slower_is_shown_as_slower():
    text = drawn(dataclasses.replace(SPARSE, tpot_ms_p50=30.0, decode_tokens_per_s=25.0, kv_resident_bytes=90 * MIB), FULL)
    assert cells(text, "time per token, median")[-1].strip() == "1.50x slower"
    assert cells(text, "decode tokens/s")[-1].strip() == "2.00x slower"
    assert cells(text, "KV cache held")[-1].strip() == "2.00x more"


def test_small_gap_is_noise():
    text = drawn(dataclasses.replace(SPARSE, accuracy=0.85), FULL)
    assert cells(text, "accuracy")[-1].strip() == "-0.150, noise"


def test_quality_lines_only_when_known():
    assert "perplexity" not in drawn(SPARSE, FULL)
    text = drawn(dataclasses.replace(SPARSE, perplexity=12.0, top1_agreement=0.91, kl_nats=0.02), FULL)
    assert cells(text, "perplexity")[0].strip() == "12.0"
    assert cells(text, "same top token as full")[0].strip() == "91.0 %"
    assert cells(text, "KL to full, nats")[0].strip() == "0.0200"


def test_full_alone_has_one_column():
    text = drawn(FULL)
    assert "against full" not in text
    assert [value.strip() for value in cells(text, "KV cache held")] == ["45.0 MiB"]


def test_header_says_what_was_measured():
    text = drawn(SPARSE, FULL, "full: reused from outputs/rows/abc.json, 2026-11-30")
    # times of another moment are shown, but nobody is called faster
    assert "not in turns" in text and "faster" not in text and "slower" not in text
    assert "less" in text, "bytes compare at any time"
    for words in (
        "sparda on smollm2-135m-32k, task niah",
        "sparsity 0.8, kv_dtype fp32, context 1024, batch 1, 128 new tokens, seed 0",
        "question visible: compression has seen it",
        "memory freed: the bytes left memory",
        "kernels reference, decode eager",
        "status ok",
        "full: reused from outputs/rows/abc.json, 2026-11-30: its times are from then",
        "a CPU, python 3.11, torch 2.13.0",
        "python run.py method=sparda sparsity=0.8",
    ):
        assert words in text.splitlines() or words in text
    assert "kv_budget 0.25" in drawn(dataclasses.replace(SPARSE, kv_budget=0.25))


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_failure_is_plain(status):
    text = drawn(Row(status=status, method="window", error="what [went] wrong"), FULL)
    assert f"status {status}: what [went] wrong" in text
    assert cells(text, "time to first token")[-1].strip() == "–"
    assert f"full has no result, {status}" in drawn(SPARSE, Row(status=status, method="full"))


@pytest.mark.parametrize("flag", [*FLAGS, "one_of_tomorrow"])
def test_flags_are_explained(flag):
    assert f"! {flag}: " in drawn(dataclasses.replace(SPARSE, flags=[flag]))


LONG = dataclasses.replace(
    SPARSE,
    model="organisation/" + "m" * 150,
    method="method_" + "x" * 60,
    error="wrong " * 60,
    status="failed",
    kv_ledger={"kind_" + "k" * 60: 2**70},
    ttft_ms=1e12,
    decode_tokens_per_s=1e-9,
    device_name="d" * 200,
    reproduce="python run.py " + " ".join(f"method.knob_{i}=[{i},{i}]" for i in range(20)),
)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize(
    "pair",
    [(SPARSE, FULL), (LONG, FULL), (LONG, LONG), (Row(), None), (Row(), Row())],
    ids=["usual", "long", "longer", "blank", "blanks"],
)
def test_80_columns_without_colour_in_any_encoding(pair, encoding, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = drawn(*pair, encoding=encoding)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in drawn([*filter(None, pair)], printer=print_table).splitlines())


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("columns, widest", [(60, 60), (80, 80), (200, 80)])
@pytest.mark.parametrize("no_color", [True, False], ids=["NO_COLOR", "colour"])
def test_terminal_of_any_width(columns, widest, no_color, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    for printer, arguments in ((print_card, (SPARSE, FULL)), (print_table, ([FULL, SPARSE, LONG],))):
        screen = Terminal()
        printer(*arguments, file=screen)
        codes = set(re.findall(r"\x1b\[([0-9;]*)m", screen.getvalue()))
        assert bool({"31", "32", "33", "1;31"} & codes) == (not no_color)
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in screen.getvalue().splitlines()]
        assert max(map(len, lines)) <= widest
        assert [line for line in lines if line != line.rstrip()] == []
        # nothing is cut off: every value is there, whatever the width
        words = " ".join(lines)
        for word in ("45.0 MiB", "9.0 MiB", "1000 ms", "1250 ms", "20.0 ms", "0.500"):
            assert word in words


@pytest.mark.parametrize(
    "printer, arguments", [(print_card, (SPARSE, FULL)), (print_table, ([FULL, SPARSE],))], ids=["card", "table"]
)
def test_piped_text_has_no_blanks_at_ends(printer, arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = drawn(*arguments, printer=printer)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert max(map(len, text.splitlines())) > 60, "a pipe has no width: 80 columns"


def test_command_can_be_pasted():
    text = drawn(LONG)
    command = text[text.index("python run.py") :].replace("\\\n", "")
    assert shlex.split(command) == shlex.split(LONG.reproduce)


def test_reader_that_has_gone_costs_nothing():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    print_card(SPARSE, FULL, file=Gone())


def test_table_names_what_differs():
    hidden = dataclasses.replace(SPARSE, question="hidden", status="oom_decode", flags=["noop"])
    text = drawn([FULL, SPARSE, hidden], printer=print_table)
    assert "sparda question=visible" in text
    assert "! oom_decode" in text and "! noop" in text
    assert "context_len" not in text
    assert drawn([FULL, SPARSE], printer=print_table).count("question") == 0


def test_table_names_knobs_that_differ_and_not_a_dtype_that_was_never_chosen():
    wide = dataclasses.replace(SPARSE, knobs={"pool": 1, "sparsity": 0.8})
    narrow = dataclasses.replace(SPARSE, knobs={"pool": 7, "sparsity": 0.8}, kv_dtype="auto", status="failed")
    text = drawn([FULL, wide, narrow], printer=print_table)
    assert "pool=1" in text and "pool=7" in text
    assert "kv_dtype" not in text


def test_command_that_is_none_is_shown_as_it_is():
    assert "run.py 'oops" in drawn(dataclasses.replace(FULL, reproduce="python run.py 'oops"))


def test_verdict_of_paired_samples_takes_the_place_of_noise():
    paired = {"accuracy_diff": -0.5, "accuracy_diff_low": -0.8, "accuracy_diff_high": -0.2, "num_pairs": 8}
    text = drawn(dataclasses.replace(SPARSE, **paired, verdict="worse"), FULL)
    assert cells(text, "accuracy")[-1].strip() == "-0.500 worse"
    assert cells(text, "95 % interval")[-1].strip() == "-0.80 to -0.20"
    text = drawn(dataclasses.replace(SPARSE, **(paired | {"accuracy_diff": 0.0}), verdict="same"), FULL)
    assert cells(text, "accuracy")[-1].strip() == "same"


def test_no_win_against_a_broken_baseline():
    broken = dataclasses.replace(FULL, accuracy=0.1, flags=["baseline_broken"])
    text = drawn(dataclasses.replace(SPARSE, accuracy=0.9, flags=["baseline_broken"], verdict=None), broken)
    assert cells(text, "accuracy")[-1].strip() == "full fails" and "better" not in text
